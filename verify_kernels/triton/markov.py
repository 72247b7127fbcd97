"""The sequential stage over the whole vocabulary: see `reference.drafting.draw_chain`. Two launches a slot, no host step.

`_advance` takes the token of the slot before, from what the blocks of the vocabulary left, and makes the Markov head's z
of it; `_vocabulary` reads w2 once for up to 64 requests, in blocks, adds the base logits, stores them where they are
asked for, and leaves each block's best token and mass. A draw by inverse CDF finds its block from the masses and its
token in the block; one by a noise of the caller's (Gumbel) is the best token of all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels import rng
from verify_kernels.markov import KINDS, Markov
from verify_kernels.triton.trees import uniform

__all__ = ["draw_chain"]

COLUMNS = 64  # of w2 and of the gates that are multiplied at a time
UNITS = 32  # of z that a program makes
_DRAFT = tl.constexpr(rng.DRAFT)


@triton.jit
def _drawn(maxima, masses, logits, blocks, vocab, t, u, BLOCKS: tl.constexpr, TOKENS: tl.constexpr):
    """Inverse CDF of softmax(logits [V] / t) at u, float64; never a token without mass. As `rng.sample`."""
    j = tl.arange(0, BLOCKS)
    best = tl.load(maxima + j, mask=j < blocks, other=float("-inf"))
    top = tl.max(best, axis=0)
    mass = tl.load(masses + j, mask=j < blocks, other=0.0) * tl.exp((best - top) / t)
    mass = tl.where(j < blocks, mass, 0.0).to(tl.float64)
    cdf = tl.cumsum(mass, axis=0)
    total = tl.max(cdf, axis=0)
    goal = u * total
    block = tl.minimum(tl.sum((cdf <= goal).to(tl.int32), axis=0), tl.sum((cdf < total).to(tl.int32), axis=0))
    goal = goal - tl.sum(tl.where(j == block, cdf - mass, 0.0), axis=0)
    i = tl.arange(0, TOKENS)
    token = block * TOKENS + i
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    cdf = tl.cumsum(tl.where(token < vocab, tl.exp((x - top) / t), 0.0).to(tl.float64), axis=0)
    last = tl.sum((cdf < tl.max(cdf, axis=0)).to(tl.int32), axis=0)
    return block * TOKENS + tl.minimum(tl.sum((cdf <= goal).to(tl.int32), axis=0), last)


@triton.jit(do_not_specialize=["step", "weight_stride"])
def _advance(
    anchors,  # [R]
    maxima,  # [R, blocks] of the slot before
    places,  # [R, blocks] their token ids
    masses,  # [R, blocks] sums of exp((logit - maximum) / temperature), or None
    blocks,
    vocab,
    step,
    tokens,  # [R, K]
    w1,  # [V, r]
    gates,  # [R, K, r or 3 r] the gates' part of the hidden states
    weight,  # [r, r] or [3 r, 2 r] of a row stride: the gates' columns over e, or [s; e]
    weight_stride,
    old_state,  # [R, r] float32
    new_state,
    z,  # [R, r]
    logits,  # [R, K, V] of row and slot strides, for draws from masses
    logit_row,
    logit_slot,
    temperature,  # [R]
    seeds,
    counters,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,  # 0 vanilla, 1 gated, 2 rnn
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two from `blocks` up
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    previous = tl.load(anchors + row)
    if step > 0:
        j = tl.arange(0, BLOCKS)
        best = tl.argmax(tl.load(maxima + row * blocks + j, mask=j < blocks, other=float("-inf")), axis=0)
        previous = tl.load(places + row * blocks + tl.minimum(best, blocks - 1))
        if masses is not None:
            t = tl.load(temperature + row).to(tl.float32)
            index = (step - 1).to(tl.int64) * vocab
            u = uniform(tl.load(seeds + row), tl.load(counters + row), _DRAFT, index)
            own = logits + row * logit_row + (step - 1) * logit_slot
            at = row * blocks
            drawn = _drawn(maxima + at, masses + at, own, blocks, vocab, tl.where(t > 0, t, 1.0), u, BLOCKS, TOKENS)
            previous = tl.where(t > 0, drawn.to(tl.int64), previous)
        if part == 0:
            tl.store(tokens + row * SLOTS + step - 1, previous)
    if step < SLOTS:
        unit = part * UNITS + tl.arange(0, UNITS)
        inside = unit < RANK
        e = tl.load(w1 + previous * RANK + unit, mask=inside, other=0.0).to(tl.float32)
        if KIND == 0:
            tl.store(z + row * RANK + unit, e, mask=inside)
        else:
            GATES: tl.constexpr = 1 if KIND == 1 else 3
            first = gates + (row * SLOTS + step) * GATES * RANK + unit
            a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
            b = tl.zeros([UNITS], tl.float32)
            o = tl.zeros([UNITS], tl.float32)
            if KIND == 2:
                b = tl.load(first + RANK, mask=inside, other=0.0).to(tl.float32)
                o = tl.load(first + 2 * RANK, mask=inside, other=0.0).to(tl.float32)
            for start in range(0, RANK, COLUMNS):
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


@triton.jit(do_not_specialize=["step", "rows"])
def _vocabulary(
    z,  # [R, r]
    w2,  # [V, r]
    base,  # [R, K, V] of row and slot strides
    base_row,
    base_slot,
    logits,  # [S, K, V] of row and slot strides, or None: before the temperature
    logit_row,
    logit_slot,
    request,  # [R, K] row of each in logits, temperature and seeds, -1 for padding; None: its own
    positions,  # [R, K], for the noise
    temperature,  # [S], or None: the best token
    seeds,  # [S]
    maxima,  # [R, blocks]
    places,
    masses,  # [R, blocks], or None
    rows,
    vocab,
    blocks,
    step,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NOISE: tl.constexpr,  # noise(seeds [ROWS, 1], step, positions [ROWS, 1], tokens [1, TOKENS]), or None
):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    known, real = token < vocab, row < rows
    both = real[:, None] & known[None, :]
    wide = row.to(tl.int64)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, RANK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        some = column < RANK
        left = tl.load(z + wide[:, None] * RANK + column[None, :], mask=real[:, None] & some[None, :], other=0.0)
        at = w2 + token.to(tl.int64)[:, None] * RANK + column[None, :]
        right = tl.load(at, mask=known[:, None] & some[None, :], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    from_base = base + wide[:, None] * base_row + step * base_slot + token[None, :]
    # Rounded where the product and the sum of a loop in torch are.
    value = tl.load(from_base, mask=both, other=0.0).to(tl.float32) + acc.to(w2.dtype.element_ty).to(tl.float32)
    if logits is None:
        value = value.to(base.dtype.element_ty).to(tl.float32)
    else:
        slot = wide
        if request is not None:
            slot = tl.load(request + wide * SLOTS + step, mask=real, other=-1).to(tl.int64)
        live = real & (slot >= 0)
        rounded = value.to(logits.dtype.element_ty)
        out = logits + slot[:, None] * logit_row + step * logit_slot + token[None, :]
        tl.store(out, rounded, mask=known[None, :] & live[:, None])
        value = rounded.to(tl.float32)
        t = tl.load(temperature + slot, mask=live, other=0.0).to(tl.float32)
        scale = tl.where(t > 0, t, 1.0)[:, None]
        if NOISE is not None:
            seed = tl.load(seeds + slot, mask=live, other=0)
            position = tl.load(positions + wide * SLOTS + step, mask=real, other=0)
            drawn = value / scale + NOISE(seed[:, None], step, position[:, None], token[None, :])
            value = tl.where((t > 0)[:, None], drawn, value)
    value = tl.where(both & (value == value), value, float("-inf"))  # a broken row still has an index
    best, index = tl.max(value, axis=1, return_indices=True)
    tl.store(maxima + wide * blocks + block, best, mask=real)
    tl.store(places + wide * blocks + block, (block * TOKENS + index).to(tl.int64), mask=real)
    if masses is not None:
        weight = tl.where(both, tl.exp((value - best[:, None]) / scale), 0.0)
        tl.store(masses + wide * blocks + block, tl.sum(weight, axis=1), mask=real)


def vocabulary_chain(
    head: Markov,
    base: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    *,
    logits: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    counters: Tensor | None = None,
    request: Tensor | None = None,
    positions: Tensor | None = None,
    noise: Any = None,
) -> Tensor:
    """One draft after the other over the whole vocabulary: base logits [R, K, V], hidden [R, K, d] after the final norm,
    anchors [R] int64 -> ids [R, K] int64. No host reads.

    Without `logits` the best token of each slot. logits [S, K, V] takes the logits before the temperature and has rows of
    its own: request [R, K] says which (-1: a padding row's are not written), as for temperature [S] and seeds [S] int64;
    None: the same. Rows of temperature 0 take the best token, the others draw: with `noise`, a Triton function (see
    `_vocabulary`) of seeds, slot, positions [R, K] and tokens that is added to logits / temperature; without, by inverse
    CDF at `rng.uniform(seeds, counters [R], rng.DRAFT, slot * V)`.
    """
    (r, k, vocab), rank = base.shape, head.w1.shape[1]
    rows = min(64, max(16, triton.next_power_of_2(r)))
    width = 128 if rows <= 32 else 64
    blocks = triton.cdiv(vocab, width)
    gates, columns, kind = head.of_hidden(hidden), head.of_draft(), KINDS.index(head.kind)
    by_mass = logits is not None and noise is None
    strides = (0, 0) if logits is None else (logits.stride(0), logits.stride(1))
    maxima = base.new_empty(r, blocks, dtype=torch.float32)
    masses = base.new_empty(r, blocks, dtype=torch.float32) if by_mass else None
    places = base.new_empty(r, blocks, dtype=torch.int64)
    tokens = base.new_empty(r, k, dtype=torch.int64)
    z = head.w1.new_empty(r, rank)
    old, new = base.new_zeros(2, r, rank, dtype=torch.float32) if kind == 2 else (z, z)

    def advance(step: int, parts: int) -> None:
        _advance[(r, parts)](
            anchors, maxima, places, masses, blocks, vocab, step, tokens, head.w1, gates if kind else z,
            columns if kind else z, columns.stride(0) if kind else 0, old, new, z, logits, *strides, temperature, seeds,
            counters, SLOTS=k, KIND=kind, RANK=rank, BLOCKS=triton.next_power_of_2(blocks), TOKENS=width, UNITS=UNITS,
            COLUMNS=COLUMNS,
        )  # fmt: skip

    for step in range(k):
        advance(step, triton.cdiv(rank, UNITS))
        old, new = new, old
        _vocabulary[(blocks, triton.cdiv(r, rows))](
            z, head.w2, base, base.stride(0), base.stride(1), logits, *strides, request, positions, temperature, seeds,
            maxima, places, masses, r, vocab, blocks, step, SLOTS=k, RANK=rank, ROWS=rows, TOKENS=width,
            COLUMNS=COLUMNS, NOISE=noise,
        )  # fmt: skip
    advance(k, 1)  # the last token only
    return tokens


def draw_chain(
    base: Tensor, hidden: Tensor, roots: Tensor, head: Markov, temperature: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    (r, k, vocab), device = base.shape, base.device
    logits = base.new_empty(r, k, vocab, dtype=torch.float32)
    tokens = vocabulary_chain(
        head, base, hidden, roots, logits=logits, temperature=temperature, seeds=seeds, counters=counters
    )
    probs = torch.zeros(r, k + 1, vocab, device=device)
    warm = (temperature > 0)[:, None, None]
    law = (logits / torch.where(warm, temperature[:, None, None], 1.0)).softmax(-1)
    certain = torch.zeros_like(law).scatter_(-1, tokens[..., None], 1.0)
    probs[:, :k] = torch.where(warm & (law.sum(-1, keepdim=True) > 0), law, certain)
    return tokens, probs
