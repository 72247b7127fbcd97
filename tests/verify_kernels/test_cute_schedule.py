"""The split-KV schedule against an enumeration of every tile."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify_kernels.cute.attention.schedule import RECORD, schedule

CONTEXTS = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 777, 3000])


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(CONTEXTS, st.integers(0, 70)), min_size=1, max_size=6).filter(
        lambda rs: any(n for _, n in rs)
    ),
    group=st.sampled_from([1, 3, 4, 8]),
    kv_heads=st.sampled_from([1, 2, 8]),
    block_rows=st.sampled_from([64, 128, 256]),
    tile_n=st.sampled_from([64, 128]),
    units=st.sampled_from([1, 7, 132]),
    causal=st.booleans(),
    setup=st.sampled_from([0, 1, 2, 7]),
    first=st.sampled_from([0, 1, 5, 40]),
)
def test_every_tile_once(requests, group, kv_heads, block_rows, tile_n, units, causal, setup, first):
    contexts, lengths = [c for c, _ in requests], [n for _, n in requests]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    table = schedule(
        torch.tensor(contexts, dtype=torch.int32),
        offsets.int(),
        sum(lengths),
        group=group,
        kv_heads=kv_heads,
        block_rows=block_rows,
        tile_n=tile_n,
        units=units,
        causal=causal,
        setup=setup,
        first_query=first,
    )
    assert table.dtype == torch.int32 and table.shape[1] == RECORD
    rows = table.tolist()

    tiles = {}  # (request, head, row0) -> number of key tiles, in the order of the line
    for r, (context, length) in enumerate(requests):
        for row0 in range(0, length * group, block_rows):
            seen = min(length, -(-(row0 + block_rows) // group)) if causal else length
            for head in range(kv_heads):
                tiles[r, head, row0] = -(-(context + first + seen) // tile_n)

    found = {work: [] for work in tiles}
    share = -(-sum(n + setup for n in tiles.values()) // units)
    slots = set()
    for unit in range(units):
        count, rest = rows[unit][11:13]
        segments = [rows[unit], *rows[rest : rest + count - 1]] if count else []
        spent = 0
        for s in segments:
            r, head, row0, q_start, q_len, context, t0, t1, slot, first_unit, last_unit = s[:11]
            assert (q_start, q_len, context, s[13]) == (offsets[r], lengths[r], contexts[r], first)
            assert t0 < t1
            found[r, head, row0].append((t0, t1, unit, first_unit, last_unit, slot))
            spent += t1 - t0 + (setup if t0 == 0 else 0)
            if slot >= 0:
                assert slot == 2 * unit + (t0 == 0) and slot not in slots
                slots.add(slot)
        # A cut inside a setup moves before it, so the unit after it has up to one setup more.
        assert spent <= share + setup
    for work, n in tiles.items():
        parts = found[work]
        assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])] and parts[-1][1] == n
        assert [p[2] for p in parts] == list(range(parts[0][2], parts[-1][2] + 1))  # consecutive units: the combine's rule
        assert all(p[3:5] == (parts[0][2], parts[-1][2]) for p in parts)
        assert all((p[5] < 0) == (len(parts) == 1) for p in parts)
