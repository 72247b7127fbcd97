"""The sequential stage on CUDA, in Triton. NOT YET RUN ON A GPU: checked in Triton's interpreter on a CPU only.

Two launches a slot, all captured in the draft's CUDA graph. `_advance` takes the previous token (the best of the last
slot's block maxima) and makes the Markov head's z of it; `_vocabulary` reads w2 once for up to 64 requests, in blocks
of the vocabulary, adds the base logits, stores them where probabilistic drafting needs them, and takes each block's
Gumbel maximum with vLLM's own random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32, spec_step_seed

from dspark_runtime.vllm.markov import DRAFT_SALT, Head

COLUMNS = 64  # of w2 and of the gates that are multiplied at a time
UNITS = 32  # of z that a program makes


def why_not(speculator: Any, head: Head | None, base: Tensor) -> str | None:
    """Why these kernels do not serve a step; None if they do."""
    if head is None:
        return "a drafter without a Markov head"
    if speculator._d2t_scatter_index is not None or speculator.model.draft_id_to_target_id is not None:
        return "a reduced draft vocabulary"
    if not base.dtype == head.w1.dtype == head.w2.dtype:
        return f"base logits in {base.dtype} beside a Markov head in {head.w2.dtype}"
    cache = speculator.draft_logits
    if cache is not None and cache.dtype != base.dtype:
        return f"base logits in {base.dtype}, their cache in {cache.dtype}"
    return None


@triton.jit
def _advance(
    anchors,  # [R]
    maxima,  # [R, blocks] of the previous slot
    places,  # [R, blocks] their token ids
    blocks,
    tokens,  # [R, K]
    w1,  # [V, r]
    gates,  # [R, K, C] the gates' part of the hidden states
    weight,  # [r, r] or [3 r, 2 r] of a row stride: the gates' columns over e, or [s; e]
    weight_stride,
    old_state,  # [R, r] float32
    new_state,
    z,  # [R, r]
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,  # 0 vanilla, 1 gated, 2 rnn
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two from `blocks` up
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if STEP == 0:
        previous = tl.load(anchors + row)
    else:
        j = tl.arange(0, BLOCKS)
        best = tl.argmax(tl.load(maxima + row * blocks + j, mask=j < blocks, other=float("-inf")), axis=0)
        previous = tl.load(places + row * blocks + best)
        if part == 0:
            tl.store(tokens + row * SLOTS + STEP - 1, previous)
    if STEP < SLOTS:
        unit = part * UNITS + tl.arange(0, UNITS)
        inside = unit < RANK
        e = tl.load(w1 + previous * RANK + unit, mask=inside, other=0.0).to(tl.float32)
        if KIND == 0:
            tl.store(z + row * RANK + unit, e, mask=inside)
        else:
            GATES: tl.constexpr = 1 if KIND == 1 else 3
            first = gates + (row * SLOTS + STEP) * GATES * RANK + unit
            a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
            b = tl.zeros([UNITS], tl.float32)
            o = tl.zeros([UNITS], tl.float32)
            if KIND == 2:
                b = tl.load(first + RANK, mask=inside, other=0.0).to(tl.float32)
                o = tl.load(first + 2 * RANK, mask=inside, other=0.0).to(tl.float32)
            for start in tl.static_range(0, RANK, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                real = column < RANK
                both = inside[:, None] & real[None, :]
                x = tl.load(w1 + previous * RANK + column, mask=real, other=0.0).to(tl.float32)
                at = weight + unit.to(tl.int64)[:, None] * weight_stride + column[None, :]
                if KIND == 1:
                    a += tl.sum(tl.load(at, mask=both, other=0.0).to(tl.float32) * x[None, :], axis=1)
                else:
                    s = tl.load(old_state + row * RANK + column, mask=real, other=0.0)
                    down = RANK * weight_stride
                    a += tl.sum(tl.load(at, mask=both, other=0.0).to(tl.float32) * s[None, :], axis=1)
                    a += tl.sum(tl.load(at + RANK, mask=both, other=0.0).to(tl.float32) * x[None, :], axis=1)
                    b += tl.sum(tl.load(at + down, mask=both, other=0.0).to(tl.float32) * s[None, :], axis=1)
                    b += tl.sum(tl.load(at + down + RANK, mask=both, other=0.0).to(tl.float32) * x[None, :], axis=1)
                    o += tl.sum(tl.load(at + 2 * down, mask=both, other=0.0).to(tl.float32) * s[None, :], axis=1)
                    o += tl.sum(tl.load(at + 2 * down + RANK, mask=both, other=0.0).to(tl.float32) * x[None, :], axis=1)
            keep = tl.sigmoid(a)
            if KIND == 1:
                tl.store(z + row * RANK + unit, keep * e, mask=inside)
            else:
                s = tl.load(old_state + row * RANK + unit, mask=inside, other=0.0)
                s = keep * s + (1 - keep) * (2 * tl.sigmoid(2 * b) - 1)  # tanh(b)
                tl.store(new_state + row * RANK + unit, s, mask=inside)
                tl.store(z + row * RANK + unit, 2 * tl.sigmoid(2 * o) - 1, mask=inside)


@triton.jit
def _vocabulary(
    z,  # [R, r]
    w2,  # [V, r]
    base,  # [R, K, V]
    base_row,
    base_slot,
    cache,  # [slots, K, V] or None: logits before temperature, by request
    cache_row,
    cache_slot,
    request,  # [R, K] row in cache, temperature and seeds; -1 for padding
    positions,  # [R, K] that the draft fills
    temperature,  # [slots]
    seeds,  # [slots]
    maxima,  # [R, blocks]
    places,
    rows,
    vocab,
    blocks,
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SALT: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    known, real = token < vocab, row < rows
    both = real[:, None] & known[None, :]
    wide = row.to(tl.int64)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.static_range(0, RANK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        some = column < RANK
        left = tl.load(z + wide[:, None] * RANK + column[None, :], mask=real[:, None] & some[None, :], other=0.0)
        at = w2 + token.to(tl.int64)[:, None] * RANK + column[None, :]
        right = tl.load(at, mask=known[:, None] & some[None, :], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    dtype = base.dtype.element_ty
    from_base = base + wide[:, None] * base_row + STEP * base_slot + token[None, :]
    # Rounded where vLLM's two operations round.
    logits = tl.load(from_base, mask=both, other=0.0).to(tl.float32) + acc.to(dtype).to(tl.float32)
    logits = logits.to(dtype)
    value = tl.where(both, logits.to(tl.float32), float("-inf"))
    if cache is not None:
        slot = tl.load(request + wide * SLOTS + STEP, mask=real, other=-1).to(tl.int64)
        live = slot >= 0
        to_cache = cache + slot[:, None] * cache_row + STEP * cache_slot + token[None, :]
        tl.store(to_cache, logits, mask=both & live[:, None])
        t = tl.load(temperature + slot, mask=live, other=0.0).to(tl.float32)
        seed = spec_step_seed(tl.load(seeds + slot, mask=live, other=0), STEP)
        position = tl.load(positions + wide * SLOTS + STEP, mask=real, other=0) - 1 + SALT
        u = murmur3_uniform32(seed[:, None], position[:, None], token[None, :])
        noise = -tl.log(-_log1p_neg_stable(u))
        warm = (t > 0)[:, None]
        drawn = value / tl.where(t > 0, t, 1.0)[:, None] + noise
        value = tl.where(both & warm, drawn, value)
    best, index = tl.max(value, axis=1, return_indices=True)
    tl.store(maxima + wide * blocks + block, best, mask=real)
    tl.store(places + wide * blocks + block, (block * TOKENS + index).to(tl.int64), mask=real)


def chain(head: Head, base: Tensor, hidden: Tensor, anchors: Tensor, speculator: Any) -> Tensor:
    """As `markov.chain` with the draws of `speculator`: base [R, K, V], hidden [R, K, d], anchors [R] int64 -> ids
    [R, K] int64. Writes speculator.draft_logits where there is one. No host reads."""
    r, k, vocab = base.shape
    rank = head.w1.shape[1]
    rows = min(64, max(16, triton.next_power_of_2(r)))
    width = 128 if rows <= 32 else 64
    blocks = triton.cdiv(vocab, width)
    gates, columns, kind = head.of_hidden(hidden), head.of_draft(), ("vanilla", "gated", "rnn").index(head.kind)
    cache = speculator.draft_logits
    strides = (0, 0) if cache is None else (cache.stride(0), cache.stride(1))
    maxima = base.new_empty(r, blocks, dtype=torch.float32)
    places = base.new_empty(r, blocks, dtype=torch.int64)
    tokens = base.new_empty(r, k, dtype=torch.int64)
    z = base.new_empty(r, rank)
    old, new = base.new_zeros(2, r, rank, dtype=torch.float32) if kind == 2 else (z, z)
    request, positions = speculator.sample_idx_mapping[: r * k], speculator.sample_pos[: r * k]

    def advance(step: int, parts: int) -> None:
        _advance[(r, parts)](
            anchors, maxima, places, blocks, tokens, head.w1, gates if kind else z, columns if kind else z,
            columns.stride(0) if kind else 0, old, new, z,
            STEP=step, SLOTS=k, KIND=kind, RANK=rank, BLOCKS=triton.next_power_of_2(blocks), UNITS=UNITS,
            COLUMNS=COLUMNS,
        )  # fmt: skip

    for step in range(k):
        advance(step, triton.cdiv(rank, UNITS))
        old, new = new, old
        _vocabulary[(blocks, triton.cdiv(r, rows))](
            z, head.w2, base, base.stride(0), base.stride(1), cache, *strides, request, positions,
            speculator.temperature, speculator.seeds, maxima, places, r, vocab, blocks,
            STEP=step, SLOTS=k, RANK=rank, ROWS=rows, TOKENS=width, COLUMNS=COLUMNS, SALT=DRAFT_SALT,
        )  # fmt: skip
    advance(k, 1)  # the last token only
    return tokens
