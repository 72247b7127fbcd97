"""Facts as data: architectures, machines and measured kernels from configs/, every field with its source. No torch.

A file of facts ends with `sources`: a list of {source, status, fields}. Every other field must be named by exactly one
of them, by its own name or by the name of a field that contains it (`attention` covers `attention.mla.heads`; the
longest name wins), so that no number can enter without saying where it comes from and how far it can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_runtime.configs import find, load_model_config, read_yaml
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import checked

Status = Literal["official", "measured", "secondary", "inferred", "unresolved"]
Precision = Literal["fp32", "bf16", "fp8", "mxfp4", "nvfp4"]

# Bytes of a weight, block scales included: MXFP4 has one byte for 32 values, NVFP4 one for 16.
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Strict):
    """Where some fields come from. official: the maker's own page or file; measured: a measurement, published or ours;
    secondary: someone else's account; inferred: computed here from other facts; unresolved: sources disagree or
    none."""

    source: str = Field(min_length=1)
    status: Status
    fields: tuple[str, ...] = Field(min_length=1)


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all values of nested mappings; a list is one value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


class Sourced(Strict):
    """Base of all files of facts."""

    sources: tuple[Source, ...] = Field(min_length=1)

    # What a file says about itself needs no source.
    free: ClassVar[tuple[str, ...]] = ("sources", "name", "notes")

    @model_validator(mode="before")
    @classmethod
    def _every_field_has_a_source(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("sources"), (list, tuple)):
            return values
        fields = [name for name in leaves(values) if name.split(".")[0] not in cls.free]
        named: dict[str, int] = {}
        for entry in values["sources"]:
            listed = (
                entry.fields if isinstance(entry, Source) else entry.get("fields") if isinstance(entry, dict) else None
            )
            for name in listed or ():
                named[name] = named.get(name, 0) + 1
        for name, count in named.items():
            if count > 1:
                raise ValueError(f"sources: {name}: found {count} times, allowed: once")
            if not any(field == name or field.startswith(f"{name}.") for field in fields):
                raise ValueError(f"sources: {name}: no such field in this file")
        for field in fields:
            if not covering(field, named):
                raise ValueError(f"{field}: no source, allowed: an entry of sources that names it")
        return values

    def source_of(self, field: str) -> Source:
        """The source of a field, by its dotted name. Raises KeyError."""
        by_name = {name: source for source in self.sources for name in source.fields}
        return by_name[covering(field, by_name) or field]

    def fields_of(self, *statuses: str) -> list[str]:
        """Names listed under sources of these statuses."""
        return [name for source in self.sources if source.status in statuses for name in source.fields]


def covering(field: str, names: Any) -> str | None:
    """The longest of `names` that is the field or contains it."""
    parts = field.split(".")
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in names), None)


# ------------------------------------------------------------------------------------------------------- models


class Gqa(Strict):
    """Softmax attention with keys and values a head. gated: the output is multiplied by a gate as wide as q. window >
    0: keys further back are not read. qk_norm: a learned norm of q and k a head."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    gated: bool = False
    qk_norm: bool = False
    window: int = Field(default=0, ge=0)

    def params(self, hidden: int) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return hidden * (q * (3 if self.gated else 2) + 2 * kv) + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def kv_values(self) -> int:
        """Cached values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim


class Mla(Strict):
    """Multi-head latent attention: one latent key a token, shared by all heads."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    q_lora_rank: int = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=0)
    v_head_dim: int = Field(ge=1)
    gated: bool = False
    norm_eps: float | None = Field(default=None, gt=0, description="of the norms of q's and the keys' latents")

    def params(self, hidden: int) -> int:
        h, out = self.heads, self.heads * self.v_head_dim
        q = hidden * self.q_lora_rank + self.q_lora_rank * h * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        kv = hidden * self.kv_values + self.kv_lora_rank * h * (self.qk_nope_head_dim + self.v_head_dim)
        return q + kv + out * hidden * (2 if self.gated else 1) + self.q_lora_rank + self.kv_lora_rank

    @property
    def kv_values(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


class Latent(Strict):
    """DeepSeek-V4's attention: low-rank q and output, one latent key a token, kept in full for a window and compressed
    beyond it. Compressor and indexer weights are not counted."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    q_lora_rank: int = Field(ge=1)
    o_lora_rank: int = Field(ge=1)
    o_groups: int = Field(ge=1)
    window: int = Field(ge=1)
    index_topk: int = Field(ge=1)
    compress_ratios: dict[int, int] = Field(description="compression ratio -> layers that have it")

    def params(self, hidden: int) -> int:
        width = self.heads * self.head_dim
        q = hidden * self.q_lora_rank + self.q_lora_rank * width
        return q + hidden * self.head_dim + width * self.o_lora_rank + self.o_groups * self.o_lora_rank * hidden

    @property
    def kv_values(self) -> int:
        return self.head_dim


class Kda(Strict):
    """Kimi delta attention: a [head_dim, head_dim] state a head in place of a cache; low-rank forget gate of rank
    gate_rank, full-rank output gate."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    conv_kernel: int = Field(ge=1)
    gate_rank: int = Field(ge=1)
    gate_lower_bound: float | None = Field(default=None, lt=0, description="of a step's log-decay")

    def params(self, hidden: int) -> int:
        width = self.heads * self.head_dim
        gate = hidden * self.gate_rank + self.gate_rank * width
        return 5 * hidden * width + gate + hidden * self.heads + 3 * width * self.conv_kernel

    @property
    def state_values(self) -> int:
        """State of one request in one layer."""
        return self.heads * self.head_dim**2


class Gdn(Strict):
    """Gated delta net: fewer key heads than value heads, a scalar gate a value head."""

    layers: int = Field(ge=1)
    key_heads: int = Field(ge=1)
    value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    conv_kernel: int = Field(ge=1)

    def params(self, hidden: int) -> int:
        k, v = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        return hidden * (2 * k + 3 * v + 2 * self.value_heads) + (2 * k + v) * self.conv_kernel

    @property
    def state_values(self) -> int:
        return self.value_heads * self.head_dim**2


class Attention(Strict):
    """Layers of each kind of attention; at least one."""

    gqa: Gqa | None = None
    mla: Mla | None = None
    latent: Latent | None = None
    kda: Kda | None = None
    gdn: Gdn | None = None

    @property
    def groups(self) -> dict[str, Gqa | Mla | Latent | Kda | Gdn]:
        return {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name) is not None}


class DenseMlp(Strict):
    layers: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)

    def params(self, hidden: int) -> int:
        return 3 * hidden * self.intermediate_size


class Moe(Strict):
    """Routed experts, in a latent space of expert_hidden_size where that is not 0, and shared ones in the full
    space."""

    layers: int = Field(ge=1)
    num_experts: int = Field(ge=2)
    num_experts_per_tok: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    expert_hidden_size: int = Field(default=0, ge=0)
    num_shared_experts: int = Field(default=0, ge=0)
    shared_intermediate_size: int = Field(default=0, ge=0)
    routed_scaling_factor: float = Field(default=1.0, gt=0)

    def expert_params(self, hidden: int) -> int:
        return 3 * (self.expert_hidden_size or hidden) * self.intermediate_size

    def shared_params(self, hidden: int) -> int:
        return 3 * hidden * self.shared_intermediate_size * self.num_shared_experts

    def other_params(self, hidden: int) -> int:
        """Router, projections to and from the latent space, shared experts."""
        latent = self.expert_hidden_size
        return hidden * self.num_experts + 2 * hidden * latent + latent + self.shared_params(hidden)

    @model_validator(mode="after")
    def _top_k(self) -> Moe:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: found {self.num_experts_per_tok}, allowed: at most {self.num_experts}"
            )
        return self


class Situ(Strict):
    """SiTU-GLU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)."""

    beta: float = Field(gt=0)
    linear_beta: float = Field(gt=0)


class Ffn(Strict):
    dense: DenseMlp | None = None
    moe: Moe | None = None
    situ: Situ | None = None


class Weights(Strict):
    """Precision of the stored weights: of the routed experts, and of everything else."""

    experts: Precision = "bf16"
    other: Precision = "bf16"


class DrafterFacts(Strict):
    """What makes a block drafter of a model. num_drafts: drafts of one pass; taps: how many target layers' outputs are
    projected into the drafter; target_layer_ids: which (from 0), where that is known; stream: see
    `drafters.dspark.config.DrafterConfig`; embedding, lm_head: whether it stores its own (else the target's are used).
    """

    target: str
    num_drafts: int = Field(ge=1)
    taps: int = Field(ge=1)
    target_layer_ids: tuple[int, ...] = ()
    stream: Literal["sum", "mixture"] = "sum"
    markov_rank: int = Field(default=0, ge=0)
    confidence_head: bool = False
    embedding: bool = False
    lm_head: bool = False

    @model_validator(mode="after")
    def _one_id_a_tap(self) -> DrafterFacts:
        ids = self.target_layer_ids
        if ids and len(ids) != self.taps:
            raise ValueError(f"target_layer_ids: found {len(ids)}, allowed: {self.taps}, one for each of the taps")
        return self


class Published(Strict):
    """Totals that a publisher states; tests derive them again from the other fields."""

    total_params: float | None = None
    active_params: float | None = None
    checkpoint_bytes: float | None = None


class Architecture(Sourced):
    """Shapes of a model or drafter, as far as its cost depends on them."""

    architecture: Literal["facts"] = "facts"
    name: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int | None = Field(default=None, ge=1)
    tie_word_embeddings: bool = False
    attention: Attention
    ffn: Ffn
    weights: Weights = Weights()
    attention_residual_block: int = Field(default=0, ge=0)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    mtp_layers: int = Field(default=0, ge=0)
    drafter: DrafterFacts | None = None
    published: Published = Published()
    notes: str = ""

    free = ("sources", "name", "notes", "architecture")

    @model_validator(mode="after")
    def _layers_agree(self) -> Architecture:
        attention = sum(group.layers for group in self.attention.groups.values())
        ffn = sum(group.layers for group in (self.ffn.dense, self.ffn.moe) if group)
        if attention != ffn or not attention:
            raise ValueError(f"ffn: found {ffn} layers, allowed: as many as attention has ({attention})")
        return self

    @property
    def num_layers(self) -> int:
        return sum(group.layers for group in self.attention.groups.values())

    @cached_property
    def expert_params(self) -> int:
        """All routed experts."""
        moe = self.ffn.moe
        return moe.layers * moe.num_experts * moe.expert_params(self.hidden_size) if moe else 0

    @cached_property
    def other_params(self) -> int:
        """Everything but routed experts, embedding and head."""
        h = self.hidden_size
        total = sum(group.layers * group.params(h) for group in self.attention.groups.values())
        if self.ffn.dense:
            total += self.ffn.dense.layers * self.ffn.dense.params(h)
        if self.ffn.moe:
            total += self.ffn.moe.layers * self.ffn.moe.other_params(h)
        total += h * (2 * self.num_layers + 1)  # norms
        if d := self.drafter:
            total += d.taps * h * h + h  # projection of the tapped layers and its norm
            total += 2 * self.vocab_size * d.markov_rank
            total += h + d.markov_rank + 1 if d.confidence_head else 0
        return total

    @property
    def embedding_params(self) -> int:
        """One table: embedding or head."""
        return self.vocab_size * self.hidden_size

    @property
    def stored_tables(self) -> int:
        """How many of embedding and head the checkpoint holds."""
        if self.drafter:
            return self.drafter.embedding + self.drafter.lm_head
        return 1 if self.tie_word_embeddings else 2

    @property
    def mtp_params(self) -> tuple[int, int]:
        """(experts, other) of the multi-token-prediction layers: a layer of the last kind and a [2 h, h] projection."""
        h, moe = self.hidden_size, self.ffn.moe
        if not self.mtp_layers or moe is None:
            return 0, 0
        attention = next(iter(self.attention.groups.values())).params(h)
        other = attention + moe.other_params(h) + 2 * h * h
        return self.mtp_layers * moe.num_experts * moe.expert_params(h), self.mtp_layers * other

    @property
    def total_params(self) -> int:
        """Without multi-token-prediction layers, which publishers leave out of the total."""
        return self.expert_params + self.other_params + self.stored_tables * self.embedding_params

    @property
    def active_params(self) -> int:
        """Weights that one token meets: its experts, everything else, the head; not the embedding, which is looked
        up."""
        moe = self.ffn.moe
        share = moe.num_experts_per_tok / moe.num_experts if moe else 0.0
        return round(self.expert_params * share) + self.other_params + self.embedding_params

    @property
    def checkpoint_bytes(self) -> float:
        experts, other = self.mtp_params
        experts, other = (
            experts + self.expert_params,
            other + self.other_params + self.stored_tables * self.embedding_params,
        )
        return experts * BYTES[self.weights.experts] + other * BYTES[self.weights.other]

    def kv_values_per_token(self) -> int:
        """Cached values of one token over all layers that keep a cache."""
        return sum(g.layers * g.kv_values for g in self.attention.groups.values() if hasattr(g, "kv_values"))

    def state_values_per_request(self) -> int:
        """Recurrent state of one request over all layers."""
        return sum(g.layers * g.state_values for g in self.attention.groups.values() if hasattr(g, "state_values"))


def of_runnable(name: str) -> Architecture:
    """The facts of an architecture that this project runs (configs/models in the form of `ModelConfig`)."""
    path = find("models", name)
    c, source = load_model_config(name), str(read_yaml(path).get("source", path.name))
    moe_layers = sum(c.is_moe(i) for i in range(c.num_hidden_layers))
    dense_layers = c.num_hidden_layers - moe_layers
    attention = Gqa(
        layers=c.num_hidden_layers, heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, head_dim=c.head_dim,
        qk_norm=c.qk_norm,
    )  # fmt: skip
    values: dict[str, Any] = {
        "name": path.stem,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention": {"gqa": attention.model_dump()},
        "ffn": {},
    }
    if dense_layers:
        values["ffn"]["dense"] = {"layers": dense_layers, "intermediate_size": c.intermediate_size}
    if moe_layers:
        values["ffn"]["moe"] = {
            "layers": moe_layers,
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.num_experts_per_tok,
            "intermediate_size": c.moe_intermediate_size,
        }
    fields = [name for name in values if name != "name"]
    values["sources"] = [{"source": source, "status": "official", "fields": fields}]
    return checked(Architecture, values, str(path))


# ----------------------------------------------------------------------------------------------------- machines


class Datasheet(Strict):
    """One GPU or chip, dense rates. link_gbps: scale-up link, each direction; domain: chips that it joins."""

    memory_bandwidth_gbps: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    tflops: dict[Literal["bf16", "fp8", "fp4"], float]
    link_gbps: float | None = Field(default=None, gt=0)
    domain: int = Field(default=1, ge=1)
    power_w: float | None = Field(default=None, gt=0)


class Hardware(Sourced):
    """A machine. `gpu` is (part of) the name its driver reports; read_bandwidth_gbps and matmul_tflops are measured
    ceilings, where there are any. interval: [low, high] of datasheet fields whose sources disagree. kernels: the table
    of configs/kernels that calibrates it, its own or `borrowed` from a relative (then with a wide interval);
    effective_bandwidth: for a machine without one, the share of the datasheet's bandwidth that its makers reach."""

    gpu: str
    title: str
    read_bandwidth_gbps: float | None = Field(default=None, gt=0)
    matmul_tflops: dict[Literal["bfloat16", "float16", "float32"], float] = {}
    datasheet: Datasheet
    interval: dict[str, tuple[float, float]] = {}
    kernels: str | None = None
    borrowed: bool = False
    effective_bandwidth: float | None = Field(default=None, gt=0, le=1)
    notes: str = ""

    free = ("sources", "gpu", "title", "notes", "kernels", "borrowed")

    @model_validator(mode="after")
    def _intervals_contain(self) -> Hardware:
        for name, (low, high) in self.interval.items():
            value = getattr(self.datasheet, name, None)
            if not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(
                    f"interval.{name}: found [{low:g}, {high:g}], allowed: an interval around datasheet.{name}"
                )
        return self

    def bandwidth(self) -> tuple[float, float, float]:
        """Bytes a second: (low, stated, high)."""
        value = self.datasheet.memory_bandwidth_gbps
        low, high = self.interval.get("memory_bandwidth_gbps", (value, value))
        return low * 1e9, value * 1e9, high * 1e9

    def flops(self, precision: str) -> float:
        """Dense rate for weights of a precision; a machine without it computes in the next wider one."""
        order = {"mxfp4": ("fp8", "bf16"), "nvfp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16")}.get(
            precision, ("bf16",)
        )
        return next(self.datasheet.tflops[name] for name in order if name in self.datasheet.tflops) * 1e12


# ------------------------------------------------------------------------------------------------ loading, errors


def is_facts(name: str | Path) -> bool:
    """Whether an architecture is facts only, and not one that this project runs."""
    return read_yaml(find("models", str(name))).get("architecture") == "facts"


@lru_cache(maxsize=None)
def load_architecture(name: str) -> Architecture:
    """An architecture of configs/models, or a YAML file: facts, or a runnable model's."""
    path = find("models", name)
    values = read_yaml(path)
    return checked(Architecture, values, str(path)) if values.get("architecture") == "facts" else of_runnable(name)


@lru_cache(maxsize=None)
def load_hardware(name: str) -> Hardware:
    """A machine of configs/hardware, or a YAML file."""
    path = find("hardware", name)
    return checked(Hardware, read_yaml(path), str(path))
