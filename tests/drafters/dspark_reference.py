"""The fact sheet's mathematics of DSpark, DFlash and EAGLE-3 (§1.2 to §1.4, §1.11, §1.12), one request, float64, in
plain torch. Written from the formulas; shares nothing with the package but the tensors' names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Net:
    """A checkpoint's tensors with the few numbers that they do not state."""

    w: dict[str, Tensor]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    theta: float = 100.0
    eps: float = 1e-6
    layers: int = 2
    block: int = 4
    mask_id: int = 3
    markov: str | None = "vanilla"
    window: int = 0

    def __post_init__(self) -> None:
        self.w = {k: v.double() if v.is_floating_point() else v for k, v in self.w.items()}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [n, heads, D], half rotation."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attend(net: Net, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [n, Hq, D], k and v [m, Hkv, D], visible [n, m]."""
    group = net.heads // net.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(net.dim)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def mlp(net: Net, prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ net.w[prefix + "mlp.gate_proj.weight"].T, x @ net.w[prefix + "mlp.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ net.w[prefix + "mlp.down_proj.weight"].T


def block(net: Net, features: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
    """features [s, m d] of positions 0 .. s - 1 -> (h [block, d], U [block, V_draft])."""
    w, s = net.w, features.shape[0]
    context = rms(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], net.eps)
    x = w["embed_tokens.weight"][[anchor] + [net.mask_id] * (net.block - 1)]
    at = torch.arange(s + net.block)
    for i in range(net.layers):
        p, a = f"layers.{i}.", f"layers.{i}.self_attn."
        h = rms(x, w[p + "input_layernorm.weight"], net.eps)
        both = torch.cat((context, h))
        q = (h @ w[a + "q_proj.weight"].T).view(net.block, net.heads, net.dim)
        k = (both @ w[a + "k_proj.weight"].T).view(-1, net.kv_heads, net.dim)
        v = (both @ w[a + "v_proj.weight"].T).view(-1, net.kv_heads, net.dim)
        q = rotate(rms(q, w[a + "q_norm.weight"], net.eps), at[s:], net.theta)
        k = rotate(rms(k, w[a + "k_norm.weight"], net.eps), at, net.theta)
        visible = torch.ones(net.block, s + net.block, dtype=torch.bool)
        if net.window:
            visible = at[s:, None] - at < net.window
        x = x + attend(net, q, k, v, visible) @ w[a + "o_proj.weight"].T
        x = x + mlp(net, p, rms(x, w[p + "post_attention_layernorm.weight"], net.eps))
    h = rms(x, w["norm.weight"], net.eps)
    return h, h @ w["lm_head.weight"].T


def markov(net: Net, h: Tensor, previous: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(bias on a slot's logits [V_draft], next state)."""
    w, m = net.w, "markov_head."
    if net.markov is None:
        return torch.zeros(w["lm_head.weight"].shape[0], dtype=torch.float64), None
    e = w[m + "markov_w1.weight"][previous]
    if net.markov == "vanilla":
        return w[m + "markov_w2.weight"] @ e, None
    if net.markov == "gated":
        gate = torch.sigmoid(w[m + "gate_proj.weight"] @ torch.cat((h, e)) + w[m + "gate_proj.bias"])
        return w[m + "markov_w2.weight"] @ (gate * e), None
    state = torch.zeros_like(e) if state is None else state
    g, c, o = (w[m + "joint_proj.weight"] @ torch.cat((state, e, h)) + w[m + "joint_proj.bias"]).chunk(3)
    g = torch.sigmoid(g)
    return w[m + "markov_w2.weight"] @ torch.tanh(o), g * state + (1 - g) * torch.tanh(c)


def confidence(net: Net, h: Tensor, previous: int) -> float:
    weight = net.w["confidence_head.proj.weight"][0]
    x = h if len(weight) == len(h) else torch.cat((h, net.w["markov_head.markov_w1.weight"][previous]))
    return float(torch.sigmoid(weight @ x + net.w["confidence_head.proj.bias"][0]))


def path_logits(net: Net, h: Tensor, u: Tensor, first_slot: int, path: list[int], ids: Tensor) -> Tensor:
    """Logits over the draft vocabulary after `path` (anchor first). ids: target id of each draft id."""
    state = None
    for k, token in enumerate(path):
        bias, state = markov(net, h[first_slot + k], token, state)
    return u[first_slot + len(path) - 1] + bias


def greedy_chain(net: Net, features: Tensor, anchor: int, count: int, first_slot: int, ids: Tensor) -> list[int]:
    h, u = block(net, features, anchor)
    path = [anchor]
    for _ in range(count):
        path.append(int(ids[path_logits(net, h, u, first_slot, path, ids).argmax()]))
    return path[1:]


def eagle_logits(net: Net, features: Tensor, tokens: list[int], path: list[int]) -> Tensor:
    """Logits over the draft vocabulary after the drafts `path`. features [s, m d] of tokens 0 .. s - 1; tokens has one
    more, the anchor. Entry i: (features i, token i + 1); behind the anchor (own hidden state, draft)."""
    w, p, a = net.w, "layers.0.", "layers.0.self_attn."
    g_in = list(features.double() @ w["fc.weight"].T)
    following = list(tokens[1:])
    for token in [*path, None]:
        n = len(g_in)
        g = torch.stack(g_in)
        e = w["embed_tokens.weight"][following]
        e = rms(e, w[p + "input_layernorm.weight"], net.eps)
        x = torch.cat((e, rms(g, w[p + "hidden_norm.weight"], net.eps)), 1)
        q = (x @ w[a + "q_proj.weight"].T).view(n, net.heads, net.dim)
        k = (x @ w[a + "k_proj.weight"].T).view(n, net.kv_heads, net.dim)
        v = (x @ w[a + "v_proj.weight"].T).view(n, net.kv_heads, net.dim)
        if a + "q_norm.weight" in w:
            q, k = rms(q, w[a + "q_norm.weight"], net.eps), rms(k, w[a + "k_norm.weight"], net.eps)
        at = torch.arange(n)
        q, k = rotate(q, at, net.theta), rotate(k, at, net.theta)
        y = g + attend(net, q, k, v, at[:, None] >= at) @ w[a + "o_proj.weight"].T
        y = y + mlp(net, p, rms(y, w[p + "post_attention_layernorm.weight"], net.eps))
        if token is not None:
            g_in.append(y[-1])
            following.append(token)
    return rms(y[-1], w["norm.weight"], net.eps) @ w["lm_head.weight"].T


def eagle_chain(net: Net, features: Tensor, tokens: list[int], count: int, ids: Tensor) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        out.append(int(ids[eagle_logits(net, features, tokens, out).argmax()]))
    return out
