"""What the engine asks of a target model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from verify_kernels.batch import KVCache, PassBatch


@runtime_checkable
class Model(Protocol):
    """A causal language model over a paged cache. Any object with these members serves as target or as draft model."""

    name: str
    vocab_size: int
    max_model_len: int
    """Context limit in tokens: positions reach max_model_len - 1."""
    num_layers: int
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    def allocate(self, pages: int, page_size: int, requests: int = 1) -> KVCache:
        """A cache of this model's shape, on its device, in its dtype; with recurrent layers, states of so many
        requests."""

    def forward(self, batch: PassBatch, cache: KVCache, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """One pass over N new tokens, which are written to the cache.

        Returns (hidden [N, H] after the final norm, features [N, len(taps) * H] or None): features are the raw outputs
        (residual stream) of decoder layers `taps`, -1 being the embeddings, concatenated in that order. Where layers
        attend over depth, `drafters.taps.Mixed` says what else such a number can mean.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> float32 [T, V]."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, H] -> (arg-max ids [T] int64, ties to the lowest id; their logits [T] float32, NaN if any is)."""
