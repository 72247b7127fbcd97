"""Mixture of experts: routing and expert products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then top-k. router_logits [T, E] -> (weights [T, k] float32, expert ids [T, k] int64)."""
    weights, ids = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """SwiGLU experts, combined by routing weight.

    x [T, H], gate_up [E, 2 I, H], down [E, H, I], weights and ids [T, k] -> [T, H]. On a CPU only the experts that
    were picked are touched; on a CUDA device every expert runs over every token with a weight of zero where it was not
    picked, so that nothing is read back to the host (this is a specification, not a fast path).
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    per_expert = torch.zeros(x.shape[0], gate_up.shape[0], dtype=torch.float32, device=x.device)
    per_expert.scatter_(1, ids, weights)
    experts = ids.unique().tolist() if x.device.type == "cpu" else range(gate_up.shape[0])
    for e in experts:
        rows = per_expert[:, e].nonzero().squeeze(1) if x.device.type == "cpu" else slice(None)
        gate, up = F.linear(x[rows], gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[e])
        out[rows] += y.float() * per_expert[rows, e, None]
    return out.to(x.dtype)
