"""Building passes by hand: shuffled pages, poisoned cache, any mix of requests."""

from __future__ import annotations

import torch

from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import KVCache, PassBatch, slots_of


class Pages:
    """A poisoned cache with a shuffled page table for `requests` requests of up to `length` tokens."""

    def __init__(self, model, requests: int, length: int, page_size: int, seed: int = 0) -> None:
        width = -(-length // page_size)
        order = torch.randperm(requests * width, generator=torch.Generator().manual_seed(seed)) + 1
        self.table = order.view(requests, width).to(torch.int32)
        self.cache: KVCache = model.allocate(requests * width + 1, page_size)
        self.cache.k.fill_(float("nan"))
        self.cache.v.fill_(float("nan"))
        self.page_size = page_size

    def batch(self, rows: list[int], starts: list[int], tokens: list[list[int]], tree: TreeSpec | None = None) -> PassBatch:
        """One pass: request rows[i] gets tokens[i] after starts[i] cached ones, as a chain or as `tree`."""
        counts = [len(t) for t in tokens]
        table = self.table[torch.tensor(rows)]
        context = torch.tensor(starts)
        slots = torch.cat([slots_of(table[i : i + 1], s + torch.arange(n)[None], self.page_size)[0] for i, (s, n) in enumerate(zip(starts, counts))])
        if tree is None:
            depths = torch.cat([torch.arange(n) for n in counts])
            masks = None
        else:
            drafted = DraftTree.from_spec(tree, torch.tensor(tokens))
            depths, masks = drafted.depths().flatten(), drafted.masks().flatten()
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        return PassBatch(
            token_ids=torch.tensor([x for t in tokens for x in t]),
            positions=context[owner] + depths,
            request_offsets=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            context_lens=context.to(torch.int32),
            page_table=table,
            slot_mapping=slots,
            ancestor_masks=masks,
            max_query_len=max(counts),
            max_kv_len=max(s + n for s, n in zip(starts, counts)),
        )
