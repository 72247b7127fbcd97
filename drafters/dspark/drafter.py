"""DSpark and DFlash as drafters: one block pass, then chains and trees from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.children import draw, levels
from drafters.dspark.network import Attend, DraftNetwork
from drafters.suffix import continuations
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from drafters.tree_growth import Carry, Children, Confidence, draw_tree, grow
from drafters.tree_search import drawn_tree
from verify_kernels import ops
from verify_kernels.batch import KVCache, PassBatch
from verify_kernels.rope import cos_sin_table


@lru_cache(maxsize=256)
def _offsets(r: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(r + 1, device=device, dtype=torch.int32) * width


@lru_cache(maxsize=64)
def _floats(values: tuple[float, ...], device: torch.device) -> Tensor:
    # Kept, because a captured step must not copy from the host.
    return torch.tensor(values, dtype=torch.float32, device=device)


class BlockDrafter:
    """A DSpark or DFlash network over the engine's pages. Implements `drafters.base.Drafter`.

    Its cache holds keys and values of the context's fused features, one entry for each token but the root; a block pass
    writes its slots behind them, and what was accepted is overwritten with its own features in `observe`, compact.

    candidates: deterministic drafts compare the best `candidates` tokens of each slot only, so that the Markov head's
    w2 is read there and not over the whole vocabulary. Sampled drafts have the whole law: what it leaves out, a sampled
    draft cannot be (the best 32 tokens alone cost a quarter of the accepted drafts at temperature 1).
    grow: trees take their shape from the drafter's own probabilities, within the TreeSpec's nodes and depth; False: the
    TreeSpec's topology. Sampled trees take the sizes of their levels from `tree_search.drawn_tree` and the rest from the
    confidence head, where there is one. confidence, stop_below: of deterministic trees, see `tree_growth.grow`.
    suffix: so many earlier occurrences of the request's last tokens add children to grown trees (0: none).
    temperatures: of each slot's confidence, see `drafters.dspark.calibration`; () leaves it as the head gives it.
    """

    can_sample = True
    can_tree = True
    kv: KVCache | None = None  # `observe` writes what was accepted in its place

    def __init__(
        self,
        network: DraftNetwork,
        target: Any,
        name: str,
        *,
        candidates: int = 32,
        grow: bool = True,
        confidence: Confidence = "off",
        stop_below: float = 0.0,
        suffix: int = 0,
        temperatures: Sequence[float] = (),
    ) -> None:
        c = self.config = network.config
        if candidates < 1:
            raise ValueError(f"candidates: found {candidates}, allowed: 1 or more")
        if confidence not in ("off", "weight", "match", "stop"):
            raise ValueError(f"confidence: found {confidence!r}, allowed: off, weight, match, stop")
        if confidence != "off" and network.confidence is None:
            raise ValueError(f"confidence: found {confidence!r}, allowed: off ({name} has no confidence head)")
        if temperatures and (network.confidence is None or len(temperatures) != c.num_drafts):
            allowed = "none (no confidence head)" if network.confidence is None else f"{c.num_drafts}, one a draft"
            raise ValueError(f"temperatures: found {len(temperatures)}, allowed: {allowed}")
        self.network, self.name, self.temperatures = network, name, tuple(temperatures)
        self.vocab_size: int = c.vocab_size
        self.max_depth = c.num_drafts
        self.lookahead = c.block_size
        self.taps = c.tapped
        self.candidates = min(candidates, c.draft_vocab_size)
        self.grow, self.confidence, self.stop_below, self.suffix = grow, confidence, stop_below, suffix
        # Positions go where the target's go: past its own trained range a drafter gets worse, never wrong.
        self.max_positions = target.max_model_len
        self._cos_sin = self._cos_sin_table(target.device)
        self.cache: KVCache | None = None

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        weight = self.network.fc
        if weight.device != device:
            raise ValueError(f"device: {self.name} is on {weight.device}, expected the target's, {device}")
        self.cache = self._cache(pages, page_size, weight.dtype, device)

    def _cos_sin_table(self, device: torch.device) -> Tensor:
        return cos_sin_table(self.config, self.max_positions, device)

    def _cache(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        c = self.config
        shape = (c.num_hidden_layers, pages, page_size, c.num_key_value_heads, c.head_dim)
        return KVCache.allocate(*shape, dtype, device)

    @torch.inference_mode()
    def prefill(self, batch: PassBatch, features: Tensor) -> None:
        self._remember(batch, features)

    @torch.inference_mode()
    def observe(self, state: BatchState, features: Tensor, kept: Tensor) -> None:
        width = features.shape[1]
        batch = self._batch(state, width, kept)
        self._remember(batch, features.flatten(0, 1))

    def _remember(self, batch: PassBatch, features: Tensor) -> None:
        """Write the context entries of N tokens from their tapped features [N, taps * H]."""
        network, cache = self.network, self.cache
        kv, norms = network.context(network.fuse(features))
        positions = batch.positions.clamp(max=self.max_positions - 1)
        ops.append_context(
            kv, cache.k, cache.v, batch.slot_mapping, positions, self._cos_sin, norms, self.config.rms_norm_eps
        )

    @torch.inference_mode()
    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        roots = state.roots
        if not spec.num_drafts:
            return DraftTree.from_spec(spec, roots[:, None])
        first = self.config.first_slot
        hidden = self._block(state, roots)[:, first : first + spec.depth]
        if sample:
            return self._sampled(hidden, state, spec).limit(state.max_drafts)
        if spec.is_chain and self.confidence != "stop":
            return self._chain(hidden, state, roots)
        children = self._children(hidden, state, spec)
        if not self.grow and not spec.is_chain:
            return self._ranked(children, state, spec).limit(state.max_drafts)
        repeats = None
        if self.suffix and not spec.is_chain:
            repeats = continuations(state, spec.depth, self.suffix, longest=8)
        return grow(
            roots, children, spec.depth, spec.num_nodes, state.max_drafts,
            chain=spec.is_chain, confidence=self.confidence, stop_below=self.stop_below, repeats=repeats,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------- the block pass

    def _block(self, state: BatchState, roots: Tensor) -> Tensor:
        """Hidden states [R, block_size, d] after the final norm: every slot sees the context and the whole block."""
        return self.network.block(roots, self._attention(self._batch(state, self.config.block_size)))

    def _attention(self, batch: PassBatch) -> Attend:
        """What `DraftNetwork.run` asks for, over the pages and the block."""
        c, cache = self.config, self.cache
        plans = {w: ops.plan_attention(batch, cache.page_size, mask="full", window=w) for w in set(c.windows) or {0}}

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, window = self.network.layers[i], c.windows[i] if c.windows else 0
            pages = cache.k[i], cache.v[i]
            q = ops.append_kv(q, k, v, *pages, batch, self._cos_sin, layer.q_norm, layer.k_norm, c.rms_norm_eps)
            planned = replace(batch, plan=plans[window])
            return ops.paged_tree_attention(q, *pages, planned, scale=c.head_dim**-0.5, mask="full", window=window)

        return attend

    def _batch(self, state: BatchState, width: int, kept: Tensor | None = None) -> PassBatch:
        """`width` tokens behind each request's context, of which kept [R] are written (None: all). Token ids are none:
        the network does not embed them."""
        r, page_size = state.num_requests, self.cache.page_size
        positions, slots, context = ops.place_block(
            state.seq_lens, state.page_table, width, page_size, self.max_positions, kept
        )
        return PassBatch(
            token_ids=positions,
            positions=positions,
            request_offsets=_offsets(r, width, positions.device),
            context_lens=context,
            page_table=state.page_table,
            slot_mapping=slots,
            ancestor_masks=None,
            max_query_len=width,
            max_kv_len=state.max_seq_len - 1 + width,
        )

    # -------------------------------------------------------------------------------------------- heads

    def _head(
        self, k: int, hidden: Tensor, tokens: Tensor, carry: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The Markov head at draft k. hidden [R, d], tokens [R, W] -> (z [R, W, r], carry [R, W, r]), each None where
        there is none."""
        markov, (r, w) = self.network.markov, tokens.shape
        if markov is None:
            return None, None
        each = hidden[:, None].expand(-1, w, -1).flatten(0, 1)
        z, carry = markov(markov.embed(tokens.flatten()), each, None if carry is None else carry.flatten(0, 1))
        return z.view(r, w, -1), None if carry is None else carry.view(r, w, -1)

    def _sure(self, k: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The confidence head at draft k, under tokens [R, W] -> [R, W] float32."""
        network = self.network
        e = None if network.markov is None else network.markov.embed(tokens.flatten())
        sure = network.confidence(hidden[:, None].expand(-1, tokens.shape[1], -1).flatten(0, 1), e)
        if self.temperatures:
            sure = sure / self.temperatures[k]
        return sure.sigmoid().view(tokens.shape)

    def _best(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best draft ids of each slot: hidden [R, K, d] -> (logits [R, K, M] float32, ids [R, K, M])."""
        c, network = self.config, self.network
        best, ids = ops.top(ops.linear(hidden.flatten(0, 1), network.lm_head), min(count, c.draft_vocab_size))
        return best.view(*hidden.shape[:2], -1), ids.view(*hidden.shape[:2], -1)

    def _chain(self, hidden: Tensor, state: BatchState, roots: Tensor) -> DraftTree:
        """The best chain, a draft from each slot of hidden [R, K, d]."""
        best, ids = self._best(hidden, 1 if self.network.markov is None else self.candidates)
        return self._chain_of(best, ids, hidden, state, roots)

    def _chain_of(self, best: Tensor, ids: Tensor, hidden: Tensor, state: BatchState, roots: Tensor) -> DraftTree:
        network, confidence = self.network, self.network.confidence
        tokens, parents, count, sure = ops.draft_chain(
            best, ids, hidden, roots, state.max_drafts, state.temperature,
            None if network.markov is None else network.markov.weights, network.target_ids,
            None if confidence is None else (confidence.weight, confidence.bias),
            self._confidence_temperatures(hidden.device),
        )  # fmt: skip
        return DraftTree(tokens, parents, count, hidden.shape[1], is_chain=True, confidence=sure)

    def _confidence_temperatures(self, device: torch.device) -> Tensor | None:
        return _floats(self.temperatures, device) if self.temperatures else None

    def _children(self, hidden: Tensor, state: BatchState, spec: TreeSpec) -> Children:
        """Candidates of each level (see `tree_growth.Children`), from hidden [R, depth, d]."""
        network, (r, depth, d) = self.network, hidden.shape
        count = max(self.candidates, max(spec.ranks) + 1)
        if spec.is_chain and network.markov is None:
            count = 1
        best, ids = self._best(hidden, count)
        targets, markov = network.to_target(ids), network.markov

        def children(k: int, tokens: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Tensor | None, Carry]:
            if markov is None:
                temperature = torch.where(state.temperature > 0, state.temperature, 1.0)[:, None, None]
                logits = (best[:, k, None] / temperature).expand(-1, tokens.shape[1], -1)
            else:
                table, rows = markov.w1, tokens
                if markov.kind != "vanilla":
                    z, after = self._head(k, hidden[:, k], tokens, *(carry or (None,)))
                    carry = () if after is None else (after,)
                    table, rows = z.flatten(0, 1), torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
                logits = ops.candidate_logits(best[:, k], ids[:, k], markov.w2, table, rows, state.temperature)
            sure = self._sure(k, hidden[:, k], tokens) if self.confidence != "off" else None
            return targets[:, k, None], logits, sure, carry

        return children

    def _ranked(self, children: Children, state: BatchState, spec: TreeSpec) -> DraftTree:
        """The TreeSpec's topology: child number i is the parent's i-th best candidate."""
        placed = state.roots[:, None].repeat(1, spec.num_nodes)
        carries: Carry = ()
        sure = torch.ones(placed.shape, device=placed.device)
        for k, (first, last, below) in enumerate(levels(spec)):
            ids, logits, _, carry = children(k, placed[:, first:last], carries)
            best, rank = logits.softmax(-1).topk(max(spec.ranks[c] for c in below) + 1, dim=-1)
            for child in below:
                at = spec.parents[child] - first
                placed[:, child] = ids[:, 0].gather(1, rank[:, at, spec.ranks[child], None]).squeeze(1)
                sure[:, child] = best[:, at, spec.ranks[child]]
            carries = tuple(torch.stack([x[:, spec.parents[child] - first] for child in below], 1) for x in carry)
        return DraftTree.from_spec(spec, placed, confidence=sure)

    def _drawn_chain(self, hidden: Tensor, state: BatchState, spec: TreeSpec) -> DraftTree:
        """A chain drawn from the whole vocabulary, which is the target's, a draft from each slot of hidden [R, K, d]."""
        network, roots = self.network, state.roots
        base = ops.linear(hidden.flatten(0, 1), network.lm_head).view(*hidden.shape[:2], -1)
        drafts, probs = ops.draw_chain(
            base, hidden, roots, network.markov.weights, state.temperature, state.seeds, state.num_outputs
        )
        tokens = torch.cat((roots[:, None], drafts), 1)
        sure = None
        if network.confidence is not None:
            sure = network.confidence(hidden.flatten(0, 1), network.markov.embed(tokens[:, :-1].flatten()))
            sure = sure.view(drafts.shape)
            if self.temperatures:
                sure = sure / self._confidence_temperatures(sure.device)[: drafts.shape[1]]
            sure = torch.cat((torch.ones_like(sure[:, :1]), sure.sigmoid()), 1)
        return DraftTree.from_spec(spec, tokens, probs=probs, confidence=sure)

    def _sampled(self, hidden: Tensor, state: BatchState, spec: TreeSpec) -> DraftTree:
        """Children drawn without replacement from the whole vocabulary, see `tree_growth.draw_tree`."""
        network, (r, depth, d) = self.network, hidden.shape
        if spec.is_chain and network.markov is not None and network.target_ids is None:
            return self._drawn_chain(hidden, state, spec)
        grow = self.grow and not spec.is_chain
        if grow:
            spec = drawn_tree(spec.num_nodes, spec.depth)
        base = network.logits(hidden.reshape(-1, d)).view(r, depth, -1)

        def draws(
            k: int, nodes: slice, tokens: Tensor, carry: Carry, count: int
        ) -> tuple[Tensor, Tensor, Tensor | None, Carry]:
            z, after = self._head(k, hidden[:, k], tokens, *(carry or (None,)))
            logits = base[:, k, None].expand(-1, tokens.shape[1], -1)
            if z is not None:
                logits = logits + ops.logits(z.flatten(0, 1), network.markov.w2).view_as(logits)
            sure = None if network.confidence is None else self._sure(k, hidden[:, k], tokens)
            return *draw(network.spread(logits), state, nodes.start, count), sure, () if after is None else (after,)

        return draw_tree(state.roots, draws, spec, self.vocab_size, adapt=grow and network.confidence is not None)
