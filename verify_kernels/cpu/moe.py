"""Mixture of experts on the products of `verify_kernels.cpu.linear`: only the experts that were picked are read."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.cpu.elementwise import silu_and_mul
from verify_kernels.cpu.linear import linear
from verify_kernels.quantized import Quantized
from verify_kernels.reference import moe as reference


def moe_experts(
    x: Tensor,
    gate_up: Tensor | Quantized,
    down: Tensor | Quantized,
    weights: Tensor,
    ids: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `verify_kernels.reference.moe.moe_experts`. A token's result does not depend on the other tokens."""
    if isinstance(gate_up, Quantized):
        return reference.moe_experts(x, gate_up, down, weights, ids, shared)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids.unique().tolist():
        rows, ranks = (ids == e).nonzero(as_tuple=True)
        y = linear(silu_and_mul(linear(x[rows], gate_up[e])), down[e])
        out.index_add_(0, rows, y.float() * weights[rows, ranks, None])
    if shared is not None:
        out += linear(silu_and_mul(linear(x, shared[0])), shared[1]).float()
    return out.to(x.dtype)
