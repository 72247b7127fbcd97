"""Kimi-K3: delta attention and latent attention by turns, attention over depth in place of a residual stream, experts
in a latent space. Every operation goes through `verify_kernels.ops`; its docstring there gives the semantics.

Taken from vLLM 0.33 (models/kimi_k3/nvidia/{model,kda,mla}.py) and flash-linear-attention, written anew. What no public
source settles: the epsilon of the norms inside latent attention (see configs/models/kimi-k3.yaml). Not modelled: MXFP8
activations of the experts. Not built: reading the published checkpoint, its vision tower.

**Shards.** `KimiK3Config.of_rank` divides heads, columns, experts and vocabulary; every shape below then is a rank's,
and `RankTensors` cuts a whole model's tensors to it. Every rank has a copy of norms, router, compressions of queries
and keys, and the latents' pages. Ranks add up what they have after the embedding, each attention, the experts, and each
MLP or mixture (whose up-projection takes the rank's channels of the latent); they join the mixture's down-projection
and the head's vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafters.taps import Mixed
from dspark_runtime.cost.facts import Architecture, DenseMlp, Kda, Mla, Moe, Situ, load_architecture
from dspark_runtime.errors import ConfigError
from dspark_runtime.forced_routing import ForcedRouting
from dspark_runtime.models.shards import RankTensors, Shard
from dspark_runtime.models.transformer import TensorReader
from verify_kernels import ops
from verify_kernels.batch import KVCache, PassBatch, RecurrentStates
from verify_kernels.comm import Group
from verify_kernels.quantized import GROUP, Mxfp4, Quantized
from verify_kernels.reference.attention import AttentionPlan
from verify_kernels.reference.recurrence import RecurrencePlan

@dataclass(frozen=True)
class KimiK3Config:
    """A model of Kimi-K3's form: facts of configs/models, complete. Dense feed-forward layers come first. Every fourth
    layer and the last have latent attention (layers 3, 7, ..., from 0), the others delta attention. facts: the whole
    model's, always; kda, mla, dense and moe: of the rank that `shard` names, whose heads and columns they count."""

    facts: Architecture
    kda: Kda
    mla: Mla
    dense: DenseMlp
    moe: Moe
    situ: Situ
    shard: Shard = field(default=Shard())

    architecture = "kimi_k3"
    eos_token_ids: tuple[int, ...] = ()  # the facts name none

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.facts.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.facts.num_layers

    @property
    def max_position_embeddings(self) -> int:
        return self.facts.max_position_embeddings

    @property
    def rms_norm_eps(self) -> float:
        return self.facts.rms_norm_eps

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok

    @property
    def experts_held(self) -> int:
        """Experts of a layer that this rank holds, or holds slices of."""
        return self.moe.num_experts // (self.shard.size if self.shard.parallel == "ep" else 1)

    @property
    def vocab_held(self) -> int:
        return self.vocab_size // self.shard.size

    @property
    def latent_held(self) -> int:
        """Channels of the experts' latent space whose projections this rank holds."""
        return self.moe.expert_hidden_size // self.shard.size

    def of_rank(self, shard: Shard) -> KimiK3Config:
        """What one rank holds of this whole model. Raises ConfigError naming the dimension that does not divide."""
        moe, part = self.moe, shard.part
        held = {"shared_intermediate_size": part("ffn.moe.shared_intermediate_size", moe.shared_intermediate_size)}
        if shard.parallel == "tp":  # whole groups of each expert's second matrix
            held["intermediate_size"] = part("ffn.moe.intermediate_size", moe.intermediate_size, GROUP)
        else:
            part("ffn.moe.num_experts", moe.num_experts)
        part("vocab_size", self.vocab_size)
        part("ffn.moe.expert_hidden_size", moe.expert_hidden_size)

        def divided(field: str, facts: Kda | Mla | DenseMlp, name: str) -> Kda | Mla | DenseMlp:
            return facts.model_copy(update={name: part(f"{field}.{name}", getattr(facts, name))})

        return replace(
            self,
            kda=divided("attention.kda", self.kda, "heads"),
            mla=divided("attention.mla", self.mla, "heads"),
            dense=divided("ffn.dense", self.dense, "intermediate_size"),
            moe=moe.model_copy(update=held),
            shard=shard,
        )

    def is_moe(self, layer: int) -> bool:
        return layer >= self.dense.layers

    def is_kda(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0 and layer + 1 != self.num_hidden_layers


def kimi_k3_config(name: str) -> KimiK3Config:
    """From facts of configs/models, or a YAML file of that form. Raises ConfigError for what lacks or contradicts."""
    facts = load_architecture(name)
    kda, mla, dense, moe = facts.attention.kda, facts.attention.mla, facts.ffn.dense, facts.ffn.moe
    parts = {
        "attention.kda": kda, "attention.mla": mla, "ffn.dense": dense, "ffn.moe": moe, "ffn.situ": facts.ffn.situ,
        "attention_residual_block": facts.attention_residual_block, "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position_embeddings,
    }  # fmt: skip
    missing = next((field for field, value in parts.items() if not value), None)
    if missing or facts.drafter:
        raise ConfigError(
            f"target: {name} holds facts of an architecture that does not run here ({missing or 'a drafter'}); "
            "allowed: those of Kimi-K3's form, and configs/models without `architecture: facts`"
        )
    config = KimiK3Config(facts, kda, mla, dense, moe, facts.ffn.situ)
    found = sum(config.is_kda(i) for i in range(config.num_hidden_layers))
    per_expert = (moe.expert_hidden_size, moe.intermediate_size)
    for field, value, good, allowed in (
        ("attention.kda.layers", kda.layers, kda.layers == found, f"{found} of {config.num_hidden_layers} layers"),
        ("attention.kda.gate_lower_bound", kda.gate_lower_bound, kda.gate_lower_bound is not None, "a bound below 0"),
        ("attention.mla.norm_eps", mla.norm_eps, mla.norm_eps is not None, "an epsilon above 0"),
        ("attention.mla.gated", mla.gated, mla.gated, "true"),
        ("ffn.moe.expert_hidden_size", moe.expert_hidden_size, min(per_expert) > 0, "a latent size above 0"),
        ("ffn.moe", per_expert, all(x % GROUP == 0 for x in per_expert), f"sizes of experts in multiples of {GROUP}"),
        ("ffn.moe.num_shared_experts", moe.num_shared_experts, moe.num_shared_experts > 0, "1 or more"),
        ("weights.experts", facts.weights.experts, facts.weights.experts == "mxfp4", "mxfp4"),
    ):
        if not good:
            raise ConfigError(f"{name}: {field}: found {value}, allowed: {allowed}")
    return config


# ----------------------------------------------------------------------------------------------------------- weights

WIDE = "wide"  # kept in float32 whatever the model's dtype

Kind = torch.dtype | str | None
"""dtype of a tensor: torch.uint8 for packed ones, WIDE, or None for the model's."""

Take = Callable[[str], Tensor]
"""Reads the tensor of a name."""


def tensor_shapes(c: KimiK3Config) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """Every tensor's shape and kind on the rank of `c.shard`, under the checkpoint's names but for `language_model.`
    before them. Experts are stacked: experts.gate_up is [w1; w3] and experts.down w2 of all experts."""
    h, kda, mla, moe = c.hidden_size, c.kda, c.mla, c.moe
    wide, q_dim = kda.heads * kda.head_dim, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    shapes: dict[str, tuple[tuple[int, ...], Kind]] = {"model.embed_tokens.weight": ((c.vocab_held, h), None)}

    def put(prefix: str, **tensors: tuple[int, ...]) -> None:
        shapes.update({f"{prefix}{name}.weight": (shape, None) for name, shape in tensors.items()})

    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        put(layer, input_layernorm=(h,), post_attention_layernorm=(h,))
        put(layer, self_attention_res_norm=(h,), self_attention_res_proj=(1, h), mlp_res_norm=(h,), mlp_res_proj=(1, h))
        mixer = f"{layer}self_attn."
        if c.is_kda(i):
            put(mixer, **{f"{x}_proj": (wide, h) for x in "qkvg"}, f_a_proj=(kda.gate_rank, h))
            put(mixer, f_b_proj=(wide, kda.gate_rank), b_proj=(kda.heads, h), o_proj=(h, wide))
            for x in "qkv":
                shapes[f"{mixer}{x}_conv1d.weight"] = ((wide, 1, kda.conv_kernel), WIDE)
            shapes[f"{mixer}A_log"] = ((kda.heads,), WIDE)
            shapes[f"{mixer}dt_bias"] = ((wide,), WIDE)
            shapes[f"{mixer}o_norm.weight"] = ((kda.head_dim,), WIDE)
        else:
            out = mla.heads * mla.v_head_dim
            put(mixer, q_a_proj=(mla.q_lora_rank, h), q_a_layernorm=(mla.q_lora_rank,))
            put(mixer, q_b_proj=(mla.heads * q_dim, mla.q_lora_rank), g_proj=(out, h), o_proj=(h, out))
            put(mixer, kv_a_proj_with_mqa=(mla.kv_values, h), kv_a_layernorm=(mla.kv_lora_rank,))
            put(mixer, kv_b_proj=(mla.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank))
        if c.is_moe(i):
            block, latent, inner = f"{layer}block_sparse_moe.", moe.expert_hidden_size, moe.intermediate_size
            shared = moe.num_shared_experts * moe.shared_intermediate_size
            put(block, gate=(moe.num_experts, h), routed_expert_down_proj=(c.latent_held, h))
            put(block, routed_expert_norm=(latent,), routed_expert_up_proj=(h, c.latent_held))
            put(f"{block}shared_experts.", gate_proj=(shared, h), up_proj=(shared, h), down_proj=(h, shared))
            shapes[f"{block}gate.e_score_correction_bias"] = ((moe.num_experts,), WIDE)
            for name, rows, columns in (("gate_up", 2 * inner, latent), ("down", latent, inner)):
                experts = f"{block}experts.{name}.weight"
                shapes[f"{experts}_packed"] = ((c.experts_held, rows, columns // 2), torch.uint8)
                shapes[f"{experts}_scale"] = ((c.experts_held, rows, columns // GROUP), torch.uint8)
        else:
            inner = c.dense.intermediate_size
            put(f"{layer}mlp.", gate_proj=(inner, h), up_proj=(inner, h), down_proj=(h, inner))
    put("model.", output_attn_res_norm=(h,), output_attn_res_proj=(1, h), norm=(h,))
    put("", lm_head=(c.vocab_held, h))
    return shapes


def rank_tensors(tensors: Mapping[str, Tensor], whole: KimiK3Config, part: KimiK3Config) -> RankTensors:
    """What the rank of `part` holds of a whole model's tensors."""
    shapes = [{name: shape for name, (shape, _) in tensor_shapes(c).items()} for c in (whole, part)]
    return RankTensors(tensors, *shapes, part.shard.rank, ("gate_up.weight_packed", "gate_up.weight_scale"))


def cache_bytes(c: KimiK3Config, dtype: torch.dtype, tokens: int, requests: int) -> int:
    """Bytes of latents of so many tokens in all, and of states and windows of so many requests, on a rank."""
    kda, wide = c.kda, c.kda.heads * c.kda.head_dim
    state = kda.head_dim * wide * _wide(dtype).itemsize + 3 * (kda.conv_kernel - 1) * wide * dtype.itemsize
    return c.mla.layers * c.mla.kv_values * dtype.itemsize * tokens + kda.layers * state * requests


def weight_bytes(c: KimiK3Config, dtype: torch.dtype) -> int:
    """Bytes of all tensors of a rank in their formats, the rest in dtype."""
    kinds = {None: dtype.itemsize, WIDE: _wide(dtype).itemsize, torch.uint8: 1}
    return sum(math.prod(shape) * kinds[kind] for shape, kind in tensor_shapes(c).values())


class DummyTensors(Mapping[str, Tensor]):
    """Seeded random weights of a rank in their real formats, made when asked for. The text means nothing. What ranks
    share is the same on all of them.

    Norms are one, matrices of standard deviation 0.02 (experts: random 4-bit codes, about 2.9, under scales of 2^-7).
    """

    def __init__(self, config: KimiK3Config, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._shapes = tensor_shapes(config)
        self._shared = {name for name, shape in tensor_shapes(_whole(config)).items() if shape == self._shapes[name]}
        self._rank = config.shard.rank
        self._order = {name: i for i, name in enumerate(self._shapes)}
        self._seed, self._dtype, self._device = seed, dtype, device

    def __getitem__(self, key: str) -> Tensor:
        shape, kind = self._shapes[key]
        if key.endswith("weight_scale"):
            return torch.full(shape, 127 - 7, dtype=torch.uint8, device=self._device)
        rank = 0 if key in self._shared else self._rank
        seed = self._seed * 1_000_003 + self._order[key] + rank * 15_485_863
        generator = torch.Generator(self._device).manual_seed(seed)
        if kind == torch.uint8:
            return torch.empty(shape, dtype=torch.uint8, device=self._device).random_(generator=generator)
        values = torch.empty(shape, dtype=_wide(self._dtype) if kind == WIDE else self._dtype, device=self._device)
        if "norm" in key:
            return values.fill_(1)
        if key.endswith("A_log"):
            return values.uniform_(1, 16, generator=generator).log_()
        if key.endswith("dt_bias"):
            return values.uniform_(-1, 0, generator=generator)
        return values.normal_(0, 0.5 if "conv1d" in key else 0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _whole(c: KimiK3Config) -> KimiK3Config:
    attention, ffn = c.facts.attention, c.facts.ffn
    return KimiK3Config(c.facts, attention.kda, attention.mla, ffn.dense, ffn.moe, c.situ)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class DeltaAttention:
    """in_proj is [q; k; v; output gate; first factor of the forget gate; step size]."""

    in_proj: Tensor
    gate_b: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    o: Tensor


@dataclass
class LatentAttention:
    """in_proj is [q's latent; key's latent and own channels; output gate]. up_k [H, rank, nope] takes queries into the
    latent space, up_v [H, v, rank] brings values out of it."""

    in_proj: Tensor
    q_norm: Tensor
    q_b: Tensor
    kv_norm: Tensor
    up_k: Tensor
    up_v: Tensor
    o: Tensor


@dataclass
class GatedMlp:
    gate_up: Tensor
    down: Tensor


@dataclass
class LatentMoe:
    """Routed experts, as `ops.pack_experts` leaves them, between two projections, and the shared ones as one MLP."""

    router: Tensor
    bias: Tensor
    down_proj: Tensor
    gate_up: Quantized
    down: Quantized
    norm: Tensor
    up_proj: Tensor
    shared: GatedMlp


@dataclass
class Residual:
    """Attention over depth before a part of a layer, and the norm after it."""

    norm: Tensor
    score: Tensor
    out_norm: Tensor


@dataclass
class Layer:
    before_mixer: Residual
    mixer: DeltaAttention | LatentAttention
    before_ffn: Residual
    ffn: GatedMlp | LatentMoe


class KimiK3:
    """A target model, or one rank of it; implements `dspark_runtime.models.base.Model`.

    The cache holds latents in pages, [MLA layers, pages, page_size, 1, rank + rope], and for each request one row of
    states and convolution windows of the KDA layers (see `verify_kernels.batch.RecurrentStates`).
    """

    def __init__(
        self,
        config: KimiK3Config,
        tensors: Mapping[str, Tensor],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int | None = None,
        source: str | None = None,
        group: Group | None = None,
    ) -> None:
        """tensors: those of `tensor_shapes`. source: named in errors (default: name). group: the ranks among which
        `config` is divided. Raises ConfigError for a group that is not theirs."""
        c = self.config = config
        limit = c.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ConfigError(
                f"max_model_len: found {max_model_len}, allowed: 1 to {limit}, the context limit of {name}"
            )
        found = Shard(group.rank, group.size, c.shard.parallel) if group is not None else Shard()
        if c.shard.size > 1 and found != c.shard:
            raise ConfigError(f"group: found {found}, allowed: {c.shard}, the model's")
        self.group = group if c.shard.size > 1 else None
        self.name = name
        self.device, self.dtype = torch.device(device), dtype
        runs = ("cpu", "meta") if ops.mode() == "auto" else ("cpu", "meta", "cuda")
        if self.device.type not in runs:
            allowed = f"cpu, or cuda with --backend unmeasured (the kernels of {name} have not run there)"
            raise ConfigError(f"device: found {self.device.type}, allowed: {allowed}")
        self.vocab_size = c.vocab_size
        self.num_layers = c.num_hidden_layers
        self.max_model_len = max_model_len or limit
        self.eos_token_ids = c.eos_token_ids
        self.routing: ForcedRouting | None = None
        """Experts by a stated law, for synthetic runs; None: the router's own choices."""

        shapes = tensor_shapes(c)
        reader = TensorReader(tensors, source or name, dtype, self.device)

        def take(name: str) -> Tensor:
            shape, kind = shapes[name]
            return reader(name, shape, _wide(dtype) if kind == WIDE else kind)

        self.embed = take("model.embed_tokens.weight")
        self.layers = [_read_layer(take, c, i) for i in range(c.num_hidden_layers)]
        self.output = _residual(take, "model.output_attn_res", "model.norm")
        self.lm_head = take("lm_head.weight")
        reader.finish()

    def allocate(self, pages: int, page_size: int, requests: int = 1) -> KVCache:
        c, kda = self.config, self.config.kda
        k = torch.zeros(c.mla.layers, pages, page_size, 1, c.mla.kv_values, dtype=self.dtype, device=self.device)
        state = torch.zeros(
            kda.layers, requests, kda.heads, kda.head_dim, kda.head_dim, dtype=_wide(self.dtype), device=self.device
        )
        channels = 3 * kda.heads * kda.head_dim
        window = state.new_zeros(kda.layers, requests, kda.conv_kernel - 1, channels, dtype=self.dtype)
        return KVCache(k, k[..., :0], RecurrentStates(state, window))

    @torch.inference_mode()
    def forward(self, batch: PassBatch, cache: KVCache, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """See `Model.forward`. A tapped feature is what vLLM 0.33 hands to drafters by default (prefix_only): the sum
        since the layer's block began, its own attention and MLP included, without the finished blocks before;
        Inferact's drafter is served with it. A `Mixed` tap is what vLLM hands over with VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 and
        SGLang always: the mixture of that sum and the blocks that the next layer's attention reads (after the last
        layer, the model's output), before the norm; RadixArk's was trained on it. Raises ConfigError for a tap that is
        no layer, and for a pass that names no rows of states."""
        c, eps = self.config, self.config.rms_norm_eps
        if any(not -1 <= tap < self.num_layers for tap in taps):
            raise ConfigError(
                f"taps: found {list(taps)}, allowed: decoder layers 0 to {self.num_layers - 1}, -1 for embeddings"
            )
        if batch.state_rows is None:
            raise ConfigError(f"target: {self.name} has recurrent layers, which need an engine's rows (not built here)")
        latent_plan = ops.plan_latent_attention(batch, cache.page_size)
        plan = ops.plan_recurrence(batch, c.kda.conv_kernel)
        forced = self.routing(batch) if self.routing is not None else None
        batch.experts = []
        cache.states.records = []
        kda_layers, mla_layers = iter(range(c.kda.layers)), iter(range(c.mla.layers))

        blocks: list[Tensor] = []  # the residual stream where each block of layers began
        tapped: dict[int, Tensor] = {}
        mixed = {int(tap) for tap in taps if isinstance(tap, Mixed)}
        readers = [layer.before_mixer for layer in self.layers[1:]] + [self.output]
        since = tapped[-1] = self._embed(batch.token_ids)  # what was added since then
        for i, layer in enumerate(self.layers):
            x = _mix(since, blocks, layer.before_mixer, eps)
            if isinstance(layer.mixer, DeltaAttention):
                y = self._delta_attention(x, layer.mixer, batch, cache.states, next(kda_layers), plan)
            else:
                y = self._latent_attention(x, layer.mixer, batch, cache.k[next(mla_layers)], latent_plan)
            y = self._sum(y, "attention")
            if i % c.facts.attention_residual_block == 0:
                blocks.append(since)
                since = y
            else:
                since = since + y
            x = _mix(since, blocks, layer.before_ffn, eps)
            if isinstance(layer.ffn, GatedMlp):
                y = self._mlp(x, layer.ffn)
            else:
                y = self._moe(x, layer.ffn, batch, None if forced is None else forced[len(batch.experts)])
            since = since + self._sum(y, "mlp")
            tapped[i] = _mix(since, blocks, readers[i], eps, normed=False) if i in mixed else since
        hidden = _mix(since, blocks, self.output, eps)
        return hidden, torch.cat([tapped[i] for i in taps], dim=-1) if taps else None

    def _sum(self, x: Tensor, name: str) -> Tensor:
        return x if self.group is None else self.group.all_reduce(x, name)

    def _gather(self, x: Tensor, name: str) -> Tensor:
        """[N, K] of every rank -> [N, ranks * K]."""
        return x if self.group is None else self.group.all_gather(x, name)

    def _embed(self, ids: Tensor) -> Tensor:
        if self.group is None:
            return ops.embedding(ids, self.embed)
        local = ids - self.group.rank * len(self.embed)
        held = (local >= 0) & (local < len(self.embed))
        return self._sum(ops.embedding(local * held, self.embed) * held[:, None], "embedding")

    def _delta_attention(
        self, x: Tensor, w: DeltaAttention, batch: PassBatch, states: RecurrentStates, layer: int, plan: RecurrencePlan
    ) -> Tensor:
        kda = self.config.kda
        wide = kda.heads * kda.head_dim
        qkv, gate, gate_a, beta = ops.linear(x, w.in_proj).split((3 * wide, wide, kda.gate_rank, kda.heads), dim=-1)
        decay = ops.linear(gate_a, w.gate_b)
        weights = (w.conv, w.a_log, w.dt_bias, kda.gate_lower_bound)
        state, window = states.state[layer], states.window[layer]
        if batch.speculative:
            y, records = ops.kda_verify(qkv, decay, beta, *weights, state, window, plan)
            states.records.append(records)
        else:
            y = ops.kda_prefill(qkv, decay, beta, *weights, state, window, plan)
        y = ops.gated_rms_norm(y, w.norm, gate.view(y.shape), self.config.rms_norm_eps)
        return ops.linear(y.flatten(1), w.o)

    def _latent_attention(
        self, x: Tensor, w: LatentAttention, batch: PassBatch, pages: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """NoPE: the key's own channels, shared by all heads, are not rotated (`mla_use_nope`)."""
        m = self.config.mla
        sizes = (m.q_lora_rank, m.kv_lora_rank, m.qk_rope_head_dim, m.heads * m.v_head_dim)
        q, latent, own, gate = ops.linear(x, w.in_proj).split(sizes, dim=-1)
        latent = ops.rms_norm(latent, w.kv_norm, m.norm_eps)
        ops.append_latents(torch.cat((latent, own), dim=-1), pages, batch)
        q = ops.linear(ops.rms_norm(q, w.q_norm, m.norm_eps), w.q_b).view(len(x), m.heads, -1)
        nope, rope = q.split((m.qk_nope_head_dim, m.qk_rope_head_dim), dim=-1)
        q = torch.cat((ops.head_linear(nope, w.up_k), rope), dim=-1)
        scale = (m.qk_nope_head_dim + m.qk_rope_head_dim) ** -0.5
        y = ops.head_linear(ops.latent_attention(q, pages, plan, m.kv_lora_rank, scale), w.up_v)
        return ops.linear(ops.sigmoid_and_mul(y.flatten(1), gate), w.o)

    def _mlp(self, x: Tensor, w: GatedMlp) -> Tensor:
        situ = self.config.situ
        return ops.linear(ops.situ_and_mul(ops.linear(x, w.gate_up), situ.beta, situ.linear_beta), w.down)

    def _moe(self, x: Tensor, w: LatentMoe, batch: PassBatch, forced: Tensor | None) -> Tensor:
        moe, situ = self.config.moe, self.config.situ
        wide = _wide(x.dtype)  # router logits are not rounded
        logits = ops.linear(x.to(wide), w.router.to(wide))
        weights, ids = ops.moe_route(
            logits, moe.num_experts_per_tok, True, scores="sigmoid", bias=w.bias, scale=moe.routed_scaling_factor
        )
        ids = ids if forced is None else forced
        batch.experts.append(ids)
        latent = self._gather(ops.linear(x, w.down_proj), "latent")
        held = w.gate_up.shape[0]
        if held < moe.num_experts:
            ids = ids - self.config.shard.rank * held
        y = ops.situ_experts(latent, w.gate_up, w.down, weights, ids, situ.beta, situ.linear_beta)
        eps = self.config.rms_norm_eps
        if self.group is None:
            y = ops.rms_norm(y, w.norm, eps)
        else:
            y, _ = self.group.all_reduce_norm(y, None, w.norm, eps, "experts")
        columns = w.up_proj.shape[1]
        y = y.narrow(1, self.config.shard.rank * columns, columns)
        return ops.linear(y.contiguous(), w.up_proj) + self._mlp(x, w.shared)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._gather(ops.logits(hidden, self.lm_head), "logits")

    @torch.inference_mode()
    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Model.greedy`."""
        ids, best = ops.greedy_logits(hidden, self.lm_head)
        if self.group is None:
            return ids, best
        pair = torch.stack((best.double(), (ids + self.group.rank * len(self.lm_head)).double()), dim=1)  # both exact
        every = self._gather(pair, "best token").view(len(ids), -1, 2)
        value, at = every[..., 0].max(dim=1, keepdim=True)
        first = torch.where(every[..., 0] == value, every[..., 1], float("inf")).amin(1)
        first = torch.where(value[:, 0].isnan(), every[..., 1].gather(1, at)[:, 0], first)
        return first.long(), value[:, 0].float()


def _mix(since: Tensor, blocks: list[Tensor], w: Residual, eps: float, normed: bool = True) -> Tensor:
    return ops.attention_residual(since, blocks, w.norm, w.score, eps, w.out_norm if normed else None)


def _residual(take: Take, name: str, out_norm: str) -> Residual:
    return Residual(take(f"{name}_norm.weight"), take(f"{name}_proj.weight")[0], take(f"{out_norm}.weight"))


def _gated_mlp(take: Take, prefix: str) -> GatedMlp:
    gate_up = torch.cat([take(f"{prefix}{x}_proj.weight") for x in ("gate", "up")])
    return GatedMlp(gate_up, take(f"{prefix}down_proj.weight"))


def _read_layer(take: Take, c: KimiK3Config, index: int) -> Layer:
    layer = f"model.layers.{index}."
    return Layer(
        before_mixer=_residual(take, f"{layer}self_attention_res", f"{layer}input_layernorm"),
        mixer=(_read_delta if c.is_kda(index) else _read_latent)(take, c, f"{layer}self_attn."),
        before_ffn=_residual(take, f"{layer}mlp_res", f"{layer}post_attention_layernorm"),
        ffn=_read_moe(take, f"{layer}block_sparse_moe.") if c.is_moe(index) else _gated_mlp(take, f"{layer}mlp."),
    )


def _read_delta(take: Take, c: KimiK3Config, prefix: str) -> DeltaAttention:
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    return DeltaAttention(
        in_proj=torch.cat([take(f"{prefix}{name}.weight") for name in names]),
        gate_b=take(f"{prefix}f_b_proj.weight"),
        conv=torch.cat([take(f"{prefix}{x}_conv1d.weight") for x in "qkv"])[:, 0],
        a_log=take(f"{prefix}A_log"),
        dt_bias=take(f"{prefix}dt_bias").view(c.kda.heads, c.kda.head_dim),
        norm=take(f"{prefix}o_norm.weight"),
        o=take(f"{prefix}o_proj.weight"),
    )


def _read_latent(take: Take, c: KimiK3Config, prefix: str) -> LatentAttention:
    m = c.mla
    up = take(f"{prefix}kv_b_proj.weight").view(m.heads, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
    return LatentAttention(
        in_proj=torch.cat([take(f"{prefix}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")]),
        q_norm=take(f"{prefix}q_a_layernorm.weight"),
        q_b=take(f"{prefix}q_b_proj.weight"),
        kv_norm=take(f"{prefix}kv_a_layernorm.weight"),
        up_k=up[:, : m.qk_nope_head_dim].transpose(1, 2).contiguous(),
        up_v=up[:, m.qk_nope_head_dim :].contiguous(),
        o=take(f"{prefix}o_proj.weight"),
    )


def _experts(take: Take, prefix: str) -> Mxfp4:
    return Mxfp4(take(f"{prefix}weight_packed"), take(f"{prefix}weight_scale"))


def _read_moe(take: Take, prefix: str) -> LatentMoe:
    gate_up, down = ops.pack_experts(*(_experts(take, f"{prefix}experts.{name}.") for name in ("gate_up", "down")))
    return LatentMoe(
        router=take(f"{prefix}gate.weight"),
        bias=take(f"{prefix}gate.e_score_correction_bias"),
        down_proj=take(f"{prefix}routed_expert_down_proj.weight"),
        gate_up=gate_up,
        down=down,
        norm=take(f"{prefix}routed_expert_norm.weight"),
        up_proj=take(f"{prefix}routed_expert_up_proj.weight"),
        shared=_gated_mlp(take, f"{prefix}shared_experts."),
    )


def memory(device: torch.device) -> tuple[int, str]:
    """(bytes of a device, what to call it)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "this GPU"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"


def dummy_kimi_k3(
    name: str,
    config: KimiK3Config,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_model_len: int | None,
    group: Group | None = None,
) -> KimiK3:
    """With random weights, of the rank that `config` is of. Raises ConfigError for what this device does not hold."""
    need, (room, whose) = weight_bytes(config, dtype), memory(device)
    if need > room:
        raise ConfigError(
            f"target: {name} takes {math.ceil(need / 1e9)} GB of weights, {whose} has {room / 1e9:.0f} GB; allowed: "
            "one rank of it (dspark bench --rank-of N), kimi-k3-tiny, or a YAML file of its form"
        )
    tensors = DummyTensors(config, seed, dtype, device)
    options = dict(name=name, dtype=dtype, device=device, max_model_len=max_model_len, group=group)
    return KimiK3(config, tensors, **options)
