"""Matrix products of the verify pass, and what is fused into them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.layouts import SIDE, interleave
from verify_kernels.quantized import Quantized
from verify_kernels.reference.elementwise import add_rms_norm


def pack_linear(weight: Tensor | Quantized, dtype: torch.dtype, gate_up: bool = False) -> Tensor | Quantized:
    """A layer's matrix [N, K] as its products read it, made once at load: here a tensor of dtype. gate_up: gate's rows,
    then up's, are put as `layouts.interleave` has them. A backend may keep quantised weights, in a form of its own."""
    if isinstance(weight, Quantized):
        weight = weight.dequantize(dtype)
    return interleave(*weight.chunk(2)) if gate_up else weight


def _plain(weight: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)


def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype. Quantised weights are those of `pack_linear`."""
    return F.linear(x, _plain(weight, x.dtype), bias)


def linear_silu_and_mul(x: Tensor, gate_up: Tensor | Quantized) -> Tensor:
    """SwiGLU: x [T, K], gate_up [2 I, K] as `layouts.interleave` puts it -> silu(gate) * up, [T, I]."""
    y = F.linear(x, _plain(gate_up, x.dtype))
    gate, up = y.unflatten(-1, (-1, 2, SIDE)).unbind(-2)
    return (F.silu(gate) * up).flatten(-2)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor | Quantized, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A product, the residual add after it and the norm after that: x [T, K], weight [N, K], bias and norm [N], residual
    [T, N] -> (normed, residual + product [T, N]).

    normed stands for the norm's [T, N]: the x of a `linear` or `linear_silu_and_mul`. A backend may leave its last
    multiplications to them; `normed` has the tensor itself.
    """
    return add_rms_norm(F.linear(x, _plain(weight, x.dtype), bias), residual, norm, eps)


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
