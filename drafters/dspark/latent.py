"""Draft layers with latent attention: Kimi-K3's MLA drafters (fact sheet §1.8).

The layer of DeepSeek-V3, without experts, over the block and the context: queries and keys compressed, one latent a
token for all heads beside a few channels that are rotated. Context features enter as latents of their own, through the
same compression and norm, without the layer's input norm. Source: vLLM 0.33, models/kimi_k3/nvidia/dspark_mla.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drafters.dspark.config import DrafterConfig
from verify_kernels import ops
from verify_kernels.layouts import apart, interleave


def shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer's attention under the checkpoint's names, without `layers.i.`."""
    m, d, heads = c.mla, c.hidden_size, c.num_attention_heads
    found = {
        "q_a_proj": (m.q_lora_rank, d),
        "q_a_layernorm": (m.q_lora_rank,),
        "q_b_proj": (heads * m.head_dim, m.q_lora_rank),
        "kv_a_proj_with_mqa": (m.width, d),
        "kv_a_layernorm": (m.kv_lora_rank,),
        "kv_b_proj": (heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
        "o_proj": (d, heads * m.v_head_dim),
    }
    return {f"self_attn.{name}.weight": shape for name, shape in found.items()}


class LatentLayer(nn.Module):
    """Weights of one layer.

    in_proj is [q's latent; key's latent; key's own channels]. up_k [H, rank, nope] takes queries into the latent space,
    up_v [H, V, rank] brings values out of it. The checkpoint rotates neighbouring channels as pairs; rows are reordered
    here (0, 2, 4, ... then 1, 3, 5, ...) so that the half rotation of `ops.rope` does.
    """

    o_bias = None

    def __init__(self, c: DrafterConfig, get: Callable[[str], Tensor | None]) -> None:
        super().__init__()
        m = self.mla = c.mla
        self.heads, self.eps = c.num_attention_heads, c.rms_norm_eps

        def take(name: str) -> Tensor:
            return get(f"self_attn.{name}.weight")

        up = take("kv_b_proj").view(self.heads, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
        kv = _apart(take("kv_a_proj_with_mqa"), m.qk_rope_head_dim)
        q_b = _apart(take("q_b_proj").view(self.heads, m.head_dim, -1), m.qk_rope_head_dim)
        self.input_norm = nn.Parameter(get("input_layernorm.weight"))
        self.in_proj = nn.Parameter(torch.cat((take("q_a_proj"), kv)))
        self.q_a_norm, self.kv_norm = nn.Parameter(take("q_a_layernorm")), nn.Parameter(take("kv_a_layernorm"))
        self.q_b = nn.Parameter(q_b.flatten(0, 1))
        self.up_k = nn.Parameter(up[:, : m.qk_nope_head_dim].transpose(1, 2).contiguous())
        self.up_v = nn.Parameter(up[:, m.qk_nope_head_dim :].contiguous())
        self.o = nn.Parameter(take("o_proj"))
        self.post_norm = nn.Parameter(get("post_attention_layernorm.weight"))
        self.gate_up = nn.Parameter(interleave(get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")))
        self.down = nn.Parameter(get("mlp.down_proj.weight"))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, d] -> queries in the latent space [N, H, rank], their rotary part [N, H, R], the keys' latents after
        the norm [N, rank], their own channels [N, R]; rotary parts are not rotated yet. What attends over them gives
        values out of the latent space (`up_v`)."""
        m = self.mla
        q, latent, own = ops.linear(x, self.in_proj).split((m.q_lora_rank, m.kv_lora_rank, m.qk_rope_head_dim), dim=-1)
        q = ops.linear(ops.rms_norm(q, self.q_a_norm, self.eps), self.q_b).unflatten(-1, (self.heads, -1))
        nope, rotary = q.split((m.qk_nope_head_dim, m.qk_rope_head_dim), dim=-1)
        return ops.head_linear(nope, self.up_k), rotary, ops.rms_norm(latent, self.kv_norm, self.eps), own

    def tensors(self) -> dict[str, Tensor]:
        """What the layer was made of, under the checkpoint's names."""
        m = self.mla
        q_a, kv = self.in_proj.split((m.q_lora_rank, m.width))
        q_b = _apart(self.q_b.view(self.heads, m.head_dim, -1), m.qk_rope_head_dim, back=True)
        gate, up = apart(self.gate_up)
        found = {
            "self_attn.q_a_proj": q_a,
            "self_attn.q_a_layernorm": self.q_a_norm,
            "self_attn.q_b_proj": q_b.flatten(0, 1),
            "self_attn.kv_a_proj_with_mqa": _apart(kv, m.qk_rope_head_dim, back=True),
            "self_attn.kv_a_layernorm": self.kv_norm,
            "self_attn.kv_b_proj": torch.cat((self.up_k.transpose(1, 2), self.up_v), dim=1).flatten(0, 1),
            "self_attn.o_proj": self.o,
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.post_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down,
        }
        return {f"{name}.weight": tensor for name, tensor in found.items()}


def _apart(x: Tensor, rotary: int, back: bool = False) -> Tensor:
    """x [..., rows, K]: of its last `rotary` rows the even ones first, then the odd ones; or `back` again."""
    plain, pairs = x.split((x.shape[-2] - rotary, rotary), dim=-2)
    pairs = pairs.unflatten(-2, (2, rotary // 2) if back else (rotary // 2, 2)).transpose(-3, -2).flatten(-3, -2)
    return torch.cat((plain, pairs), dim=-2)
