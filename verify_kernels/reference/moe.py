"""Mixture of experts: routing and expert products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.quantized import Quantized


def moe_route(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    *,
    scores: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Top-k of every token's scores. router_logits [T, E] -> (weights [T, k] float32, expert ids [T, k] int64).

    scores: "softmax" over all experts or "sigmoid" of each. bias [E]: added to the scores for the choice, not for the
    weights. num_groups: experts are as many equal groups, of which the best top_groups may be chosen from; a group is as
    good as its best score, with a bias as its two best together (DeepSeek-V2 and -V3). renormalize: weights of a token
    add up to one; scale multiplies them then. The best come first; of equal experts and groups the lowest ids. Computed
    in float32 (float64 for float64 logits).
    """
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"scores: found {scores!r}, allowed: softmax, sigmoid")
    experts = router_logits.shape[-1]
    if experts % num_groups or not 1 <= top_groups <= num_groups or top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"num_groups, top_groups, top_k: found {num_groups}, {top_groups}, {top_k} for {experts} experts, allowed: equal "
            "groups that hold enough experts"
        )
    logits = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    weights = logits.softmax(dim=-1) if scores == "softmax" else logits.sigmoid()
    choice = weights if bias is None else weights + bias.to(weights.dtype)
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        merit = grouped.amax(-1) if bias is None else grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = _first(merit, top_groups)
        outside = torch.ones_like(merit, dtype=torch.bool).scatter_(-1, best, False)
        choice = grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)
    ids = _first(choice, top_k)
    weights = weights.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights * scale if scale != 1.0 else weights), ids


def _first(values: Tensor, k: int) -> Tensor:
    """Places of the k largest, the largest first, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def pack_experts(gate_up: Tensor | Quantized, down: Tensor | Quantized) -> tuple[Tensor | Quantized, Tensor | Quantized]:
    """A layer's experts, gate_up [E, 2 I, H] and down [E, H, I], in the form in which `moe_experts` and
    `latent_moe.situ_experts` of the same backend read them: called once, when weights are loaded. What comes back has the
    shapes and the values of what went in, which may be freed. Here: as they are."""
    return gate_up, down


def moe_experts(
    x: Tensor,
    gate_up: Tensor | Quantized,
    down: Tensor | Quantized,
    weights: Tensor,
    ids: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """SwiGLU experts, combined by routing weight.

    x [T, H], gate_up [E, 2 I, H], down [E, H, I], weights and ids [T, k] -> [T, H]. Quantised experts are multiplied as
    what they stand for, in float32, and rounded to x's dtype after each product. shared: (gate_up [2 S, H], down [H, S])
    of an expert that every token meets with weight 1. A token's k ids differ. On a CPU only the experts that were picked
    are touched; on a CUDA device every expert runs over every token with a weight of zero where it was not picked, so
    that nothing is read back to the host (this is a specification, not a fast path).
    """
    out = torch.zeros(x.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    per_expert = torch.zeros(x.shape[0], gate_up.shape[0], dtype=weights.dtype, device=x.device)
    per_expert.scatter_(1, ids, weights)
    experts = ids.unique().tolist() if x.device.type == "cpu" else range(gate_up.shape[0])
    for e in experts:
        rows = per_expert[:, e].nonzero().squeeze(1) if x.device.type == "cpu" else slice(None)
        y = _product(_swiglu(_product(x[rows], gate_up[e])), down[e])
        out[rows] += y.to(out.dtype) * per_expert[rows, e, None]
    if shared is not None:
        out += _product(_swiglu(_product(x, shared[0])), shared[1]).to(out.dtype)
    return out.to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _product(x: Tensor, weight: Tensor | Quantized) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.linear(x.to(wide), weight.dequantize(wide)).to(x.dtype)
