"""A drafter that is a plain function, for exact cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import KVCache, PassBatch

Proposal = list[int] | tuple[list[int], list[int]]


class ScriptedDrafter:
    """next_tokens(committed tokens of a request, depth) -> drafts, called on the host once per request and step.

    A list is a chain, which ends at its first -1. A tuple is (draft tokens, parents of those drafts): parent 0 is the
    root, parent i + 1 is draft i, and a parent comes before its children (ValueError otherwise, or for a tree where a
    chain is asked for). What exceeds the budget or the depth is cut. CPU only. Implements `drafters.base.Drafter`.
    """

    name = "scripted"
    max_depth = 63
    can_tree = True
    can_sample = False
    taps: tuple[int, ...] = ()
    lookahead = 0
    kv: KVCache | None = None

    def __init__(self, next_tokens: Callable[[tuple[int, ...], int], Proposal], vocab_size: int | None = None) -> None:
        self.next_tokens = next_tokens
        self.vocab_size = vocab_size

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"device: found {device.type}, allowed: cpu (the scripted drafter runs on the host)")

    def prefill(self, batch: PassBatch, features: Tensor | None) -> None:
        pass

    def observe(self, state: BatchState, features: Tensor | None, kept: Tensor) -> None:
        pass

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        tokens, parents = [], []
        for line, length in zip(state.tokens.tolist(), state.seq_lens.tolist()):
            drafts, above = self._one(tuple(line[:length]), spec)
            tokens.append([line[length - 1], *drafts])
            parents.append([-1, *above])
        width = max(map(len, tokens))
        tree = DraftTree(
            tokens=torch.tensor([row + [-1] * (width - len(row)) for row in tokens]),
            parents=torch.tensor([row + [-1] * (width - len(row)) for row in parents]),
            num_nodes=torch.tensor([len(row) for row in tokens]),
            depth=width - 1,
            is_chain=spec.is_chain,
        ).limit(state.max_drafts.clamp(max=spec.depth))
        return replace(tree, depth=min(width - 1, spec.depth))

    def _one(self, committed: tuple[int, ...], spec: TreeSpec) -> tuple[list[int], list[int]]:
        if not spec.num_drafts:
            return [], []
        proposal = self.next_tokens(committed, spec.depth)
        if isinstance(proposal, tuple):
            drafts, parents = proposal
            if spec.is_chain:
                raise ValueError("drafts: found a tree, allowed: a list (a chain is asked for)")
            if len(parents) != len(drafts) or not all(0 <= p <= i for i, p in enumerate(parents)):
                raise ValueError(f"parents: found {parents} for {len(drafts)} drafts, allowed: for draft i, 0 to i")
            if any(token < 0 for token in drafts):
                raise ValueError(f"drafts: found {drafts}, allowed: ids from 0 in a tree")
        else:
            drafts = proposal[: proposal.index(-1)] if -1 in proposal else proposal
            parents = list(range(len(drafts)))
        return drafts[: spec.num_drafts], parents[: spec.num_drafts]
