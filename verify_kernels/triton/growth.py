"""Growing trees: see `verify_kernels.reference.growth`. One program a request and level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.errors import INSTEAD, KernelError
from verify_kernels.reference.growth import Nodes
from verify_kernels.triton.select import largest, ordered, rank

__all__ = ["candidate_logits", "grow_level", "best_tree"]

MOST = 16384
"""Children of a level that one program compares."""


@triton.jit(
    do_not_specialize=["value_stride", "id_stride", "row_stride", "parents", "candidates"],
    do_not_specialize_on_alignment=["values", "ids", "rows"],
)
def _candidate_logits(
    values, value_stride, ids, id_stride, w2, table, rows, row_stride, temperature, logits, parents, candidates,
    RANK: tl.constexpr, W: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    w, m = tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, M)
    up, there = w < parents, m < candidates
    row = tl.load(rows + r * row_stride + w, mask=up, other=0)
    token = tl.load(ids + r * id_stride + m, mask=there, other=0)
    total = tl.zeros([W, M], tl.float32)
    for start in range(0, RANK, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        some = c < RANK
        z = tl.load(table + row[:, None] * RANK + c[None, :], mask=up[:, None] & some[None, :], other=0.0)
        x = tl.load(w2 + token[:, None] * RANK + c[None, :], mask=there[:, None] & some[None, :], other=0.0)
        total = tl.dot(z, tl.trans(x), total, input_precision="ieee")
    t = tl.load(temperature + r)
    value = tl.load(values + r * value_stride + m, mask=there, other=0.0)
    total = (total + value[None, :]) / tl.where(t > 0, t, 1.0)
    at = (r * parents + w[:, None]) * candidates + m[None, :]
    tl.store(logits + at, total, mask=up[:, None] & there[None, :])


def candidate_logits(
    values: Tensor, ids: Tensor, w2: Tensor, table: Tensor, rows: Tensor, temperature: Tensor
) -> Tensor:
    (r, m), w = values.shape, rows.shape[1]
    logits = values.new_empty(r, w, m)
    tile = 16
    _candidate_logits[(r, triton.cdiv(w, tile))](
        values, values.stride(0), ids, ids.stride(0), w2, table, rows, rows.stride(0), temperature, logits, w, m,
        RANK=w2.shape[1], W=tile, M=max(16, triton.next_power_of_2(m)), COLUMNS=64, num_warps=4,
    )  # fmt: skip
    return logits


@triton.jit(
    do_not_specialize=[
        "candidate_row", "candidate_parent", "stride", "level", "first", "out", "keep", "width", "count",
    ],  # fmt: skip
    do_not_specialize_on_alignment=["candidates"],
)
def _grow_level(
    q, candidates, candidate_row, candidate_parent, max_drafts, tokens, parents, scores, steps, stride, places, values,
    parent_of, level, first, out, keep, width, count,
    LOGITS: tl.constexpr, W: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    w, m = tl.arange(0, W), tl.arange(0, M)
    inside = (w < width)[:, None] & (m < count)[None, :]
    at = q + (r * width + w[:, None]) * count + m[None, :]
    if LOGITS:
        p = tl.load(at, mask=inside, other=float("-inf"))
        p = tl.exp(p - tl.max(p, axis=1)[:, None])
        p = p / tl.sum(p, axis=1)[:, None]
    else:
        p = tl.load(at, mask=inside, other=0.0)
    above = tl.load(scores + r * stride + first + w, mask=w < width, other=0.0)
    score = tl.where(level < tl.load(max_drafts + r), above[:, None] + tl.log(p), float("-inf"))
    keys = tl.reshape(tl.where(inside, ordered(score), 0).to(tl.uint32), [W * M])
    flat = tl.arange(0, W * M)
    chosen = largest(keys, keep)
    place = r * K + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(places + place, flat, mask=chosen)
    tl.store(values + place, tl.reshape(score, [W * M]), mask=chosen)
    tl.debug_barrier()
    lane = tl.arange(0, K)
    real = lane < keep
    flat = tl.load(places + r * K + lane, mask=real, other=0)
    score = tl.load(values + r * K + lane, mask=real, other=0.0)
    place = rank(tl.where(real, ordered(score), 0).to(tl.uint32), lane)
    parent, option = (flat // M).to(tl.int64), (flat % M).to(tl.int64)
    token = tl.load(candidates + r * candidate_row + parent * candidate_parent + option, mask=real, other=0)
    above = tl.load(scores + r * stride + first + parent, mask=real, other=0.0)
    at = r * stride + out + place
    tl.store(tokens + at, token, mask=real)
    tl.store(parents + at, first + parent, mask=real)
    tl.store(scores + at, score, mask=real)
    tl.store(steps + at, tl.exp(score - above), mask=real)
    tl.store(parent_of + r * keep + place, parent, mask=real)


def grow_level(
    nodes: Nodes,
    q: Tensor,
    candidates: Tensor,
    max_drafts: Tensor,
    level: int,
    first: int,
    out: int,
    keep: int,
    is_logits: bool = False,
) -> Tensor:
    """As the reference. Raises KernelError for more children than one program compares."""
    r, width, count = q.shape
    w, m, k = triton.next_power_of_2(width), triton.next_power_of_2(count), triton.next_power_of_2(keep)
    if w * m > MOST:
        raise KernelError(f"candidates: found {count} for each of {width} nodes, allowed: {MOST} in all, {INSTEAD}")
    candidates = candidates.contiguous()
    parent_of = candidates.new_empty(r, keep)
    places, values = candidates.new_empty(r, k, dtype=torch.int32), q.new_empty(r, k)
    _grow_level[(r,)](
        q.contiguous(), candidates, candidates.stride(0), candidates.stride(1) if candidates.shape[1] > 1 else 0,
        max_drafts, *nodes, nodes.tokens.stride(0), places, values, parent_of, level, first, out, keep, width, count,
        LOGITS=is_logits, W=w, M=m, K=k, num_warps=8 if w * m > 1024 else 4,
    )  # fmt: skip
    return parent_of


@triton.jit(do_not_specialize=["stride", "total", "size"])
def _best_tree(
    tokens, parents, scores, steps, stride, new_index, new_tokens, new_parents, new_steps, number, total, size,
    T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    node, lane = tl.arange(0, T), tl.arange(0, N)
    inside = node < total
    at = r * stride + node
    score = tl.load(scores + at, mask=inside, other=0.0)
    # NaN is no score.
    keys = tl.where(inside & (score > float("-inf")), ordered(score), 0).to(tl.uint32)
    chosen = largest(keys, size)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(new_index + r * T + node, place)
    padding = lane < size
    tl.store(new_tokens + r * size + lane, tl.full([N], -1, tl.int64), mask=padding)
    tl.store(new_parents + r * size + lane, tl.full([N], -1, tl.int64), mask=padding)
    tl.store(new_steps + r * size + lane, tl.zeros([N], tl.float32), mask=padding)
    tl.debug_barrier()
    above = tl.load(parents + at, mask=chosen, other=-1)
    above = tl.load(new_index + r * T + above, mask=chosen & (above >= 0), other=-1).to(tl.int64)
    tl.store(new_tokens + r * size + place, tl.load(tokens + at, mask=chosen, other=0), mask=chosen)
    tl.store(new_parents + r * size + place, above, mask=chosen)
    tl.store(new_steps + r * size + place, tl.load(steps + at, mask=chosen, other=0.0), mask=chosen)
    tl.store(number + r, tl.sum(chosen.to(tl.int64), axis=0))


def best_tree(nodes: Nodes, total: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r, t = nodes.tokens.shape[0], triton.next_power_of_2(total)
    tokens, parents = nodes.tokens.new_empty(2, r, size).unbind()
    steps, number = nodes.steps.new_empty(r, size), nodes.tokens.new_empty(r)
    index = nodes.tokens.new_empty(r, t, dtype=torch.int32)
    _best_tree[(r,)](
        *nodes, nodes.tokens.stride(0), index, tokens, parents, steps, number, total, size,
        T=t, N=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return tokens, parents, number, steps
