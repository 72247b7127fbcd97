"""One decoder for Llama, Qwen3 and Qwen3-MoE: pre-norm blocks of GQA attention with rotary embedding, then SwiGLU or
routed experts. Every operation goes through `verify_kernels.ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_runtime.errors import CheckpointError, ConfigError
from dspark_runtime.forced_routing import ForcedRouting
from dspark_runtime.models.config import ModelConfig
from verify_kernels import ops
from verify_kernels.batch import KVCache, PassBatch
from verify_kernels.layouts import SIDE
from verify_kernels.quantized import BLOCK, GROUP, Fp8Blocks, Mxfp4, Quantized, join_rows, stack
from verify_kernels.rope import cos_sin_table


@dataclass
class Layer:
    """Weights of one block. qkv is merged by rows, gate_up as `interleave` does it; with experts, gate_up is [E, 2 I, H],
    gates first, and down [E, H, I], and both may be quantised."""

    input_norm: Tensor
    qkv: Tensor | Quantized
    qkv_bias: Tensor | None
    o: Tensor | Quantized
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    router: Tensor | None
    gate_up: Tensor | Quantized
    down: Tensor | Quantized


def layer_shapes(c: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one block under their Hugging Face names (without the `model.layers.i.` prefix). Experts are stacked:
    mlp.experts.gate_up_proj [E, 2 I, H] and mlp.experts.down_proj [E, H, I]."""
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if c.attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    if c.is_moe(index):
        e, i = c.num_experts, c.moe_intermediate_size
        shapes |= {
            "mlp.gate.weight": (e, h),
            "mlp.experts.gate_up_proj": (e, 2 * i, h),
            "mlp.experts.down_proj": (e, h, i),
        }
    else:
        i = c.intermediate_size
        shapes |= {
            "mlp.gate_proj.weight": (i, h),
            "mlp.up_proj.weight": (i, h),
            "mlp.down_proj.weight": (h, i),
        }
    return shapes


def tensor_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model under its Hugging Face name (experts stacked, see `layer_shapes`)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(c, i).items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def products(c: ModelConfig) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """The matrix products of a pass but for those of experts: shape [N, K] of the weights, and what may be fused into each
    (see `verify_kernels.cute.linear.run.choose`)."""
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    bias = ("bias",) if c.attention_bias else ()
    found: list[tuple[tuple[int, int], tuple[str, ...]]] = [((c.vocab_size, h), ())]
    for i in range(c.num_hidden_layers):
        before = () if i == 0 or c.is_moe(i - 1) else ("rms_in",)
        found += [((q + 2 * kv, h), (*bias, *before)), ((h, q), (*bias, "residual", "rms_out"))]
        if c.is_moe(i):
            found.append(((c.num_experts, h), ()))
        else:
            gate_up, down = (2 * c.intermediate_size, h), (h, c.intermediate_size)
            found += [(gate_up, ("swiglu", "rms_in")), (down, ("residual", "rms_out"))]
    return list(dict.fromkeys(found))


class TensorReader:
    """Takes tensors out of a checkpoint one by one, checked, converted and moved."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._source, self._dtype, self._device = tensors, source, dtype, device
        self.taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __call__(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """dtype: to convert to, the reader's own if None; a packed one is taken as it is stored."""
        if key not in self._tensors:
            raise CheckpointError(f"{self._source}: {key}: missing, expected shape {list(shape)}")
        tensor = self._tensors[key]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self._source}: {key}: found shape {list(tensor.shape)}, expected {list(shape)}")
        dtype = dtype or self._dtype
        if dtype.itemsize == 1 and tensor.dtype != dtype:
            raise CheckpointError(f"{self._source}: {key}: found dtype {tensor.dtype}, expected {dtype}")
        if dtype.itemsize > 1 and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise CheckpointError(f"{self._source}: {key}: found dtype {tensor.dtype}, expected 16 bits or more of floating point")
        self.taken.add(key)
        return tensor.to(device=self._device, dtype=dtype)

    def stored(self, key: str, shape: tuple[int, ...]) -> Tensor | Quantized:
        """A tensor; a matrix [N, K] or a stack of them is quantised if the checkpoint has it so."""
        if len(shape) < 2:
            return self(key, shape)
        *lead, n, k = shape
        packed, scale = (key.removesuffix("weight") + name for name in ("weight_packed", "weight_scale"))
        if f"{key}_scale_inv" in self:
            values = self(key, shape, torch.float8_e4m3fn)
            return Fp8Blocks(values, self(f"{key}_scale_inv", (*lead, -(-n // BLOCK), -(-k // BLOCK)), torch.float32))
        if packed in self:
            if k % GROUP:
                raise CheckpointError(f"{self._source}: {packed}: {k} columns, expected multiples of {GROUP}")
            values = self(packed, (*lead, n, k // 2), torch.uint8)
            return Mxfp4(values, self(scale, (*lead, n, k // GROUP), torch.uint8))
        return self(key, shape)

    def plain(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """As `stored`, dequantised."""
        weight = self.stored(key, shape)
        return weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype)

    def matrix(self, names: Sequence[tuple[str, tuple[int, ...]]], gate_up: bool) -> Tensor | Quantized:
        """Matrices (key, shape) of one input as one, rows after rows, as the products of the chosen kernels read it (see
        `ops.pack_linear`). Quantised ones whose rows do not end on whole blocks are dequantised before they are joined."""
        parts = [self.stored(key, shape) for key, shape in names]
        if len({getattr(part, "kind", None) for part in parts}) == 1 and not isinstance(parts[0], Tensor):
            if all(part.shape[0] % BLOCK == 0 for part in parts[:-1]):
                return ops.pack_linear(join_rows(parts), self._dtype, gate_up)
        plain = [part if isinstance(part, Tensor) else part.dequantize(self._dtype) for part in parts]
        return ops.pack_linear(plain[0] if len(plain) == 1 else torch.cat(plain), self._dtype, gate_up)

    def experts(self, prefix: str, count: int, inner: int, hidden: int) -> tuple[Tensor | Quantized, Tensor | Quantized]:
        """(gate_up, down) of a layer, from stacked tensors or from one set per expert; as quantised as they are stored."""
        if f"{prefix}gate_up_proj" in self:
            gate_up = self.stored(f"{prefix}gate_up_proj", (count, 2 * inner, hidden))
            return gate_up, self.stored(f"{prefix}down_proj", (count, hidden, inner))
        parts = []
        for e in range(count):
            gate, up = (self.stored(f"{prefix}{e}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
            parts.append((gate, up, self.stored(f"{prefix}{e}.down_proj.weight", (hidden, inner))))
        kinds = sorted({getattr(part, "kind", "16 bits or more") for expert in parts for part in expert})
        if len(kinds) > 1:
            raise CheckpointError(f"{self._source}: {prefix}*: found experts in {' and '.join(kinds)}, expected one kind")
        if isinstance(parts[0][0], Tensor):
            return torch.stack([torch.cat(both) for *both, _ in parts]), torch.stack([down for *_, down in parts])
        try:
            return stack([join_rows(both) for *both, _ in parts]), stack([down for *_, down in parts])
        except ValueError as error:
            raise CheckpointError(f"{self._source}: {prefix}*: {error}") from None

    def finish(self) -> None:
        """Raise for the first tensor that nothing asked for."""
        for key in self._tensors:
            if key not in self.taken and not key.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{self._source}: {key}: not a tensor of this architecture")


def _read_layer(take: TensorReader, c: ModelConfig, index: int) -> Layer:
    shapes = layer_shapes(c, index)
    prefix = f"model.layers.{index}."

    def get(name: str) -> Tensor | None:
        return take.plain(prefix + name, shapes[name]) if name in shapes else None

    def matrix(*names: str, gate_up: bool = False) -> Tensor | Quantized:
        return take.matrix([(f"{prefix}{name}.weight", shapes[f"{name}.weight"]) for name in names], gate_up)

    if c.is_moe(index):
        stored = take.experts(f"{prefix}mlp.experts.", c.num_experts, c.moe_intermediate_size, c.hidden_size)
        gate_up, down = ops.pack_experts(*stored)
    else:
        gate_up, down = matrix("mlp.gate_proj", "mlp.up_proj", gate_up=True), matrix("mlp.down_proj")
    biases = [get(f"self_attn.{x}_proj.bias") for x in "qkv"]
    return Layer(
        input_norm=get("input_layernorm.weight"),
        qkv=matrix(*(f"self_attn.{x}_proj" for x in "qkv")),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        o=matrix("self_attn.o_proj"),
        o_bias=get("self_attn.o_proj.bias"),
        q_norm=get("self_attn.q_norm.weight"),
        k_norm=get("self_attn.k_norm.weight"),
        post_norm=get("post_attention_layernorm.weight"),
        router=get("mlp.gate.weight"),
        gate_up=gate_up,
        down=down,
    )


class Transformer:
    """A target or draft model; implements `dspark_runtime.models.base.Model`."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        source: str | None = None,
    ) -> None:
        """tensors: under Hugging Face names, of any floating-point type. source: named in errors (default: name).

        Raises CheckpointError for a missing, unexpected or misshapen tensor, ConfigError for a max_model_len beyond the
        model's and for an intermediate_size that is no multiple of 8.
        """
        c = self.config = config
        limit = c.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ConfigError(f"max_model_len: found {max_model_len}, allowed: 1 to {limit}, the context limit of {name}")
        if c.intermediate_size % SIDE:
            raise ConfigError(f"intermediate_size: found {c.intermediate_size}, allowed: multiples of {SIDE}")
        self.name = name
        self.device, self.dtype = torch.device(device), dtype
        self.vocab_size = c.vocab_size
        self.num_layers = c.num_hidden_layers
        self.max_model_len = max_model_len or limit
        self.eos_token_ids = c.eos_token_ids

        take = TensorReader(tensors, source or name, dtype, self.device)
        vocab = (c.vocab_size, c.hidden_size)
        self.embed = take("model.embed_tokens.weight", vocab)
        self.layers = [_read_layer(take, c, i) for i in range(c.num_hidden_layers)]
        self.norm = take("model.norm.weight", (c.hidden_size,))
        if c.tie_word_embeddings:
            self.lm_head = self.embed
            take.taken.add("lm_head.weight")  # some checkpoints store the tied copy too
        else:
            self.lm_head = take("lm_head.weight", vocab)
        take.finish()

        self.routing: ForcedRouting | None = None
        """Experts by a stated law, for synthetic runs; None: the router's own choices."""
        self._cos_sin = cos_sin_table(c, self.max_model_len, self.device)
        kv = c.num_key_value_heads * c.head_dim
        self._qkv_split = (c.num_attention_heads * c.head_dim, kv, kv)

    def allocate(self, pages: int, page_size: int, requests: int = 1) -> KVCache:
        c = self.config
        return KVCache.allocate(
            c.num_hidden_layers, pages, page_size, c.num_key_value_heads, c.head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(self, batch: PassBatch, cache: KVCache, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """See `Model.forward`. Raises ConfigError for a tap that is no layer."""
        c, layers = self.config, self.layers
        if any(not -1 <= tap < len(layers) for tap in taps):
            raise ConfigError(f"taps: found {list(taps)}, allowed: decoder layers 0 to {len(layers) - 1}, -1 for embeddings")
        n, eps, scale = batch.num_tokens, c.rms_norm_eps, c.head_dim**-0.5
        if batch.plan is None:
            batch.plan = ops.plan_attention(batch, cache.page_size)
        forced = self.routing(batch) if self.routing is not None else None
        batch.experts = []
        tapped: dict[int, Tensor] = {}
        residual = tapped[-1] = ops.embedding(batch.token_ids, self.embed)
        x = ops.rms_norm(residual, layers[0].input_norm, eps)
        for i, layer in enumerate(layers):
            q, k, v = ops.linear(x, layer.qkv, layer.qkv_bias).split(self._qkv_split, dim=-1)
            q, k, v = (t.view(n, -1, c.head_dim) for t in (q, k, v))
            k_pages, v_pages = cache.k[i], cache.v[i]
            q = ops.append_kv(q, k, v, k_pages, v_pages, batch, self._cos_sin, layer.q_norm, layer.k_norm, eps)
            x = ops.paged_tree_attention(q, k_pages, v_pages, batch, scale=scale)
            x, residual = ops.linear_add_rms_norm(
                x.reshape(n, -1), layer.o, layer.o_bias, residual, layer.post_norm, eps
            )
            # The norm that follows a block is the next block's first one, or the final one.
            norm = layers[i + 1].input_norm if i + 1 < len(layers) else self.norm
            if layer.router is None:
                x = ops.linear_silu_and_mul(x, layer.gate_up)
                x, residual = ops.linear_add_rms_norm(x, layer.down, None, residual, norm, eps)
            else:
                x = ops.normed(x)
                router_logits = ops.linear(x, layer.router)
                weights, experts = ops.moe_route(router_logits, c.num_experts_per_tok, c.norm_topk_prob)
                if forced is not None:
                    experts = forced[len(batch.experts)]
                batch.experts.append(experts)
                x = ops.moe_experts(x, layer.gate_up, layer.down, weights, experts)
                x, residual = ops.add_rms_norm(x, residual, norm, eps)
            if i in taps:
                tapped[i] = residual
        return ops.normed(x), torch.cat([tapped[i] for i in taps], dim=-1) if taps else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return ops.logits(hidden, self.lm_head)

    @torch.inference_mode()
    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Model.greedy`."""
        return ops.greedy_logits(hidden, self.lm_head)
