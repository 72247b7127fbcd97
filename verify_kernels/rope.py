"""Rotary frequencies: default, llama3 and yarn, as transformers defines them. No torch at import: configurations of
targets and drafters hold a `Rope`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Rope(BaseModel):
    """Rotary embedding: theta and, for llama3 and yarn, their parameters under transformers' names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_theta: float = Field(default=10000.0, gt=0)
    rope_type: Literal["default", "llama3", "yarn"] = "default"
    factor: float | None = Field(default=None, ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Rope:
        needs = {
            "default": (),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor",),
        }[self.rope_type]
        for name in needs:
            if getattr(self, name) is None:
                raise ValueError(f"{name}: missing, rope_type {self.rope_type} needs it")
        return self


def rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Rope` from a config.json (transformers 4 and 5 spellings)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return {k: v for k, v in rope.items() if v is not None}


class Rotary(Protocol):
    """What the tables need of a model's configuration."""

    rope: Rope
    head_dim: int
    max_position_embeddings: int


def inverse_frequencies(config: Rotary) -> tuple[Tensor, float]:
    """(inverse frequencies [head_dim / 2] float64, factor on cosines and sines)."""
    import torch

    rope, dim = config.rope, config.head_dim
    plain = rope.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.rope_type == "default":
        return plain, 1.0
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    slow = plain / rope.factor
    if rope.rope_type == "llama3":
        # Long waves are stretched, short ones kept, those between blended.
        waves = original * plain / (2 * math.pi)  # turns within the original context
        blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * slow + blend * plain, 1.0

    def dimension(turns: float) -> float:
        """The (fractional) index of the frequency that makes this many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return slow * ramp + plain * (1 - ramp), _attention_factor(config)


def _attention_factor(config: Rotary) -> float:
    rope = config.rope

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def cos_sin_table(config: Rotary, length: int, device: torch.device | str) -> Tensor:
    """[length, head_dim] float32: cosines of head_dim / 2 frequencies, then sines."""
    import torch

    frequencies, factor = inverse_frequencies(config)
    # float32 products, as transformers computes the angles: agreement matters more here than the last digit.
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)
