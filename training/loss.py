"""The vocabulary losses of a block, fused: logits are made, read and turned into their gradient chunk by chunk.

One slot touches the whole vocabulary twice (its own logits and the target's). Kept for a batch of 57k slots these would
be 11 GB each in float32 and several passes; here a chunk's logits are one bf16 product, and one kernel replaces them in
place by the loss's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_losses(
    hidden: Tensor,
    z: Tensor | None,
    lm_head: Tensor,
    w2: Tensor | None,
    target_logits: Tensor,
    rows: Tensor,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    chunk: int = 8192,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (loss scalar float32, cross-entropies [n] and distances ‖q - p‖₁ [n], both float32 and without gradient).

    Slot i has logits lm_head @ hidden[i] + w2 @ z[i], their softmax is q; p is the softmax of target_logits[rows[i]].
    loss = Σ_i ce_weights[i] CE_i + tv_weights[i] ‖q_i - p_i‖₁ (the norm itself, not half of it, as DeepSpec weighs it).
    Gradients: hidden [n, d], z [n, r], w2 [V, r]; the frozen lm_head [V, d] gets none. target_logits [m, V] of any
    float type, rows and labels [n] int64.
    """
    return _BlockLosses.apply(
        hidden, z, lm_head, w2, target_logits, rows, labels, ce_weights.float(), tv_weights.float(), chunk
    )


class _BlockLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, z, lm_head, w2, target_logits, rows, labels, ce_weights, tv_weights, chunk):  # noqa: ANN001
        dtype = lm_head.dtype
        x, weight = hidden.to(dtype), lm_head
        if z is not None:
            x, weight = torch.cat((x, z.to(dtype)), 1), torch.cat((lm_head, w2.to(dtype)), 1)
        n, d = hidden.shape
        ce, tv = (torch.empty(n, dtype=torch.float32, device=x.device) for _ in range(2))
        grad_x = torch.empty_like(x)
        grad_w2 = None if w2 is None else torch.zeros(w2.shape, dtype=torch.float32, device=x.device)
        normaliser = _normalisers(target_logits)
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            logits = x[part] @ weight.T
            turn = _rows_triton if logits.is_cuda else _rows
            turn(logits, target_logits, normaliser, rows[part], labels[part], ce_weights[part], tv_weights[part], ce[part], tv[part])
            torch.mm(logits, weight, out=grad_x[part])
            if grad_w2 is not None:
                grad_w2 += logits.T @ x[part, d:]
        ctx.save_for_backward(grad_x, grad_w2)
        ctx.d, ctx.dtypes = d, (hidden.dtype, None if z is None else z.dtype, None if w2 is None else w2.dtype)
        ctx.mark_non_differentiable(ce, tv)
        return (ce_weights * ce + tv_weights * tv).sum(), ce, tv

    @staticmethod
    def backward(ctx, grad, *unused):  # noqa: ANN001
        grad_x, grad_w2 = ctx.saved_tensors
        hidden, z, w2 = ctx.dtypes
        first = (grad_x[:, : ctx.d] * grad).to(hidden)
        second = None if z is None else (grad_x[:, ctx.d :] * grad).to(z)
        third = None if w2 is None else (grad_w2 * grad).to(w2)
        return first, second, None, third, None, None, None, None, None, None


def _normalisers(logits: Tensor) -> Tensor:
    """log Σ exp of every row, float32, without a float32 copy of the whole."""
    if not logits.is_cuda:
        return torch.cat([part.double().logsumexp(1) for part in logits.split(64)]).float()
    from training.loss_triton import normalisers_kernel

    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    normalisers_kernel[(len(logits),)](logits, out, logits.shape[1], BLOCK=4096, num_warps=8)
    return out


def _rows(
    logits: Tensor,
    target_logits: Tensor,
    normaliser: Tensor,
    rows: Tensor,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    ce: Tensor,
    tv: Tensor,
) -> None:
    """logits [c, V] become the gradient of the losses; ce and tv [c] are filled. The specification of the kernel."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_q = x.log_softmax(1)
    q, p = log_q.exp(), (target_logits[rows].to(x.dtype) - normaliser[rows, None]).exp()
    ce.copy_(-log_q.gather(1, labels[:, None]).squeeze(1))
    tv.copy_((q - p).abs().sum(1))
    sign = (q - p).sign()
    grad = tv_weights[:, None] * q * (sign - (q * sign).sum(1, keepdim=True))
    one_hot = torch.zeros_like(q).scatter_(1, labels[:, None], 1.0)
    logits.copy_(grad + ce_weights[:, None] * (q - one_hot))


def _rows_triton(
    logits: Tensor,
    target_logits: Tensor,
    normaliser: Tensor,
    rows: Tensor,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    ce: Tensor,
    tv: Tensor,
) -> None:
    from training.loss_triton import rows_kernel

    n, vocab = logits.shape
    rows_kernel[(n,)](
        logits, target_logits, normaliser, rows, labels, ce_weights, tv_weights, ce, tv, vocab, BLOCK=4096, num_warps=8
    )  # fmt: skip
