"""Around a block drafter's layers: see `verify_kernels.reference.drafting`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.markov import KINDS, Markov
from verify_kernels.triton.select import largest, ordered, rank

__all__ = ["append_context", "top", "draft_chain"]

GROUP = 64  # logits that are compared as one first
GROUPS = 32  # of a program


@triton.jit(do_not_specialize=["k_layer", "v_layer"])
def _append_context(
    kv, k_pages, v_pages, k_layer, v_layer, slots, positions, cos_sin, k_norms, eps,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, lane = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    inside = (head < HEADS) & (lane < HALF)
    at = head * (2 * HALF) + lane
    width = HEADS * 2 * HALF
    keys = kv + (token * LAYERS + layer) * 2 * width + at
    low, high = tl.load(keys, mask=inside, other=0.0), tl.load(keys + HALF, mask=inside, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if k_norms is not None:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        norm = k_norms + layer * 2 * HALF + lane
        a = a * scale * tl.load(norm, mask=lane < HALF, other=0.0).to(tl.float32)
        b = b * scale * tl.load(norm + HALF, mask=lane < HALF, other=0.0).to(tl.float32)
        a, b = a.to(low.dtype).to(tl.float32), b.to(low.dtype).to(tl.float32)
    turn = cos_sin + tl.load(positions + token) * (2 * HALF) + lane
    cos, sin = tl.load(turn, mask=lane < HALF, other=0.0), tl.load(turn + HALF, mask=lane < HALF, other=0.0)
    slot = tl.load(slots + token) * width
    out = k_pages + layer * k_layer + slot + at
    tl.store(out, (a * cos - b * sin).to(low.dtype), mask=inside)
    tl.store(out + HALF, (b * cos + a * sin).to(low.dtype), mask=inside)
    out = v_pages + layer * v_layer + slot + at
    tl.store(out, tl.load(keys + width, mask=inside, other=0.0), mask=inside)
    tl.store(out + HALF, tl.load(keys + width + HALF, mask=inside, other=0.0), mask=inside)


def append_context(
    kv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_norms: Tensor | None,
    eps: float,
) -> None:
    n, layers, _, heads, dim = kv.shape
    _append_context[(n, layers)](
        kv.contiguous(), k_pages, v_pages, k_pages.stride(0), v_pages.stride(0), slots, positions, cos_sin, k_norms,
        eps, LAYERS=layers, HEADS=heads, HALF=dim // 2, H=triton.next_power_of_2(heads),
        D=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _group_maxima(logits, stride, maxima, vocab, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    tl.store(maxima + row * groups + group, tl.max(x, axis=1), mask=group < groups)


@triton.jit(do_not_specialize=["count"])
def _top(
    logits, stride, maxima, places, values, ids, vocab, groups, count,
    GROUP: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    # The best groups hold the best entries: as many groups as entries are wanted.
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, N)
    best = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
    chosen = largest(tl.where(group < groups, ordered(best), 0).to(tl.uint32), count)
    scratch = places + row * M
    lanes = tl.arange(0, M)
    tl.store(scratch + lanes, tl.zeros([M], tl.int32) - 1)
    tl.debug_barrier()
    tl.store(scratch + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, group, mask=chosen)
    tl.debug_barrier()
    flat = tl.arange(0, M * GROUP)
    group = tl.load(scratch + flat // GROUP)
    token = group * GROUP + flat % GROUP
    real = (group >= 0) & (token < vocab)
    x = tl.load(logits + row * stride + token, mask=real, other=0.0).to(tl.float32)
    chosen = largest(tl.where(real, ordered(x), 0).to(tl.uint32), count)
    tl.debug_barrier()
    tl.store(scratch + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, token, mask=chosen)
    tl.debug_barrier()
    inside = lanes < count
    token = tl.load(scratch + lanes, mask=inside, other=0)
    x = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    place = rank(tl.where(inside, ordered(x), 0).to(tl.uint32), lanes)
    tl.store(values + row * count + place, x, mask=inside)
    tl.store(ids + row * count + place, token.to(tl.int64), mask=inside)


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As the reference; equal entries by id. A NaN counts as largest."""
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP)
    maxima = logits.new_empty(rows, groups, dtype=torch.float32)
    m = triton.next_power_of_2(count)
    places = logits.new_empty(rows, m, dtype=torch.int32)
    values = logits.new_empty(rows, count, dtype=torch.float32)
    ids = logits.new_empty(rows, count, dtype=torch.int64)
    _group_maxima[(rows, triton.cdiv(groups, GROUPS))](
        logits, logits.stride(0), maxima, vocab, groups, GROUP=GROUP, GROUPS=GROUPS, num_warps=4
    )
    _top[(rows,)](
        logits, logits.stride(0), maxima, places, values, ids, vocab, groups, count,
        GROUP=GROUP, N=triton.next_power_of_2(groups), M=m, num_warps=8,
    )  # fmt: skip
    return values, ids


@triton.jit
def _rows_dot(weight, stride, unit, inside, vector, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """weight[unit, :RANK] @ vector, which lies in memory."""
    total = tl.zeros(unit.shape, tl.float32)
    for start in range(0, RANK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        real = column < RANK
        x = tl.load(vector + column, mask=real, other=0.0).to(tl.float32)
        w = tl.load(weight + unit[:, None] * stride + column[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    return total


@triton.jit
def _draft_chain(
    values, ids, gates, weight, weight_stride, w1, w2, roots, max_drafts, temperature, target_ids, sure_hidden,
    sure_weight, sure_temperatures, states, tokens, parents, count, sure,
    SLOTS: tl.constexpr, KIND: tl.constexpr, RANK: tl.constexpr, CANDIDATES: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    previous = tl.load(roots + row)
    limit = tl.minimum(tl.load(max_drafts + row), SLOTS)
    t = tl.load(temperature + row).to(tl.float32)
    t = tl.where(t > 0, t, 1.0)
    m, c = tl.arange(0, M), tl.arange(0, R)
    inside = c < RANK
    out = row * (SLOTS + 1)
    tl.store(tokens + out, previous)
    tl.store(parents + out, -1)
    tl.store(sure + out, 1.0)
    tl.store(count + row, limit + 1)
    if KIND == 2:
        tl.store(states + row * 2 * RANK + c, tl.zeros([R], tl.float32), mask=inside)
        tl.debug_barrier()
    for k in range(SLOTS):
        at = row * SLOTS + k
        logit = tl.load(values + at * CANDIDATES + m, mask=m < CANDIDATES, other=float("-inf"))
        token = tl.load(ids + at * CANDIDATES + m, mask=m < CANDIDATES, other=0)
        if KIND >= 0:
            first = w1 + previous * RANK
            e = tl.load(first + c, mask=inside, other=0.0)
            z = e.to(tl.float32)
            if KIND == 1:
                gate = tl.load(gates + at * RANK + c, mask=inside, other=0.0).to(tl.float32)
                gate += _rows_dot(weight, weight_stride, c, inside, first, RANK, COLUMNS)
                z = tl.sigmoid(gate) * z
            if KIND == 2:
                old, new = states + (row * 2 + k % 2) * RANK, states + (row * 2 + 1 - k % 2) * RANK
                gate = gates + at * 3 * RANK + c
                down = RANK * weight_stride
                g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
                g += _rows_dot(weight, weight_stride, c, inside, old, RANK, COLUMNS)
                g += _rows_dot(weight + RANK, weight_stride, c, inside, first, RANK, COLUMNS)
                b = tl.load(gate + RANK, mask=inside, other=0.0).to(tl.float32)
                b += _rows_dot(weight + down, weight_stride, c, inside, old, RANK, COLUMNS)
                b += _rows_dot(weight + down + RANK, weight_stride, c, inside, first, RANK, COLUMNS)
                o = tl.load(gate + 2 * RANK, mask=inside, other=0.0).to(tl.float32)
                o += _rows_dot(weight + 2 * down, weight_stride, c, inside, old, RANK, COLUMNS)
                o += _rows_dot(weight + 2 * down + RANK, weight_stride, c, inside, first, RANK, COLUMNS)
                keep = tl.sigmoid(g)
                state = keep * tl.load(old + c, mask=inside, other=0.0) + (1 - keep) * (2 * tl.sigmoid(2 * b) - 1)
                tl.store(new + c, state, mask=inside)
                z = 2 * tl.sigmoid(2 * o) - 1  # tanh
                tl.debug_barrier()
            z = z.to(e.dtype).to(tl.float32)
            rows = tl.load(
                w2 + token[:, None] * RANK + c[None, :], mask=(m < CANDIDATES)[:, None] & inside[None, :], other=0.0
            )
            logit += tl.sum(rows.to(tl.float32) * z[None, :], axis=1)
        logit = logit / t
        best = tl.max(logit, axis=0)
        chance = 1.0 / tl.sum(tl.exp(logit - best), axis=0)
        previous = tl.sum(tl.where(m == tl.argmax(logit, axis=0), token, 0), axis=0)
        if target_ids is not None:
            previous = tl.load(target_ids + previous)
        if sure_hidden is not None:
            s = tl.load(sure_hidden + at).to(tl.float32)
            if sure_weight is not None:
                s += tl.sum(e.to(tl.float32) * tl.load(sure_weight + c, mask=inside, other=0.0).to(tl.float32), axis=0)
            if sure_temperatures is not None:
                s = s / tl.load(sure_temperatures + k)
            chance = tl.sigmoid(s)
        real = k < limit
        tl.store(tokens + out + k + 1, tl.where(real, previous, -1))
        tl.store(parents + out + k + 1, tl.where(real, k, -1))
        tl.store(sure + out + k + 1, chance)


def draft_chain(
    values: Tensor,
    ids: Tensor,
    hidden: Tensor,
    roots: Tensor,
    max_drafts: Tensor,
    temperature: Tensor,
    head: Markov | None,
    target_ids: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    confidence_temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference, in one launch of one program a request, and one product before it for gates and confidence."""
    r, slots, candidates = values.shape
    kind = -1 if head is None else KINDS.index(head.kind)
    rank = 1 if head is None else head.w1.shape[1]
    gates, weight = (None, None) if head is None else (head.of_hidden(hidden), head.of_draft())
    sure_hidden = sure_weight = None
    if confidence is not None:
        full, bias = confidence
        d = hidden.shape[2]
        sure_hidden = torch.nn.functional.linear(hidden, full[:, :d], bias)
        sure_weight = full[0, d:] if full.shape[1] > d else None
    tokens, parents = ids.new_empty(2, r, slots + 1).unbind()
    count, sure = ids.new_empty(r), values.new_empty(r, slots + 1)
    _draft_chain[(r,)](
        values, ids, gates, weight, 0 if weight is None else weight.stride(0), None if head is None else head.w1,
        None if head is None else head.w2, roots, max_drafts, temperature, target_ids, sure_hidden, sure_weight,
        confidence_temperatures, values.new_empty(r, 2, rank) if kind == 2 else None, tokens, parents, count, sure,
        SLOTS=slots, KIND=kind, RANK=rank, CANDIDATES=candidates, M=triton.next_power_of_2(candidates),
        R=max(16, triton.next_power_of_2(rank)), COLUMNS=32, num_warps=8,
    )  # fmt: skip
    return tokens, parents, count, sure
