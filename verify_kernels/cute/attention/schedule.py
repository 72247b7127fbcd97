"""The split-KV schedule of one pass: who reads which keys. Torch only, fixed shapes, no host read.

This is the specification; on a GPU `plan.py` makes the same table in one launch.

All work of a pass is one line of key tiles: for every (request, block of query rows), for every KV head, the tiles of
`tile_n` keys that the block attends. The line is cut into equal stretches, one for each unit (a persistent CTA, or the
`tile_m`-row CTAs of one row block). A stretch is a list of segments: a run of tiles of one (request, rows, KV head).
A segment that holds all tiles of its work writes the output; the others write partial results, which are combined.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ENTRIES = 4096  # blocks of query rows in a pass that `plan.py` has room for
RECORD = 16
"""int32 words of a segment: request, kv_head, row0, q_start, q_len, context, t0, t1, slot, first_unit, last_unit,
count, next, first_query, 0, 0.

row0 is the first query row (token * group + head in group) of the block; [t0, t1) are key tiles; slot is the partial
result's index, or -1 where the segment is its work's only one; first_unit..last_unit share the work.

Row u of the table is unit u's first segment; count is the unit's number of segments, and the others follow at row
`next`. first_query new tokens of the request come before its queries. So a unit starts after one read. Row units + w is the segment that begins work w (entry * kv_heads + head).
"""


def schedule(
    context_lens: Tensor,
    request_offsets: Tensor,
    num_tokens: int,
    *,
    group: int,
    kv_heads: int,
    block_rows: int,
    tile_n: int,
    units: int,
    causal: bool,
    setup: int = 0,
    first_query: int = 0,
) -> Tensor:
    """Cuts the pass into `units` stretches. Returns the table, [S, RECORD] int32.

    A unit that goes on to a new work pays for its queries and for the results of the old one: `setup` is that price, in
    tiles, and the stretches are equal with it.

    context_lens [R] int32, request_offsets [R + 1] int32, num_tokens N: rows of the flat batch; group = Hq / Hkv.
    first_query: see `verify_kernels.batch.PassBatch`.
    """
    device = context_lens.device
    context = context_lens.long()
    starts = request_offsets[:-1].long()
    lengths = request_offsets[1:].long() - starts

    # Entries: blocks of block_rows query rows of one request. Their number is bounded without reading a length.
    entries = context.shape[0] + num_tokens * group // block_rows
    ends = ((lengths * group + block_rows - 1) // block_rows).cumsum(0)
    entry = torch.arange(entries, device=device)
    request = torch.searchsorted(ends, entry, right=True)
    real = request < context.shape[0]
    request = request.clamp(max=context.shape[0] - 1)
    row0 = (entry - torch.where(request > 0, ends[(request - 1).clamp(min=0)], 0)) * block_rows
    seen = lengths[request]
    if causal:
        seen = torch.minimum(seen, (row0 + block_rows + group - 1) // group)
    tiles = torch.where(real, (context[request] + first_query + seen + tile_n - 1) // tile_n, 0)

    # The line: every work is its setup, then its tiles.
    cost = torch.where(tiles > 0, tiles + setup, 0)[:, None].expand(entries, kv_heads).flatten()
    ends = cost.cumsum(0)
    begins = ends - cost
    total = ends[-1]
    cuts = torch.minimum(torch.arange(units + 1, device=device) * ((total + units - 1) // units), total)
    # A cut inside a setup moves before it: a segment has at least one tile.
    begin = begins[torch.searchsorted(ends, cuts, right=True).clamp(max=ends.shape[0] - 1)]
    cuts = torch.where(cuts <= begin + setup, torch.minimum(cuts, begin), cuts)

    starts_of_units = torch.where(cuts[:-1] < cuts[1:], cuts[:-1], total)
    start = torch.cat([starts_of_units, begins])
    work = torch.searchsorted(ends, start, right=True).clamp(max=ends.shape[0] - 1)
    begin, end = begins[work], ends[work]
    unit, first, last = (torch.searchsorted(cuts[1:], x, right=True).clamp(max=units - 1) for x in (start, begin, end - 1))
    stop = torch.minimum(end, cuts[unit + 1])
    slot = torch.where(first == last, -1, 2 * unit + (start == begin))
    t0, t1 = (start - begin - setup).clamp(min=0), stop - begin - setup
    count = torch.searchsorted(ends, cuts[unit + 1] - 1, right=True) - work + 1
    e = work // kv_heads
    r = request[e]
    fields = [r, work % kv_heads, row0[e], starts[r], lengths[r], context[r], t0, t1, slot, first, last]
    fields += [count, units + work + 1, torch.full_like(r, first_query)]
    table = torch.stack(fields + [torch.zeros_like(r)] * (RECORD - len(fields)), dim=1)
    return torch.where((start < total)[:, None], table, 0).int()
