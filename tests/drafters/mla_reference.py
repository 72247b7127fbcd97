"""Kimi-K3's MLA drafter written out in float64, one request, keys and values of every head expanded (no absorption).
From the fact sheet (§1.3, §1.4, §1.8) and DeepSeek's latent attention; shares nothing with the package but names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.drafters.dspark_reference import rms


@dataclass
class Net:
    """A checkpoint's tensors, under its own names, with the few numbers that they do not state."""

    w: dict[str, Tensor]
    embed: Tensor
    lm_head: Tensor
    heads: int
    nope: int
    rope: int
    value: int
    theta: float
    eps: float
    layers: int
    block: int
    mask_id: int
    yarn: tuple[float, int, float, float] | None = None  # factor, original length, mscale, mscale_all_dim

    def __post_init__(self) -> None:
        self.w = {k: v.double() for k, v in self.w.items()}
        self.embed, self.lm_head = self.embed.double(), self.lm_head.double()

    def of(self, name: str) -> Tensor:
        return self.w[f"{name}.weight"]


def rotate(net: Net, x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, D]: channels 2 i and 2 i + 1 as a complex number, turned by position times frequency i."""
    dim = x.shape[-1]
    frequency = net.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    size = 1.0
    if net.yarn is not None:
        factor, original, mscale, all_dim = net.yarn

        def turns_at(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(net.theta))

        low, high = max(math.floor(turns_at(32)), 0), min(math.ceil(turns_at(1)), dim - 1)
        slow = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency * (1 - slow) + frequency / factor * slow
        size = (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    angle = positions[:, None] * frequency
    turn = torch.polar(torch.full_like(angle, size), angle)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def block(net: Net, features: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """features [s, m d] of positions 0 .. s - 1 -> (h [block, d], U [block, V])."""
    s, q_dim = features.shape[0], net.nope + net.rope
    scale = 1 / math.sqrt(q_dim)
    if net.yarn is not None:
        scale *= (0.1 * net.yarn[3] * math.log(net.yarn[0]) + 1) ** 2
    context = rms(features.double() @ net.of("context_proj").T, net.of("context_norm"), net.eps)
    x = net.embed[[anchor] + [net.mask_id] * (net.block - 1)]
    at = torch.arange(s + net.block)
    for i in range(net.layers):
        p, a = f"layers.{i}.", f"layers.{i}.self_attn."
        h = rms(x, net.of(p + "input_layernorm"), net.eps)
        q = rms(h @ net.of(a + "q_a_proj").T, net.of(a + "q_a_layernorm"), net.eps) @ net.of(a + "q_b_proj").T
        q = q.view(net.block, net.heads, q_dim)
        q = torch.cat((q[..., : net.nope], rotate(net, q[..., net.nope :], at[s:])), -1)
        both = torch.cat((context, h)) @ net.of(a + "kv_a_proj_with_mqa").T
        latent = rms(both[:, : -net.rope], net.of(a + "kv_a_layernorm"), net.eps)
        own = rotate(net, both[:, None, -net.rope :], at)
        kv = (latent @ net.of(a + "kv_b_proj").T).view(s + net.block, net.heads, net.nope + net.value)
        k = torch.cat((kv[..., : net.nope], own.expand(-1, net.heads, -1)), -1)
        shares = (torch.einsum("ihd,jhd->hij", q, k) * scale).softmax(-1)
        y = torch.einsum("hij,jhd->ihd", shares, kv[..., net.nope :]).flatten(1)
        x = x + y @ net.of(a + "o_proj").T
        h = rms(x, net.of(p + "post_attention_layernorm"), net.eps)
        gate, up = h @ net.of(p + "mlp.gate_proj").T, h @ net.of(p + "mlp.up_proj").T
        x = x + (gate * torch.sigmoid(gate) * up) @ net.of(p + "mlp.down_proj").T
    h = rms(x, net.of("final_norm"), net.eps)
    return h, h @ net.lm_head.T


def logits(net: Net, u: Tensor, slot: int, previous: int) -> Tensor:
    return u[slot] + net.of("markov_head.markov_w2") @ net.of("markov_head.markov_w1")[previous]


def greedy_chain(net: Net, features: Tensor, anchor: int, count: int) -> list[int]:
    _, u = block(net, features, anchor)
    path = [anchor]
    for k in range(count):
        path.append(int(logits(net, u, k, path[-1]).argmax()))
    return path[1:]


def confidence(net: Net, h: Tensor, previous: int) -> float:
    x = torch.cat((h, net.of("markov_head.markov_w1")[previous]))
    return float(torch.sigmoid(net.of("confidence_head.proj")[0] @ x + net.w["confidence_head.proj.bias"][0]))
