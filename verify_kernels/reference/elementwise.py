"""Embedding, norms, rotary embedding, gated activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [N] int64, weight [V, H] -> [N, H]. Ids must lie in [0, V)."""
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] -> x / rms(x) * weight, the mean square in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then norm. Returns (rms_norm(x + residual), x + residual)."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Half-rotation rotary embedding.

    x [N, heads, D], positions [N] int64, cos_sin [max_positions, D] (cosines of D/2 frequencies, then sines) -> x's
    shape and dtype. Computed in cos_sin's dtype (float32).
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = x.to(cos_sin.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: x [..., 2 I], gate half first -> silu(gate) * up, [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
