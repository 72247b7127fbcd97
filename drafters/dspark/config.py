"""What a drafter checkpoint is, whoever published it. No torch here.

Every dialect's traps are resolved on the way in (see `drafters.dspark.dialects`): layers are named by the output they
tap, slots by what they predict.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drafters.taps import Mixed
from verify_kernels.rope import Rope

EAGLE3_DRAFTS = 15
"""Most drafts of an autoregressive drafter in one step: each is a pass, and is run again once accepted."""


class Mla(BaseModel):
    """Shape of latent attention: one latent key a token, shared by all heads. Heads have qk_nope_head_dim channels that
    meet the latent and qk_rope_head_dim that meet the key's own, which are rotated. score_factor: YaRN's, on scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: int = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    v_head_dim: int = Field(ge=1)
    score_factor: float = Field(default=1.0, gt=0)

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Cached channels of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class DrafterConfig(BaseModel):
    """One drafter: its kind, its transformer, where it reads the target, its slots, its heads.

    taps: decoder layers whose outputs are fused (0-based, -1 is the embedding output), in the order of the fusion.
    stream: what an output is where layers attend over depth: the "sum" that a layer leaves, or the "mixture" that the
    next one reads (see `drafters.taps.Mixed`).
    block_size: slots of a block pass, the anchor's included. sample_from_anchor: slot k predicts the token after it
    (k drafts from k slots); False: a slot fills its own position, and the anchor's predicts nothing. windows: per
    layer, 0 for full attention. draft_vocab_size below vocab_size: logits are over a subset, mapped by the
    checkpoint's d2t. confidence: what its head reads. layers: the layer's design; "mla" is told by `mla`, "gemma4" is
    described but not built.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: str
    kind: Literal["dspark", "dflash", "eagle3"]
    layers: Literal["qwen3", "llama", "mla", "gemma4"]
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=1)
    attention_bias: bool = False
    mla: Mla | None = None
    rope: Rope = Rope()
    windows: tuple[int, ...] = ()
    target_hidden_size: int = Field(ge=1)
    num_target_layers: int | None = Field(default=None, ge=1)
    taps: tuple[int, ...] = Field(min_length=1)
    stream: Literal["sum", "mixture"] = "sum"
    block_size: int = Field(ge=1, le=64)
    sample_from_anchor: bool = True
    mask_token_id: int | None = Field(default=None, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    markov_rank: int = Field(default=0, ge=0)
    confidence: Literal["none", "hidden", "markov"] = "none"
    norm_before_residual: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        def need(ok: bool, field: str, found: object, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{field}: found {found}, allowed: {allowed}")

        heads, kv = self.num_attention_heads, self.num_key_value_heads
        need(heads % kv == 0, "num_key_value_heads", kv, f"divisors of num_attention_heads ({heads})")
        need(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even numbers")
        need((self.mla is None) == (self.layers != "mla"), "mla", self.mla, "a shape, exactly with mla layers")
        need(len(set(self.taps)) == len(self.taps), "target layers", list(self.taps), "distinct layers")
        need(min(self.taps) >= -1, "target layers", list(self.taps), "0 and up, -1 for the embeddings")
        allowed = f"at most vocab_size ({self.vocab_size})"
        need(self.draft_vocab_size <= self.vocab_size, "draft_vocab_size", self.draft_vocab_size, allowed)
        need(not self.windows or len(self.windows) == self.num_hidden_layers, "layer_types",
             f"{len(self.windows)} entries", f"num_hidden_layers ({self.num_hidden_layers})")  # fmt: skip
        need((self.markov_head_type is None) == (self.markov_rank == 0), "markov_head_type",
             self.markov_head_type, "vanilla, gated, rnn, exactly where markov_rank is above 0")  # fmt: skip
        need(self.confidence != "markov" or self.markov_rank > 0, "confidence_head_with_markov", True,
             "false where markov_rank is 0")  # fmt: skip
        if self.kind == "eagle3":
            need(self.num_hidden_layers == 1, "num_hidden_layers", self.num_hidden_layers, "1 for EAGLE-3")
        else:
            need(self.mask_token_id is not None, "mask_token_id", None, "a token id")
            allowed = "2 or more without sample_from_anchor"
            need(self.block_size > self.first_slot, "block_size", self.block_size, allowed)
        if self.mask_token_id is not None:
            allowed = f"below vocab_size ({self.vocab_size})"
            need(self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id, allowed)
        return self

    @property
    def qk_norm(self) -> bool:
        return self.layers == "qwen3"

    @property
    def tapped(self) -> tuple[int, ...]:
        """The taps as `drafters.base.Drafter.taps` names them."""
        return tuple(map(Mixed, self.taps)) if self.stream == "mixture" else self.taps

    @property
    def first_slot(self) -> int:
        """The block slot that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """The most drafts in a row."""
        return EAGLE3_DRAFTS if self.kind == "eagle3" else self.block_size - self.first_slot
