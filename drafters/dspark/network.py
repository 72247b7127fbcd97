"""The draft network: fusion of tapped features, draft layers, heads. One module for the engine and for training.

Attention is passed in: the engine gives one over pages, a trainer one over whole sequences with its own mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drafters.dspark import latent
from drafters.dspark.config import DrafterConfig
from drafters.dspark.heads import ConfidenceHead, MarkovHead
from verify_kernels import ops
from verify_kernels.layouts import apart, interleave

Attend = Callable[..., Tensor]
"""attend(layer, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]: norms of q and k (the layer's `q_norm` and
`k_norm`), rotary embedding, attention. Latent layers have attend(layer, *`LatentLayer.project`) -> [N, H, V], see
there."""


def layer_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of one draft layer under DeepSpec's names, without `layers.i.`. EAGLE-3 attends over [token; hidden]."""
    d, i = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wide = 2 * d if c.kind == "eagle3" else d
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    mlp = {"mlp.gate_proj.weight": (i, d), "mlp.up_proj.weight": (i, d), "mlp.down_proj.weight": (d, i)}
    if c.mla is not None:
        return shapes | latent.shapes(c) | mlp
    if c.kind == "eagle3":
        shapes["hidden_norm.weight"] = (d,)
    for name, rows, columns in (("q", q, wide), ("k", kv, wide), ("v", kv, wide), ("o", d, q)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if c.attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return shapes | mlp


def tensor_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a drafter must have under DeepSpec's names. Embedding and LM head may be the target's."""
    d, r = c.hidden_size, c.markov_rank
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, len(c.taps) * c.target_hidden_size), "norm.weight": (d,)}
    if c.kind != "eagle3":
        shapes["hidden_norm.weight"] = (d,)
    for i in range(c.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(c).items()}
    if r:
        shapes["markov_head.markov_w1.weight"] = (c.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (c.draft_vocab_size, r)
    if c.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
    if c.markov_head_type == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + d), "markov_head.joint_proj.bias": (3 * r,)}
    if c.confidence != "none":
        columns = d + r if c.confidence == "markov" else d
        shapes |= {"confidence_head.proj.weight": (1, columns), "confidence_head.proj.bias": (1,)}
    return shapes


def products(c: DrafterConfig) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """The matrix products of drafting: shape [N, K] of the weights, and what may be fused into each (see
    `verify_kernels.cute.linear.run.choose`)."""
    if c.mla is not None:
        raise ValueError("drafter: found mla layers, allowed: qwen3 and llama layers (no kernels are built for others)")
    shapes, d, bias = tensor_shapes(c), c.hidden_size, ("bias",) if c.attention_bias else ()
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wide = shapes.get("layers.0.self_attn.q_proj.weight", (q, d))[1]
    context = (c.num_hidden_layers * 2 * kv, wide)
    found = [(shapes["fc.weight"], ()), ((c.draft_vocab_size, d), ()), ((q + 2 * kv, wide), bias), (context, bias)]
    found += [((q + 2 * kv, wide), (*bias, "rms_in")), ((d, q), (*bias, "residual", "rms_out"))]
    found += [((2 * c.intermediate_size, d), ("swiglu", "rms_in")), ((d, c.intermediate_size), ("residual", "rms_out"))]
    if c.markov_rank:
        found.append((shapes["markov_head.markov_w2.weight"], ()))
    if c.confidence != "none":
        found.append((shapes["confidence_head.proj.weight"], ("bias",)))
    return list(dict.fromkeys(found))


def _parameter(x: Tensor | None) -> nn.Parameter | None:
    return None if x is None else nn.Parameter(x)


class DraftLayer(nn.Module):
    """Weights of one layer; q, k and v are merged by rows, gate and up as `interleave` does it."""

    def __init__(self, c: DrafterConfig, get: Callable[[str], Tensor | None]) -> None:
        super().__init__()

        def merged(part: str, names: str, kind: str) -> nn.Parameter | None:
            parts = [get(f"{part}.{name}_proj.{kind}") for name in names.split()]
            return None if parts[0] is None else nn.Parameter(torch.cat(parts))

        self.input_norm = _parameter(get("input_layernorm.weight"))
        self.hidden_norm = _parameter(get("hidden_norm.weight"))
        self.qkv, self.qkv_bias = merged("self_attn", "q k v", "weight"), merged("self_attn", "q k v", "bias")
        self.o, self.o_bias = _parameter(get("self_attn.o_proj.weight")), _parameter(get("self_attn.o_proj.bias"))
        self.q_norm = _parameter(get("self_attn.q_norm.weight"))
        self.k_norm = _parameter(get("self_attn.k_norm.weight"))
        self.post_norm = _parameter(get("post_attention_layernorm.weight"))
        self.gate_up = nn.Parameter(interleave(get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")))
        self.down = _parameter(get("mlp.down_proj.weight"))
        self.head_dim, self.q_size = c.head_dim, c.num_attention_heads * c.head_dim
        self.kv_size = c.num_key_value_heads * c.head_dim

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, columns] -> q [N, Hq, D], k and v [N, Hkv, D], before norms and rotary embedding."""
        parts = ops.linear(x, self.qkv, self.qkv_bias).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v

    def context(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of fused features [N, d], which skip the input norm -> k and v [N, Hkv, D]."""
        bias = None if self.qkv_bias is None else self.qkv_bias[self.q_size :]
        k, v = ops.linear(fused, self.qkv[self.q_size :], bias).split((self.kv_size, self.kv_size), dim=-1)
        return k.unflatten(-1, (-1, self.head_dim)), v.unflatten(-1, (-1, self.head_dim))


    def tensors(self) -> dict[str, Tensor | None]:
        """What the layer was made of, under DeepSpec's names; None for what it does not have."""
        sizes = [self.q_size, self.kv_size, self.kv_size]
        found = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            "hidden_norm.weight": self.hidden_norm,
            "self_attn.o_proj.weight": self.o,
            "self_attn.o_proj.bias": self.o_bias,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
        }
        found |= zip((f"self_attn.{x}_proj.weight" for x in "qkv"), self.qkv.split(sizes))
        if self.qkv_bias is not None:
            found |= zip((f"self_attn.{x}_proj.bias" for x in "qkv"), self.qkv_bias.split(sizes))
        gate, up = apart(self.gate_up)
        return found | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": self.down}


class DraftNetwork(nn.Module):
    """A DSpark, DFlash or EAGLE-3 draft network of any published dialect (fact sheet §1.2, §1.12).

    embed [V, d] and lm_head [V_draft, d] are frozen (usually the target's own). target_ids [V_draft] int64: target id
    of each draft id, None where they are the same. mask: the vector that fills masked slots.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        embed: Tensor,
        lm_head: Tensor,
        target_ids: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """tensors: those of `tensor_shapes`, checked, in the dtype and on the device to compute in."""
        super().__init__()
        c = self.config = config
        get = tensors.get
        self.fc, self.norm = nn.Parameter(tensors["fc.weight"]), nn.Parameter(tensors["norm.weight"])
        self.hidden_norm = _parameter(get("hidden_norm.weight"))
        layer = DraftLayer if c.mla is None else latent.LatentLayer
        self.layers = nn.ModuleList(
            layer(c, lambda name, i=i: get(f"layers.{i}.{name}")) for i in range(c.num_hidden_layers)
        )
        self._context: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        self.markov = self.confidence = None
        if c.markov_head_type is not None:
            extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(c.markov_head_type)
            self.markov = MarkovHead(
                c.markov_head_type,
                tensors["markov_head.markov_w1.weight"],
                tensors["markov_head.markov_w2.weight"],
                get(f"markov_head.{extra}.weight"),
                get(f"markov_head.{extra}.bias"),
            )
        if c.confidence != "none":
            weight, bias = (tensors[f"confidence_head.proj.{x}"] for x in ("weight", "bias"))
            self.confidence = ConfidenceHead(weight, bias)
        frozen: dict[str, Any] = {"embed": embed, "lm_head": lm_head, "target_ids": target_ids}
        frozen["mask"] = embed[c.mask_token_id] if mask is None and c.mask_token_id is not None else mask
        for name, tensor in frozen.items():
            self.register_buffer(name, tensor, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features [N, taps * H] -> what the layers see of the context [N, d]."""
        fused = ops.linear(features, self.fc)
        return fused if self.hidden_norm is None else ops.rms_norm(fused, self.hidden_norm, self.config.rms_norm_eps)

    def context(self, fused: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys and values of fused features [N, d] in all layers, as one product -> (kv [N, L, 2, Hkv, D], the layers'
        k_norm [L, D] or None). For frozen weights: they are stacked at the first call."""
        if self._context is None:
            biases = [layer.qkv_bias[layer.q_size :] for layer in self.layers if layer.qkv_bias is not None]
            norms = [layer.k_norm for layer in self.layers if layer.k_norm is not None]
            self._context = (
                torch.cat([layer.qkv[layer.q_size :] for layer in self.layers]),
                torch.cat(biases) if biases else None,
                torch.stack(norms) if norms else None,
            )
        weight, bias, norms = self._context
        kv = ops.linear(fused, weight, bias)
        return kv.view(-1, len(self.layers), 2, self.config.num_key_value_heads, self.config.head_dim), norms

    def latents(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """As `context`, of latent layers -> (latents after their norms [N, L, rank], the keys' own channels before
        their rotation [N, L, R])."""
        m = self.config.mla
        if self._context is None:
            self._context = (torch.cat([layer.in_proj[m.q_lora_rank :] for layer in self.layers]), None, None)
        both = ops.linear(fused, self._context[0]).unflatten(-1, (-1, m.width))
        normed = [
            ops.rms_norm(both[:, i, : m.kv_lora_rank], layer.kv_norm, self.config.rms_norm_eps)
            for i, layer in enumerate(self.layers)
        ]
        return torch.stack(normed, dim=1), both[..., m.kv_lora_rank :]

    def block_input(self, anchors: Tensor, slots: int) -> Tensor:
        """[anchor, mask, mask, ...] for each anchor: ids [R] -> [R * slots, d]."""
        first = ops.embedding(anchors, self.embed)[:, None]
        masks = self.mask.expand(anchors.shape[0], slots - 1, -1)
        return torch.cat((first, masks), dim=1).flatten(0, 1)

    def run(self, x: Tensor, residual: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """All layers. x: input of the first attention (normed), residual [N, d] -> (hidden after the final norm,
        hidden before it), both [N, d]."""
        eps = self.config.rms_norm_eps
        for i, layer in enumerate(self.layers):
            x = attend(i, *layer.project(x)).flatten(1)
            x, residual = ops.linear_add_rms_norm(x, layer.o, layer.o_bias, residual, layer.post_norm, eps)
            x = ops.linear_silu_and_mul(x, layer.gate_up)
            norm = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.norm
            x, residual = ops.linear_add_rms_norm(x, layer.down, None, residual, norm, eps)
        return ops.normed(x), residual

    def block(self, anchors: Tensor, attend: Attend) -> Tensor:
        """One block pass: anchors [R] -> hidden after the final norm, [R, block_size, d]."""
        c = self.config
        residual = self.block_input(anchors, c.block_size)
        x = ops.rms_norm(residual, self.layers[0].input_norm, c.rms_norm_eps)
        return self.run(x, residual, attend)[0].view(anchors.shape[0], c.block_size, c.hidden_size)

    def paired(self, ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """EAGLE-3: token ids [N] beside hidden states g [N, d] -> (attention input [N, 2 d], residual [N, d])."""
        c, layer = self.config, self.layers[0]
        normed = ops.rms_norm(g, layer.hidden_norm, c.rms_norm_eps)
        e = ops.rms_norm(ops.embedding(ids, self.embed), layer.input_norm, c.rms_norm_eps)
        return torch.cat((e, normed), dim=-1), normed if c.norm_before_residual else g

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, d] after the final norm -> float32 [N, V_draft]."""
        return ops.logits(hidden, self.lm_head)

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids as target ids."""
        return ids if self.target_ids is None else self.target_ids[ids]

    def spread(self, logits: Tensor) -> Tensor:
        """Draft logits [..., V_draft] over the target's vocabulary [..., V]; what cannot be drafted is -inf."""
        if self.target_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return full.index_copy_(-1, self.target_ids, logits)

    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors under DeepSpec's names, as `tensor_shapes` lists them."""
        c = self.config
        found = {"fc.weight": self.fc, "norm.weight": self.norm, "hidden_norm.weight": self.hidden_norm}
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": tensor for name, tensor in layer.tensors().items()}
        if self.markov is not None:
            m, extra = self.markov, "gate_proj" if self.markov.kind == "gated" else "joint_proj"
            found |= {"markov_head.markov_w1.weight": m.w1, "markov_head.markov_w2.weight": m.w2}
            found |= {f"markov_head.{extra}.weight": m.weight, f"markov_head.{extra}.bias": m.bias}
        if self.confidence is not None:
            head = self.confidence
            found |= {"confidence_head.proj.weight": head.weight, "confidence_head.proj.bias": head.bias}
        return {name: found[name] for name in tensor_shapes(c)}
