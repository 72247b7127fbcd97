"""A smaller language model as the drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.children import draw, levels, top
from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import SCRATCH_PAGE, KVCache, PassBatch, slots_of


class DraftModel:
    """Any causal model over the engine's pages drafts a static topology, level by level. Implements `Drafter`.

    model: an object with the members of `dspark_runtime.models.base.Model`. Rank i of a parent's children is its i-th
    most likely token (ties: lowest id), or, where a request samples, the i-th draw without replacement.

    The newest context token is the deepest draft that was accepted, which this model never ran; so each step begins by
    running the last two committed tokens, whichever they are: writing the same keys and values twice changes nothing.
    """

    max_depth = 63
    can_tree = True
    can_sample = True
    taps: tuple[int, ...] = ()
    lookahead = 0

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = f"draft:{model.name}"
        self.vocab_size: int = model.vocab_size
        self.kv: KVCache | None = None

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        if self.model.device != device:
            raise ValueError(f"device: {self.name} is on {self.model.device}, expected the target's, {device}")
        self.kv = self.model.allocate(pages, page_size)
        if self.kv.states is not None:  # it runs its newest tokens twice, and trees level by level
            raise ValueError(f"drafter: {self.name} has recurrent layers, allowed: attention only (not built)")

    def prefill(self, batch: PassBatch, features: Tensor | None) -> None:
        self.model.forward(replace(batch, positions=self._within(batch.positions), plan=None), self.kv)

    def observe(self, state: BatchState, features: Tensor | None, kept: Tensor) -> None:
        pass

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        r, n = state.num_requests, spec.num_nodes
        device = state.tokens.device
        tree = DraftTree.from_spec(spec, state.roots[:, None].repeat(1, n))  # filled in level by level
        probs = torch.zeros(r, n, self.vocab_size, device=device) if sample else None
        masks, depths = tree.masks_and_depths()
        hidden = self._first_pass(state)
        for first, last, below in levels(spec):
            if first:
                hidden = self._level_pass(state, tree, slice(first, last), masks, depths)
            most = max(spec.ranks[c] for c in below) + 1
            if probs is None and most == 1:
                ids = self.model.greedy(hidden)[0].view(r, last - first, 1)
            else:
                logits = self.model.logits(hidden).view(r, last - first, -1)
                if probs is None:
                    ids = top(logits, most)
                else:
                    ids, probs[:, first:last] = draw(logits, state, first, most)
            for child in below:
                tree.tokens[:, child] = ids[:, spec.parents[child] - first, spec.ranks[child]]
        tree.probs = probs
        # Past its own context limit this model drafts nothing.
        room = (self.model.max_model_len - state.context_lens).clamp(min=0)
        return tree.limit(torch.minimum(state.max_drafts, room))

    def _first_pass(self, state: BatchState) -> Tensor:
        """Runs [token before the root, root]; returns the root's hidden state [R, H].

        Without a token before the root, the root comes first, followed by padding in the slot of the first draft.
        """
        device = state.tokens.device
        context = state.context_lens
        alone = context == 0
        start = (context - 1).clamp(min=0)
        pair = torch.arange(2, device=device)
        at = start[:, None] + pair
        ids = state.tokens.gather(1, torch.minimum(at, context[:, None]))
        slots = self._slots(state.page_table, at)
        batch = self._batch(state, ids, at, slots, start, None, 0)
        hidden, _ = self.model.forward(batch, self.kv)
        rows = torch.arange(len(alone), device=device) * 2 + (~alone).long()
        return hidden[rows]

    def _level_pass(self, state: BatchState, tree: DraftTree, level: slice, masks: Tensor, depths: Tensor) -> Tensor:
        """Runs the nodes of one depth, whose ancestors are in the cache; returns hidden [R * w, H]."""
        context = state.context_lens
        nodes = torch.arange(level.start, level.stop, device=masks.device)
        slots = self._slots(state.page_table, context[:, None] + nodes)
        positions = context[:, None] + depths[:, level]
        batch = self._batch(state, tree.tokens[:, level], positions, slots, context, masks[:, level], level.start)
        return self.model.forward(batch, self.kv)[0]

    def _slots(self, page_table: Tensor, logical: Tensor) -> Tensor:
        """Slots of logical indices; the scratch page beyond the table (a draft there is too deep to be kept)."""
        limit = page_table.shape[1] * self.kv.page_size
        slots = slots_of(page_table, logical.clamp(max=limit - 1), self.kv.page_size)
        return torch.where(logical < limit, slots, SCRATCH_PAGE * self.kv.page_size)

    def _within(self, positions: Tensor) -> Tensor:
        """Positions that the model has; what is drafted beyond them is dropped in the end."""
        return positions.clamp(max=self.model.max_model_len - 1)

    def _batch(
        self,
        state: BatchState,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        context: Tensor,
        masks: Tensor | None,
        first: int,
    ) -> PassBatch:
        r, width = ids.shape
        return PassBatch(
            token_ids=ids.reshape(-1).clamp(min=0),
            positions=self._within(positions.reshape(-1)),
            request_offsets=torch.arange(r + 1, device=ids.device, dtype=torch.int32) * width,
            context_lens=context.to(torch.int32),
            page_table=state.page_table,
            slot_mapping=slots.reshape(-1),
            ancestor_masks=None if masks is None else masks.reshape(-1),
            max_query_len=width,
            max_kv_len=state.max_seq_len - 1 + first + width,
            first_query=first,
        )
