"""Mixture of experts in a latent space with 4-bit experts: routing by sigmoid scores, SiTU, MXFP4.

Semantics from vLLM 0.33: models/kimi_k3 (the block), fused_moe/router/grouped_topk_router.py (one group), activation.py
(SiTU). Formats from the OCP Microscaling specification 1.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Values that share one scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa bits; the highest bit is the sign


def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU: x [..., 2 I], gate half first -> beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up /
    linear_beta), [..., I] in x's dtype; computed in float32 or more."""
    gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    out = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
    return out.to(x.dtype)


def sigmoid_route(
    x: Tensor, router: Tensor, bias: Tensor, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Picks experts by sigmoid(router logit) + bias and weighs them by sigmoid alone, normalised to sum to `scaling`.

    x [T, H], router [E, H], bias [E] float32 -> (weights [T, k] float32, expert ids [T, k] int64). Logits are float32
    products (float64 in a float64 model).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scores = F.linear(x.to(wide), router.to(wide)).sigmoid()
    ids = (scores + bias.to(wide)).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * scaling, ids


def dequantize_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., K / 2] float4_e2m1fn_x2 (value 2i in the low half of byte i), scales [..., K / 32] float8_e8m0fnu,
    2^(byte - 127) of 32 values each -> [..., K] in dtype (exact from bfloat16 on, but for scales beyond its range)."""
    codes = packed.view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    magnitudes = torch.tensor(_E2M1, dtype=dtype, device=packed.device)
    values = torch.cat((magnitudes, -magnitudes))[codes]
    exponents = scales.view(torch.uint8).to(dtype) - 127
    return values * torch.exp2(exponents).repeat_interleave(GROUP, dim=-1)


def mxfp4_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """SiTU experts of MXFP4 weights and 16-bit activations, combined by routing weight.

    x [T, L], gate_up [E, 2 I, L / 2] and its scales [E, 2 I, L / 32], down [E, L, I / 2] and its scales [E, L, I / 32]
    as `dequantize_mxfp4` takes them, weights and ids [T, k] -> [T, L] in x's dtype, summed in float32 or more. (Kimi-K3
    is deployed with MXFP8 activations; their rounding is not modelled.) Only the experts that were picked are read,
    which reads `ids` back to the host.
    """
    out = torch.zeros_like(x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    for e in ids.unique().tolist():
        rows, ranks = (ids == e).nonzero(as_tuple=True)
        w1 = dequantize_mxfp4(gate_up[e], gate_up_scale[e], x.dtype)
        w2 = dequantize_mxfp4(down[e], down_scale[e], x.dtype)
        y = F.linear(situ_and_mul(F.linear(x[rows], w1), beta, linear_beta), w2)
        out.index_add_(0, rows, y.to(out.dtype) * weights[rows, ranks, None])
    return out.to(x.dtype)
