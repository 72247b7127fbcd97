"""EAGLE-3 as a drafter: one small layer that runs on its own hidden states (fact sheet §1.12)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.children import draw, levels, top
from drafters.dspark.config import EAGLE3_DRAFTS
from drafters.dspark.network import DraftNetwork
from drafters.suffix import continuations
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from drafters.tree_growth import Carry, grow
from drafters.tree_search import drawn_tree
from verify_kernels import ops
from verify_kernels.batch import SCRATCH_PAGE, KVCache, PassBatch, slots_of
from verify_kernels.rope import cos_sin_table


class Eagle3Drafter:
    """An EAGLE-3 network over the engine's pages. Implements `drafters.base.Drafter`.

    Entry i of its cache pairs the target's fused features of token i with token i + 1, at position i. The features are
    kept beside the keys, since the token that completes the newest entry comes later: with the next chunk, or as a
    draft that was accepted. Each proposal begins by running the entries that may have changed since the last one.

    A draft's entry pairs the draft with its parent's own hidden state. Entries of drafts stand behind the context in
    the order in which they are run, those of one depth in one pass, each seeing the context and its ancestors.

    grow: trees take their shape from the drafter's own probabilities, within the TreeSpec's nodes and depth, best nodes
    first; False: the TreeSpec's topology. Sampled trees are `tree_search.drawn_tree`. Each depth of a grown tree is a
    pass over as many nodes as have room in the step's cache slots. candidates: children that a node may have. suffix: so many
    earlier occurrences of the request's last tokens add children to grown trees (0: none).
    """

    can_sample = True
    can_tree = True
    kv: KVCache | None = None  # accepted drafts are run again, with the target's features
    max_depth = EAGLE3_DRAFTS
    lookahead = EAGLE3_DRAFTS + 1

    def __init__(
        self, network: DraftNetwork, target: Any, name: str, *, candidates: int = 32, grow: bool = True, suffix: int = 0
    ) -> None:
        c = self.config = network.config
        if candidates < 1:
            raise ValueError(f"candidates: found {candidates}, allowed: 1 or more")
        self.candidates, self.grow, self.suffix = min(candidates, c.draft_vocab_size), grow, suffix
        self.network, self.name = network, name
        self.vocab_size: int = c.vocab_size
        self.taps = c.tapped
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
        # A request without context has no features to draft from.
        room = torch.where(state.context_lens > 0, state.max_drafts, 0)
        if sample and self.grow and not spec.is_chain:
            spec = drawn_tree(spec.num_nodes, spec.depth)
        if sample or spec.is_chain or not self.grow:
            return self._placed(hidden, g, state, spec, sample).limit(room)
        return self._grown(hidden, g, state, spec, room)

    def _placed(self, hidden: Tensor, g: Tensor, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        """The TreeSpec's topology: child number i is the parent's i-th best token, or its i-th draw."""
        network, (r, n) = self.network, (state.num_requests, spec.num_nodes)
        tree = DraftTree.from_spec(spec, state.roots[:, None].repeat(1, n))  # filled in level by level
        probs = torch.zeros(r, n, self.vocab_size, device=g.device) if sample else None
        masks = tree.masks() >> 1  # the root's entry is context
        for k, (first, last, below) in enumerate(levels(spec)):
            if k:
                hidden, g = self._run(state, tree.tokens[:, first:last], g, k, first - 1, masks[:, first:last])
            most = max(spec.ranks[c] for c in below) + 1
            if probs is None and most == 1:
                ids = network.to_target(ops.greedy_logits(hidden.flatten(0, 1), network.lm_head)[0]).view(r, -1, 1)
            else:
                logits = network.logits(hidden.flatten(0, 1)).view(r, last - first, -1)
                if probs is None:
                    ids = network.to_target(top(logits, most))
                else:
                    ids, probs[:, first:last] = draw(network.spread(logits), state, first, most)
            for child in below:
                tree.tokens[:, child] = ids[:, spec.parents[child] - first, spec.ranks[child]]
            g = torch.stack([g[:, spec.parents[child] - first] for child in below], 1)
        tree.probs = probs
        return tree

    def _grown(self, hidden: Tensor, g: Tensor, state: BatchState, spec: TreeSpec, room: Tensor) -> DraftTree:
        network, device = self.network, g.device
        temperature = torch.where(state.temperature > 0, state.temperature, 1.0)[:, None, None]
        slots = max(spec.num_nodes, self.lookahead)  # that the engine keeps ready; the last level needs none
        width = min(spec.num_nodes - 1, slots // max(spec.depth - 1, 1))
        ran = 0

        def children(k: int, tokens: Tensor, carry: Carry) -> tuple[Tensor, Tensor, None, Carry]:
            nonlocal ran
            r, w = tokens.shape
            if k:
                masks, above = carry
                masks = masks | torch.ones((), dtype=torch.int64, device=device) << ran + torch.arange(w, device=device)
                outputs, own = self._run(state, tokens, above, k, ran, masks)
                ran += w
            else:
                masks, outputs, own = torch.zeros_like(tokens), hidden, g
            logits, ids = network.logits(outputs.flatten(0, 1)).view(r, w, -1).topk(self.candidates, dim=-1)
            return network.to_target(ids), logits / temperature, None, (masks, own)

        repeats = continuations(state, spec.depth, self.suffix, longest=8) if self.suffix else None
        return grow(state.roots, children, spec.depth, spec.num_nodes, room, repeats=repeats, width=width)

    def _catch_up(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """Write the entries of the last step's tokens again and run the newest: its (hidden, g), both [R, 1, d]."""
        context = state.context_lens
        entry = context[:, None] - EAGLE3_DRAFTS - 1 + torch.arange(EAGLE3_DRAFTS + 1, device=context.device)
        ids = state.tokens.gather(1, (entry + 1).clamp(min=0))
        slots = torch.where(entry >= 0, self._slots(state, entry.clamp(min=0)), SCRATCH_PAGE * self.cache.page_size)
        g = self.features[slots]
        self._write(ids.flatten(), g.flatten(0, 1), entry.clamp(min=0).flatten(), slots.flatten())
        return self._run(state, state.roots[:, None], g[:, -1:], 0, 0, None)

    def _write(self, ids: Tensor, g: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Keys and values of entries; with one layer they do not depend on attention."""
        layer, cache = self.network.layers[0], self.cache
        k, v = layer.context(self.network.paired(ids, g)[0])
        none = torch.zeros(2, dtype=torch.int32, device=ids.device)
        positions = positions.clamp(max=self.max_positions - 1)
        batch = PassBatch(ids, positions, none, none[:1], none[None, :1], slots, None, len(ids), len(ids))
        norm = layer.k_norm
        ops.append_kv(k, k, v, cache.k[0], cache.v[0], batch, self._cos_sin, norm, norm, self.config.rms_norm_eps)

    def _run(
        self, state: BatchState, ids: Tensor, g: Tensor, depth: int, first: int, masks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Nodes of one depth: ids [R, w] beside g [R, w, d] -> (hidden, next g), both [R, w, d].

        first: drafts whose entries are in the cache already. masks [R, w] int64: the drafts that each node sees, itself
        included; the root (depth 0) is the context's newest entry.
        """
        c, cache, layer = self.config, self.cache, self.network.layers[0]
        (r, w), context = ids.shape, state.context_lens
        start = context if depth else (context - 1).clamp(min=0)
        logical = start[:, None] + first + torch.arange(w, device=ids.device)
        positions = (context + depth - 1).clamp(0, self.max_positions - 1)[:, None].expand(-1, w)
        batch = PassBatch(
            token_ids=ids.reshape(-1),
            positions=positions.reshape(-1),
            request_offsets=torch.arange(r + 1, device=ids.device, dtype=torch.int32) * w,
            context_lens=start.to(torch.int32),
            page_table=state.page_table,
            slot_mapping=self._slots(state, logical).flatten(),
            ancestor_masks=None if masks is None else masks.reshape(-1),
            max_query_len=w,
            max_kv_len=state.max_seq_len - 1 + first + w,
            first_query=first,
        )
        batch.plan = ops.plan_attention(batch, cache.page_size)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = cache.k[0], cache.v[0]
            q = ops.append_kv(q, k, v, *pages, batch, self._cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps)
            return ops.paged_tree_attention(q, *pages, batch, scale=c.head_dim**-0.5)

        hidden, g = self.network.run(*self.network.paired(batch.token_ids, g.flatten(0, 1)), attend)
        return hidden.view(r, w, -1), g.view(r, w, -1)

    def _slots(self, state: BatchState, logical: Tensor) -> Tensor:
        limit = state.page_table.shape[1] * self.cache.page_size
        return slots_of(state.page_table, logical.clamp(max=limit - 1), self.cache.page_size)
