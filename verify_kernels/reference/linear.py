"""Matrix products of the verify pass, and what is fused into them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from verify_kernels.layouts import SIDE
from verify_kernels.reference.elementwise import add_rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype."""
    return F.linear(x, weight, bias)


def linear_silu_and_mul(x: Tensor, gate_up: Tensor) -> Tensor:
    """SwiGLU: x [T, K], gate_up [2 I, K] as `layouts.interleave` puts it -> silu(gate) * up, [T, I]."""
    y = F.linear(x, gate_up)
    gate, up = y.unflatten(-1, (-1, 2, SIDE)).unbind(-2)
    return (F.silu(gate) * up).flatten(-2)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A product, the residual add after it and the norm after that: x [T, K], weight [N, K], bias and norm [N], residual
    [T, N] -> (normed, residual + product [T, N]).

    normed stands for the norm's [T, N]: the x of a `linear` or `linear_silu_and_mul`. A backend may leave its last
    multiplications to them; `normed` has the tensor itself.
    """
    return add_rms_norm(F.linear(x, weight, bias), residual, norm, eps)


def normed(x: Tensor) -> Tensor:
    """What a `linear_add_rms_norm` gave as normed -> [T, N]; a tensor is itself."""
    return x


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """LM head: x [T, H], weight [V, H] -> float32 [T, V] (rounded to x's dtype first, as the product is)."""
    return F.linear(x, weight).float()


def greedy_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """LM head and arg-max: x [T, H], weight [V, H] -> (ids [T] int64, their logits [T] float32).

    Ties go to the lowest id. A row that holds a NaN returns NaN as its logit. Nothing of size T x V has to be kept.
    """
    return arg_max(F.linear(x, weight))


def arg_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] -> (ids [T] int64, ties to the lowest; their values [T] float32, NaN where a row has one)."""
    best, ids = logits.max(dim=-1)
    return ids, best.float()
