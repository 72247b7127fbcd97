"""A model without weights, for exact cases: its next-token logits are a plain function of the whole prefix.

Its "keys" are token ids. A forward pass rebuilds every prefix from the cache, through page table, slots and masks, as
attention would, so that a wrong page, slot, mask or commit shows as a wrong prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verify_kernels.batch import KVCache, PassBatch, slots_of


class ScriptedModel:
    """next_logits(prefix token ids) -> vocab_size logits. Implements `dspark_runtime.models.base.Model`; CPU only.

    Tapped layer i gives the feature token_id * 10**i (hidden size 1). Positions are checked against prefix lengths.
    """

    def __init__(
        self,
        vocab_size: int,
        next_logits: Callable[[tuple[int, ...]], Sequence[float]],
        *,
        max_model_len: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        num_layers: int = 4,
    ) -> None:
        self.name = "scripted"
        self.vocab_size = vocab_size
        self.next_logits = next_logits
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.num_layers = num_layers
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    def allocate(self, pages: int, page_size: int, requests: int = 1) -> KVCache:
        cache = KVCache.allocate(1, pages, page_size, 1, 1, torch.float32, "cpu")
        cache.k.fill_(float("nan"))  # what was never written must not be read
        return cache

    def forward(self, batch: PassBatch, cache: KVCache, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        stored = cache.k[0].view(-1)
        stored[batch.slot_mapping] = batch.token_ids.float()
        offsets = batch.request_offsets.tolist()
        rows: list[Sequence[float]] = []
        for r, context in enumerate(batch.context_lens.tolist()):
            fresh = batch.first_query + offsets[r + 1] - offsets[r]
            index = torch.arange(context + fresh)[None]
            ids = stored[slots_of(batch.page_table[r : r + 1], index, cache.page_size)[0]].tolist()
            for row in range(offsets[r], offsets[r + 1]):
                own = batch.first_query + row - offsets[r]
                mask = (2 << own) - 1 if batch.ancestor_masks is None else int(batch.ancestor_masks[row])
                seen = ids[:context] + [ids[context + j] for j in range(fresh) if mask >> j & 1]
                position = int(batch.positions[row])
                if position != min(len(seen), self.max_model_len) - 1:
                    raise AssertionError(f"token {row} sees {len(seen)} tokens but has position {position}")
                rows.append(self.next_logits(tuple(map(int, seen))))
        features = None
        if taps:
            features = torch.stack([batch.token_ids.float() * 10.0**tap for tap in taps], dim=1)
        return torch.tensor(rows, dtype=torch.float32), features

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = hidden.max(dim=-1)
        return ids, best
