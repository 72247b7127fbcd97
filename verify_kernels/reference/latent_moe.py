"""SiTU, and experts that use it: what Kimi-K3's mixture adds to `verify_kernels.reference.moe`.

After vLLM 0.33: models/kimi_k3 (the block), model_executor/layers/activation.py (the function).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.quantized import Quantized


def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU: x [..., 2 I], gate half first -> beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up /
    linear_beta), [..., I] in x's dtype; computed in float32 or more."""
    gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    out = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
    return out.to(x.dtype)


def situ_experts(
    x: Tensor, gate_up: Quantized, down: Quantized, weights: Tensor, ids: Tensor, beta: float, linear_beta: float
) -> Tensor:
    """SiTU experts of quantised weights and 16-bit activations, combined by routing weight.

    x [T, L], gate_up [E, 2 I, L], down [E, L, I], weights and ids [T, k] -> [T, L] in x's dtype; products rounded to
    it, their sum in float32 or more. An id outside 0 to E - 1 is of an expert held elsewhere, and adds nothing.
    (Kimi-K3 is deployed with MXFP8 activations; their rounding is not modelled.) On a CUDA device every expert runs
    over every token, as in `moe.moe_experts`.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(x, dtype=wide)
    held = gate_up.shape[0]
    ids = torch.where((ids >= 0) & (ids < held), ids, held)
    per_expert = torch.zeros(len(x), held + 1, dtype=weights.dtype, device=x.device).scatter_(1, ids, weights)
    on_cpu = x.device.type == "cpu"
    for e in ids[ids < held].unique().tolist() if on_cpu else range(held):
        rows = per_expert[:, e].nonzero().squeeze(1) if on_cpu else slice(None)
        y = F.linear(x[rows].to(wide), gate_up[e].dequantize(wide)).to(x.dtype)
        y = F.linear(situ_and_mul(y, beta, linear_beta).to(wide), down[e].dequantize(wide)).to(x.dtype)
        out[rows] += y.to(wide) * per_expert[rows, e, None]
    return out.to(x.dtype)
