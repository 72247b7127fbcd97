"""Small random targets and drafter checkpoints in every dialect, written to disk by the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_runtime.models.config import ModelConfig
from dspark_runtime.models.transformer import Transformer, tensor_shapes

V, H, LAYERS, TAPS = 48, 16, 8, [0, 2, 4]
DIMS = dict(
    vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=256, rope_theta=100.0,
    attention_bias=False, hidden_act="silu", model_type="qwen3",
)  # fmt: skip
HEADS = dict(markov_rank=5, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True)
DEEPSPEC = DIMS | HEADS | dict(
    architectures=["Qwen3DSparkModel"], num_target_layers=LAYERS, block_size=4, mask_token_id=3,
    target_layer_ids=TAPS, num_anchors=512, tie_word_embeddings=False,
)  # fmt: skip


def target(architecture: str = "qwen3", scale: float = 0.6) -> Transformer:
    """A random target whose next token depends strongly on its context."""
    moe = {}
    if architecture == "qwen3_moe":
        moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    config = ModelConfig(
        architecture=architecture, vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=256,
        rope=dict(rope_theta=100.0), **moe,
    )  # fmt: skip
    return Transformer(config, noise(tensor_shapes(config), scale, 1), name="random", dtype=torch.float32, device="cpu")


def noise(shapes: dict[str, tuple[int, ...]], scale: float, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g)
        out[name] = 1 + 0.2 * x if "norm" in name else x * scale
    return out


def block_tensors(config: dict[str, Any], seed: int = 2, scale: float = 0.4) -> dict[str, Tensor]:
    """Tensors of a DSpark or DFlash checkpoint of DIMS, under DeepSpec's names; embedding and head are its own."""
    r, kind = config.get("markov_rank", 0), config.get("markov_head_type")
    vd = config.get("draft_vocab_size", V)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        p = f"layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (H,), p + "post_attention_layernorm.weight": (H,),
            p + "self_attn.q_proj.weight": (32, H), p + "self_attn.k_proj.weight": (16, H),
            p + "self_attn.v_proj.weight": (16, H), p + "self_attn.o_proj.weight": (H, 32),
            p + "self_attn.q_norm.weight": (8,), p + "self_attn.k_norm.weight": (8,),
            p + "mlp.gate_proj.weight": (24, H), p + "mlp.up_proj.weight": (24, H), p + "mlp.down_proj.weight": (H, 24),
        }  # fmt: skip
    if r:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (vd, r)}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, H + r), "markov_head.gate_proj.bias": (r,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + H), "markov_head.joint_proj.bias": (3 * r,)}
    if config.get("enable_confidence_head"):
        wide = H + r if config.get("confidence_head_with_markov") else H
        shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
    shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (vd, H)}
    return noise(shapes, scale, seed)


def eagle_tensors(taps: int, vd: int = V, norms: bool = True, seed: int = 4) -> dict[str, Tensor]:
    """An EAGLE-3 checkpoint of DIMS with one layer."""
    p = "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, taps * H), "norm.weight": (H,), "embed_tokens.weight": (V, H), "lm_head.weight": (vd, H),
        p + "input_layernorm.weight": (H,), p + "hidden_norm.weight": (H,), p + "post_attention_layernorm.weight": (H,),
        p + "self_attn.q_proj.weight": (32, 2 * H), p + "self_attn.k_proj.weight": (16, 2 * H),
        p + "self_attn.v_proj.weight": (16, 2 * H), p + "self_attn.o_proj.weight": (H, 32),
        p + "mlp.gate_proj.weight": (24, H), p + "mlp.up_proj.weight": (24, H), p + "mlp.down_proj.weight": (H, 24),
    }  # fmt: skip
    if norms:
        shapes |= {p + "self_attn.q_norm.weight": (8,), p + "self_attn.k_norm.weight": (8,)}
    return noise(shapes, 0.4, seed)


def pruned(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Target ids of a draft vocabulary, and the checkpoint's two tables that state them."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:rows].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return ids, {"d2t": ids - torch.arange(rows), "t2d": t2d}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], rename: Any = lambda name: name) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({rename(k): v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder
