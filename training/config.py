"""The recipe of a training run. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_runtime.configs import find, read_yaml
from dspark_runtime.validation import checked


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(_Strict):
    """The drafter, in DeepSpec's words (fact sheet §1.1). What is not here is the target's own."""

    num_hidden_layers: int = Field(default=4, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    block_size: int = Field(default=7, ge=1, le=16)
    mask_token_id: int = Field(ge=0)
    markov_rank: int = Field(default=64, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True


class Domain(_Strict):
    """One kind of user turn that the target writes itself, from examples.

    examples: turns of this kind. separator: what stands between them, and ends a turn. opening: what the target is given
    of a new one. template: the turn made of a text, with <turn> in its place.
    """

    title: str
    examples: tuple[str, ...] = Field(min_length=1)
    share: float = Field(default=1.0, gt=0)
    separator: Literal["\n", "\n###\n"] = "\n"
    opening: str = ""
    template: str = "<turn>"
    shots: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Domain:
        if self.template.count("<turn>") != 1:
            raise ValueError(f"template: found {self.template!r}, allowed: a text with one <turn>")
        return self


class PromptPlan(_Strict):
    """Where user turns come from. self_written: turns the target writes, spread over `domains` by their shares, and
    `free_share` of them from the bare chat template."""

    self_written: int = Field(default=0, ge=0)
    free_share: float = Field(default=0.1, ge=0, le=1)
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=160, ge=8)
    domains: tuple[Domain, ...] = ()


class AnswerPlan(_Strict):
    """The target's answers. temperatures: prompt i's first answer is sampled at entry i, the next at i + 1, around.
    answers_per_prompt: of self-written prompts; file_answers: of prompts from files."""

    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(default=(0.0, 0.7, 1.0), min_length=1)
    answers_per_prompt: int = Field(default=1, ge=1, le=64)
    file_answers: int = Field(default=1, ge=1, le=64)
    max_tokens: int = Field(default=320, ge=16)
    num_requests: int = Field(default=1024, ge=1)
    shard: int = Field(default=4096, ge=1)


class Optimisation(_Strict):
    """Losses, anchors and schedule (fact sheet §3.1). A step has `rows` packed rows of `row_length` tokens with
    `anchors` block anchors each. muon_lr: matrices of the layers take Muon where it is above 0, AdamW otherwise."""

    steps: int = Field(ge=1)
    rows: int = Field(default=32, ge=1)
    row_length: int = Field(default=1024, ge=32)
    anchors: int = Field(default=256, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    muon_lr: float = Field(default=0.0, ge=0)
    warmup: float = Field(default=0.04, ge=0, lt=1)
    clip: float = Field(default=1.0, gt=0)
    ce: float = Field(default=0.1, ge=0)
    tv: float = Field(default=0.9, ge=0)
    confidence: float = Field(default=1.0, ge=0)
    decay: float = Field(default=4.0, gt=0)
    held_out: float = Field(default=0.01, ge=0, lt=1)
    log_every: int = Field(default=25, ge=1)
    save_every: int = Field(default=1000, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Optimisation:
        if self.anchors > self.row_length:
            raise ValueError(f"anchors: found {self.anchors}, allowed: at most row_length ({self.row_length})")
        if self.save_every % self.log_every:
            raise ValueError(f"save_every: found {self.save_every}, allowed: multiples of log_every ({self.log_every})")
        return self


class TrainConfig(_Strict):
    """A whole run: `dspark train FILE`."""

    target: str = "smollm2"
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    drafter: Shape
    prompts: PromptPlan = PromptPlan()
    answers: AnswerPlan = AnswerPlan()
    training: Optimisation


def load_train_config(name: str) -> TrainConfig:
    """A recipe of configs/train, or a YAML file. Raises ConfigError, one line, naming the field."""
    path = find("train", name)
    return checked(TrainConfig, read_yaml(path), str(path))


def drafter_config(shape: Shape, target: Any) -> dict[str, Any]:
    """config.json of a drafter for a target (a `dspark_runtime` ModelConfig), in the DeepSpec dialect with Qwen3 layers."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size or target.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": target.rope.model_dump(exclude_none=True, exclude_defaults=True)
        | {"rope_type": target.rope.rope_type, "rope_theta": target.rope.rope_theta},
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "target_layer_ids": list(shape.target_layer_ids),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "num_anchors": 0,
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head_type,
        "enable_confidence_head": shape.enable_confidence_head,
        "confidence_head_with_markov": shape.markov_rank > 0,
    }
