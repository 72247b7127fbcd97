"""A model of Kimi-K3's form written out token by token in float64 numpy, and random weights for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark_runtime.models.kimi_k3 import WIDE, KimiK3, KimiK3Config, kimi_k3_config, tensor_shapes
from tests.verify_kernels.kda_cases import Layer, Written


def config() -> KimiK3Config:
    return kimi_k3_config("kimi-k3-tiny")


def weights(c: KimiK3Config, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under which every part of the model matters to the next token."""
    g = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, (shape, kind) in tensor_shapes(c).items():
        if kind == torch.uint8:
            span = (123, 126) if name.endswith("scale") else (0, 256)
            found[name] = torch.randint(*span, shape, generator=g, dtype=torch.uint8)
        else:
            noise = torch.randn(shape, generator=g, dtype=torch.float64)
            fan_in = 1 if len(shape) < 2 or "res_proj" in name else shape[-1]
            noise = noise * fan_in**-0.5 if "norm" not in name else 1 + 0.2 * noise
            found[name] = noise.float() if kind == WIDE else noise
    return found


def model(dtype: torch.dtype = torch.float64, seed: int = 0, max_model_len: int | None = None) -> KimiK3:
    c = config()
    return KimiK3(c, weights(c, seed), name="test", dtype=dtype, device="cpu", max_model_len=max_model_len)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean() + eps) * weight


def e2m1(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpacked expert matrix."""
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = np.array(sizes + [-x for x in sizes])
    values = np.empty((packed.shape[0], 2 * packed.shape[1]))
    values[:, 0::2], values[:, 1::2] = table[packed % 16], table[packed // 16]
    return values * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=1)


class WrittenModel:
    """One sequence, one token at a time; `fork` continues it in another way."""

    def __init__(self, c: KimiK3Config, tensors: dict[str, Tensor]) -> None:
        self.c = c
        self.w = {
            name: t.numpy() if t.dtype == torch.uint8 else t.double().numpy() for name, t in tensors.items()
        }
        self.kda: dict[int, Written] = {}
        for i in range(c.num_hidden_layers):
            if c.is_kda(i):
                conv = np.concatenate([self.of(i, f"self_attn.{x}_conv1d.weight")[:, 0] for x in "qkv"])
                parts = (conv, self.of(i, "self_attn.A_log"), self.of(i, "self_attn.dt_bias").reshape(c.kda.heads, -1))
                layer = Layer(c.kda.heads, c.kda.head_dim, *map(torch.from_numpy, parts))
                self.kda[i] = Written.empty(layer)
        self.latents: dict[int, list[np.ndarray]] = {i: [] for i in range(c.num_hidden_layers) if not c.is_kda(i)}

    def of(self, layer: int, name: str) -> np.ndarray:
        return self.w[f"model.layers.{layer}.{name}"]

    def fork(self) -> WrittenModel:
        other = object.__new__(WrittenModel)
        other.c, other.w = self.c, self.w
        other.kda = {i: own.fork() for i, own in self.kda.items()}
        other.latents = {i: list(line) for i, line in self.latents.items()}
        return other

    def mix(self, since: np.ndarray, blocks: list[np.ndarray], name: str, out_norm: str) -> np.ndarray:
        eps = self.c.facts.rms_norm_eps
        sources = [*blocks, since]
        norm, score = self.w[f"{name}_norm.weight"], self.w[f"{name}_proj.weight"][0]
        scores = np.array([score @ normed(s, norm, eps) for s in sources])
        shares = np.exp(scores - scores.max())
        mixed = sum(share * s for share, s in zip(shares / shares.sum(), sources))
        return normed(mixed, self.w[out_norm], eps)

    def step(self, token: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The next token -> (logits [V], what follows each layer, -1 the embedding)."""
        since = self.w["model.embed_tokens.weight"][token]
        after, blocks = {-1: since}, []
        for i in range(self.c.num_hidden_layers):
            layer = f"model.layers.{i}."
            x = self.mix(since, blocks, f"{layer}self_attention_res", f"{layer}input_layernorm.weight")
            y = self.delta(i, x) if i in self.kda else self.latent(i, x)
            if i % self.c.facts.attention_residual_block == 0:
                blocks, since = [*blocks, since], 0.0
            since = since + y
            x = self.mix(since, blocks, f"{layer}mlp_res", f"{layer}post_attention_layernorm.weight")
            since = since + (self.moe(i, x) if self.c.is_moe(i) else self.mlp(f"{layer}mlp.", x))
            after[i] = since
        hidden = self.mix(since, blocks, "model.output_attn_res", "model.norm.weight")
        return self.w["lm_head.weight"] @ hidden, after

    def delta(self, i: int, x: np.ndarray) -> np.ndarray:
        def project(name: str, value: np.ndarray = x) -> np.ndarray:
            return self.of(i, f"self_attn.{name}_proj.weight") @ value

        qkv = np.concatenate([project(name) for name in "qkv"])
        raw = project("f_b", project("f_a"))
        y = self.kda[i].step(*map(torch.from_numpy, (qkv, raw, project("b"))))
        norm, eps = self.of(i, "self_attn.o_norm.weight"), self.c.facts.rms_norm_eps
        y = np.stack([normed(head, norm, eps) for head in y]).ravel()
        return project("o", y * sigmoid(project("g")))

    def latent(self, i: int, x: np.ndarray) -> np.ndarray:
        m = self.c.mla

        def project(name: str, value: np.ndarray = x) -> np.ndarray:
            return self.of(i, f"self_attn.{name}.weight") @ value

        latent, own = np.split(project("kv_a_proj_with_mqa"), [m.kv_lora_rank])
        latent = normed(latent, self.of(i, "self_attn.kv_a_layernorm.weight"), m.norm_eps)
        self.latents[i].append(np.concatenate([latent, own]))
        q = project("q_b_proj", normed(project("q_a_proj"), self.of(i, "self_attn.q_a_layernorm.weight"), m.norm_eps))
        q = q.reshape(m.heads, -1)
        up = self.of(i, "self_attn.kv_b_proj.weight").reshape(m.heads, m.qk_nope_head_dim + m.v_head_dim, -1)
        seen, out = np.stack(self.latents[i]), []
        for h in range(m.heads):
            expanded = seen[:, : m.kv_lora_rank] @ up[h].T
            keys = np.concatenate([expanded[:, : m.qk_nope_head_dim], seen[:, m.kv_lora_rank :]], axis=1)
            scores = keys @ q[h] / np.sqrt(m.qk_nope_head_dim + m.qk_rope_head_dim)
            shares = np.exp(scores - scores.max())
            out.append(shares / shares.sum() @ expanded[:, m.qk_nope_head_dim :])
        return project("o_proj", np.concatenate(out) * sigmoid(project("g_proj")))

    def situ(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        s = self.c.situ
        return s.beta * np.tanh(gate / s.beta) * sigmoid(gate) * s.linear_beta * np.tanh(up / s.linear_beta)

    def mlp(self, prefix: str, x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ self.situ(gate @ x, up @ x)

    def moe(self, i: int, x: np.ndarray) -> np.ndarray:
        moe, block = self.c.moe, "block_sparse_moe."
        scores = sigmoid(self.of(i, f"{block}gate.weight") @ x)
        picked = np.argsort(-(scores + self.of(i, f"{block}gate.e_score_correction_bias")))[: moe.num_experts_per_tok]
        latent = self.of(i, f"{block}routed_expert_down_proj.weight") @ x
        total = np.zeros_like(latent)
        for e in picked:
            w1, w2 = (
                e2m1(*(self.of(i, f"{block}experts.{name}.weight_{part}")[e] for part in ("packed", "scale")))
                for name in ("gate_up", "down")
            )
            weight = scores[e] / scores[picked].sum() * moe.routed_scaling_factor
            total += weight * (w2 @ self.situ(*np.split(w1 @ latent, 2)))
        routed = normed(total, self.of(i, f"{block}routed_expert_norm.weight"), self.c.facts.rms_norm_eps)
        routed = self.of(i, f"{block}routed_expert_up_proj.weight") @ routed
        return routed + self.mlp(f"model.layers.{i}.{block}shared_experts.", x)
