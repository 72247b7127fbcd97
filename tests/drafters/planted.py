"""A target whose law is known, and the drafter that knows it: nothing is trained, every trap has something to break.

The next token follows from the current one and the one BACK before it: logits = lm_head (g(x_s) + a(x_{s - BACK})).
Layers 0 to 3 are MLPs on the token alone and write g; layer 4's attention looks BACK tokens back, through biases of q
and k that only the rotary embedding turns, and writes a; its MLP buries layer 4's output in noise that the head does
not read. So the drafter needs the outputs of layer 3 (a neighbour's are something else) and each slot its own position,
while its Markov head brings g.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.dspark.dialects import parse
from drafters.dspark.network import tensor_shapes as drafter_shapes
from dspark_runtime.models.config import ModelConfig
from dspark_runtime.models.transformer import Transformer, tensor_shapes
from tests.drafters.dspark_cases import write
from tests.dspark_runtime.passes import Pages

V, H, HALF, HEADS, KV, D, LAYERS, BACK, THETA, SHARP = 48, 32, 16, 4, 2, 32, 6, 5, 100.0, 16.0
DIMS = dict(
    vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV, head_dim=D, rms_norm_eps=1e-6, max_position_embeddings=256, rope_theta=THETA,
    attention_bias=True,
)  # fmt: skip
CONFIG = DIMS | dict(
    architectures=["Qwen3DSparkModel"], num_hidden_layers=1, num_target_layers=LAYERS, block_size=4, mask_token_id=3,
    target_layer_ids=[1, 3], num_anchors=512, markov_rank=HALF, markov_head_type="vanilla", enable_confidence_head=True,
    confidence_head_with_markov=True,
)  # fmt: skip


def _pointer(back: float, length: float) -> Tensor:
    """A q or k bias [D] that the rotary embedding turns by position: strongest against one `back` tokens earlier."""
    turn = back * THETA ** -(torch.arange(D // 2) / (D // 2))
    return torch.cat((turn.cos(), -turn.sin())) * length


def target(architecture: str = "qwen3") -> Transformer:
    config, tensors = target_tensors(architecture)
    return Transformer(config, tensors, name="planted", dtype=torch.float32, device="cpu")


def target_tensors(architecture: str = "qwen3") -> tuple[ModelConfig, dict[str, Tensor]]:
    config = ModelConfig(
        architecture=architecture, **{k: v for k, v in DIMS.items() if k != "rope_theta"}, rope=dict(rope_theta=THETA)
    )
    g = torch.Generator().manual_seed(11)
    w = {}
    for name, shape in tensor_shapes(config).items():
        w[name] = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=g) / math.sqrt(shape[-1])
    w["model.embed_tokens.weight"][:, :HALF] = 0
    w["model.embed_tokens.weight"] *= 6 / w["model.embed_tokens.weight"].norm(dim=1, keepdim=True) * math.sqrt(HALF)
    w["lm_head.weight"][:, HALF:] = 0
    w["lm_head.weight"] /= w["lm_head.weight"].norm(dim=1, keepdim=True)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for x, heads, back in (("q", HEADS, BACK), ("k", KV, 0)):
            w[layer + f"self_attn.{x}_proj.weight"] *= 0
            w[layer + f"self_attn.{x}_proj.bias"] = _pointer(back, 1.0).repeat(heads)
        if config.qk_norm:
            w[layer + "self_attn.q_norm.weight"] *= SHARP
        else:
            w[layer + "self_attn.q_proj.bias"] *= SHARP * 2
        for x in "vo":
            w[layer + f"self_attn.{x}_proj.bias"] *= 0
        if i == 4:
            w[layer + "self_attn.o_proj.weight"] *= 7
            w[layer + "self_attn.o_proj.weight"][HALF:] = 0
            w[layer + "mlp.down_proj.weight"] *= 30
            w[layer + "mlp.down_proj.weight"][:HALF] = 0
        else:
            w[layer + "self_attn.o_proj.weight"] *= 0
            w[layer + "mlp.down_proj.weight"] *= 4.0 if i < 4 else 0.0
    return config, w


def drafter_tensors(model: Transformer, config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """The drafter that reads layer 3 and knows the law: its slots' hidden states are a, their Markov bias is g."""
    g = torch.Generator().manual_seed(12)
    w = {}
    for name, shape in drafter_shapes(parse(config, "planted")).items():
        w[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape)
    source, own = model.layers[4], "layers.0.self_attn."
    w["fc.weight"][:, H:] = torch.eye(H)
    w[own + "q_proj.bias"], w[own + "k_proj.bias"] = _pointer(BACK, 1.0).repeat(HEADS), _pointer(0, 1.0).repeat(KV)
    w[own + "q_norm.weight"] *= SHARP
    w[own + "v_proj.weight"] = source.qkv[-KV * D :].clone()
    # Small beside the embedding, so that the final norm divides by a constant, which its weight takes back.
    w[own + "o_proj.weight"] = source.o * 0.03
    w["norm.weight"] *= model.embed.norm(dim=1).mean() / math.sqrt(H) / 0.03
    w["markov_head.markov_w1.weight"] = written(model)
    w["markov_head.markov_w2.weight"] = model.lm_head[:, :HALF].clone()
    w["confidence_head.proj.weight"] = torch.randn(1, H + HALF, generator=g) * 0.01
    w["embed_tokens.weight"], w["lm_head.weight"] = model.embed.clone(), model.lm_head.clone()
    return w


def written(model: Transformer) -> Tensor:
    """g [V, HALF]: what layers 0 to 3 write for each token."""
    pages = Pages(model, V, 1, 8)
    _, features = model.forward(pages.batch(list(range(V)), [0] * V, [[i] for i in range(V)]), pages.cache, (3,))
    return features[:, :HALF].clone()


def drafter(folder: Path, model: Transformer, config: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """The drafter's checkpoint; config and tensors take the place of its own."""
    return write(folder, CONFIG | (config or {}), drafter_tensors(model) | tensors)
