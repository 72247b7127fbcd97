"""One program a slot: three reads of its logits and of the target's, which stay in the L2 cache between them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    logits, target_logits, normaliser, rows, labels, ce_weights, tv_weights, ce, tv, vocab, BLOCK: tl.constexpr
):
    """See `loss._rows`: logits [n, V] are replaced by the gradient, ce and tv [n] are written."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    own, other = logits + i * vocab, target_logits + row * vocab
    log_p_sum = tl.load(normaliser + row)
    label = tl.load(labels + i)
    lanes = tl.arange(0, BLOCK)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        x = tl.load(own + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    best = tl.max(top, 0)
    log_q_sum = best + tl.log(tl.sum(total * tl.exp(top - best), 0))
    tl.store(ce + i, log_q_sum - tl.load(own + label).to(tl.float32))

    distance = tl.zeros((BLOCK,), tl.float32)
    signed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        x = tl.load(own + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        y = tl.load(other + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(x - log_q_sum), tl.exp(y - log_p_sum)
        distance += tl.abs(q - p)
        signed += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    tl.store(tv + i, tl.sum(distance, 0))
    mean_sign = tl.sum(signed, 0)

    a, b = tl.load(ce_weights + i), tl.load(tv_weights + i)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        x = tl.load(own + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        y = tl.load(other + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(x - log_q_sum), tl.exp(y - log_p_sum)
        sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
        grad = a * (q - tl.where(at == label, 1.0, 0.0)) + b * q * (sign - mean_sign)
        tl.store(own + at, grad.to(logits.dtype.element_ty), mask=at < vocab)


@triton.jit
def normalisers_kernel(logits, out, vocab, BLOCK: tl.constexpr):
    """out [m] float32 = log Σ exp of every row of logits [m, V]."""
    i = tl.program_id(0).to(tl.int64)
    own = logits + i * vocab
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        x = tl.load(own + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
    best = tl.max(top, 0)
    tl.store(out + i, best + tl.log(tl.sum(total * tl.exp(top - best), 0)))
