"""EAGLE-3 as a drafter: one small layer that runs on its own hidden states (fact sheet §1.12)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.children import draw
from drafters.dspark.config import EAGLE3_DRAFTS
from drafters.dspark.network import DraftNetwork
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from verify_kernels import ops
from verify_kernels.batch import SCRATCH_PAGE, KVCache, PassBatch, slots_of
from verify_kernels.rope import cos_sin_table


class Eagle3Drafter:
    """An EAGLE-3 network over the engine's pages; drafts chains. Implements `drafters.base.Drafter`.

    Entry i of its cache pairs the target's fused features of token i with token i + 1, at position i. The features are
    kept beside the keys, since the token that completes the newest entry comes later: with the next chunk, or as a
    draft that was accepted. Each proposal begins by running the entries that may have changed since the last one.
    """

    can_sample = True
    can_tree = False
    kv: KVCache | None = None  # accepted drafts are run again, with the target's features
    max_depth = EAGLE3_DRAFTS
    lookahead = EAGLE3_DRAFTS + 1

    def __init__(self, network: DraftNetwork, target: Any, name: str) -> None:
        c = self.config = network.config
        self.network, self.name = network, name
        self.vocab_size: int = c.vocab_size
        self.taps = c.taps
        self.max_positions = target.max_model_len
        self._cos_sin = cos_sin_table(c, self.max_positions, target.device)
        self.cache: KVCache | None = None
        self.features: Tensor | None = None  # [pages * page_size, d]: fused features of each context token

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        c, weight = self.config, self.network.fc
        if weight.device != device:
            raise ValueError(f"device: {self.name} is on {weight.device}, expected the target's, {device}")
        self.cache = KVCache.allocate(1, pages, page_size, c.num_key_value_heads, c.head_dim, weight.dtype, device)
        self.features = torch.zeros(pages * page_size, c.hidden_size, dtype=weight.dtype, device=device)

    @torch.inference_mode()
    def prefill(self, batch: PassBatch, features: Tensor) -> None:
        """Token j of a chunk completes entry j - 1, whose features are in this chunk or the one before."""
        size = self.cache.page_size
        self.features[batch.slot_mapping] = self.network.fuse(features)
        rows = torch.arange(batch.num_tokens, device=features.device)
        owner = torch.searchsorted(batch.request_offsets.long()[1:], rows, right=True)
        entry = batch.positions - 1
        slots = slots_of(batch.page_table[owner], entry.clamp(min=0)[:, None], size).squeeze(1)
        slots = torch.where(entry >= 0, slots, SCRATCH_PAGE * size)
        # The first token of a prompt completes nothing and is written to nobody.
        self._write(batch.token_ids, self.features[slots], entry.clamp(min=0), slots)

    @torch.inference_mode()
    def observe(self, state: BatchState, features: Tensor, kept: Tensor) -> None:
        width = features.shape[1]
        local = torch.arange(width, device=kept.device)
        slots = self._slots(state, state.context_lens[:, None] + local)
        slots = torch.where(local < kept[:, None], slots, SCRATCH_PAGE * self.cache.page_size)
        self.features[slots.flatten()] = self.network.fuse(features.flatten(0, 1))

    @torch.inference_mode()
    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        hidden, g = self._catch_up(state)
        if not spec.num_drafts:
            return DraftTree.from_spec(spec, state.roots[:, None])
        tokens = [state.roots]
        probs = None
        if sample:
            probs = torch.zeros(state.num_requests, spec.num_nodes, self.vocab_size, device=g.device)
        for k in range(spec.depth):
            if k:
                hidden, g = self._run(state, tokens[-1], g, state.context_lens + k - 1)
            if probs is None:
                tokens.append(self.network.to_target(ops.greedy_logits(hidden, self.network.lm_head)[0]))
            else:
                logits = self.network.spread(self.network.logits(hidden)[:, None])
                ids, probs[:, k : k + 1] = draw(logits, state, k, 1)
                tokens.append(ids.flatten())
        # A request without context has no features to draft from.
        room = torch.where(state.context_lens > 0, state.max_drafts, 0)
        return DraftTree.from_spec(spec, torch.stack(tokens, 1), probs=probs).limit(room)

    def _catch_up(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """Write the entries of the last step's tokens again and run the newest: its (hidden, g), both [R, d]."""
        context = state.context_lens
        entry = context[:, None] - EAGLE3_DRAFTS - 1 + torch.arange(EAGLE3_DRAFTS + 1, device=context.device)
        ids = state.tokens.gather(1, (entry + 1).clamp(min=0))
        slots = torch.where(entry >= 0, self._slots(state, entry.clamp(min=0)), SCRATCH_PAGE * self.cache.page_size)
        g = self.features[slots]
        self._write(ids.flatten(), g.flatten(0, 1), entry.clamp(min=0).flatten(), slots.flatten())
        return self._run(state, state.roots, g[:, -1], (context - 1).clamp(min=0))

    def _write(self, ids: Tensor, g: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Keys and values of entries; with one layer they do not depend on attention."""
        layer, cache = self.network.layers[0], self.cache
        k, v = layer.context(self.network.paired(ids, g)[0])
        none = torch.zeros(2, dtype=torch.int32, device=ids.device)
        positions = positions.clamp(max=self.max_positions - 1)
        batch = PassBatch(ids, positions, none, none[:1], none[None, :1], slots, None, len(ids), len(ids))
        norm = layer.k_norm
        ops.append_kv(k, k, v, cache.k[0], cache.v[0], batch, self._cos_sin, norm, norm, self.config.rms_norm_eps)

    def _run(self, state: BatchState, ids: Tensor, g: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        """One entry of each request: ids [R] beside g [R, d] at cache index entry [R] -> (hidden, next g), [R, d]."""
        c, cache, layer = self.config, self.cache, self.network.layers[0]
        r = ids.shape[0]
        batch = PassBatch(
            token_ids=ids,
            positions=entry.clamp(max=self.max_positions - 1),
            request_offsets=torch.arange(r + 1, device=ids.device, dtype=torch.int32),
            context_lens=entry.to(torch.int32),
            page_table=state.page_table,
            slot_mapping=self._slots(state, entry[:, None]).squeeze(1),
            ancestor_masks=None,
            max_query_len=1,
            max_kv_len=state.max_seq_len + EAGLE3_DRAFTS,
        )
        batch.plan = ops.plan_attention(batch, cache.page_size)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = cache.k[0], cache.v[0]
            q = ops.append_kv(q, k, v, *pages, batch, self._cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps)
            return ops.paged_tree_attention(q, *pages, batch, scale=c.head_dim**-0.5)

        return self.network.run(*self.network.paired(ids, g), attend)

    def _slots(self, state: BatchState, logical: Tensor) -> Tensor:
        limit = state.page_table.shape[1] * self.cache.page_size
        return slots_of(state.page_table, logical.clamp(max=limit - 1), self.cache.page_size)
