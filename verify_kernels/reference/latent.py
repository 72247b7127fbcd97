"""Multi-head latent attention over a paged cache of latents, in its absorbed form, and small operations around it."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.batch import PassBatch
from verify_kernels.reference.attention import AttentionPlan


def append_latents(latents: Tensor, pages: Tensor, batch: PassBatch) -> None:
    """latents [N, W] into pages [P, page, 1, W] at batch.slot_mapping."""
    pages.flatten(0, 2)[batch.slot_mapping] = latents.to(pages.dtype)


def latent_attention(q: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float) -> Tensor:
    """Every head's attention over the latents of its request's context and of the new tokens that it may see.

    q [N, H, W]: queries in the latent space, then the part that meets the key's own channels; pages [P, page, 1, W] of
    one layer, which hold the new tokens' latents; values are the first `rank` channels -> [N, H, rank]. plan: of
    `plan_latent_attention`. Scores and softmax in float32 or more; scale multiplies q.k.
    """
    requests, queries, length = plan.visible.shape
    heads, width = q.shape[1:]
    latents = pages[plan.pages].view(requests, length, width).masked_fill(plan.unseen[..., 0], 0)
    padded = q if plan.row_of is None else q[plan.row_of.flatten()]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    latents = latents.to(wide)
    rows = padded.view(requests, queries * heads, width).to(wide)
    scores = (rows @ latents.transpose(1, 2)).view(requests, queries, heads, length) * scale
    weights = scores.masked_fill(~plan.visible[:, :, None], float("-inf")).softmax(-1)
    weights = weights.to(q.dtype).to(wide).view(requests, queries * heads, length)
    out = (weights @ latents[..., :rank]).to(q.dtype).view(-1, heads, rank)
    return out if plan.padded_of is None else out[plan.padded_of]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A matrix a head: x [N, H, K], weight [H, M, K] -> [N, H, M]."""
    return torch.einsum("nhk,hmk->nhm", x, weight)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, K]."""
    return x * torch.sigmoid(gate)


def attention_residual(
    prefix: Tensor, blocks: list[Tensor], norm: Tensor, score: Tensor, eps: float, out_norm: Tensor | None
) -> Tensor:
    """Attention over the depth of the network in place of a residual stream, then the norm before the next layer.

    Sources are the residual stream at the start of each finished block of layers, blocks [N, H] each, and the sum of
    what came since, prefix [N, H]. Source s scores rms_norm(s) * norm . score; the softmax over sources mixes them
    as they are. norm, score [H] -> rms_norm(mix) * out_norm, [N, H] in prefix's dtype (out_norm None: the mix itself).
    One rounding, at the end.

    Follows vLLM 0.33 (models/kimi_k3/nvidia/ops/attn_res.py). There the final norm of the model rounds the mix first.
    """
    wide = torch.float64 if prefix.dtype == torch.float64 else torch.float32
    sources = torch.stack([*blocks, prefix], dim=1).to(wide)
    rms = torch.rsqrt(sources.square().mean(-1) + eps)
    weights = ((sources @ (norm.to(wide) * score.to(wide))) * rms).softmax(-1)
    mixed = torch.einsum("ns,nsh->nh", weights, sources)
    if out_norm is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps) * out_norm.to(wide)
    return mixed.to(prefix.dtype)
