"""Rotary frequencies: default, llama3 and yarn, as transformers defines them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark_runtime.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(inverse frequencies [head_dim / 2] float64, factor on cosines and sines)."""
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


def _attention_factor(config: ModelConfig) -> float:
    rope = config.rope

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def cos_sin_table(config: ModelConfig, length: int, device: torch.device | str) -> Tensor:
    """[length, head_dim] float32: cosines of head_dim / 2 frequencies, then sines."""
    frequencies, factor = inverse_frequencies(config)
    # float32 products, as transformers computes the angles: agreement matters more here than the last digit.
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)
