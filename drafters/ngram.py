"""Prompt lookup: what followed the last few tokens when they occurred before."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.suffix import continuations
from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import KVCache, PassBatch


class NgramDrafter:
    """Drafts the continuation of earlier occurrences of a request's last tokens. Implements `drafters.base.Drafter`.

    An occurrence is better the more tokens it shares with the end of the sequence (between min_ngram and max_ngram)
    and, among equals, the more recent it is. A chain takes the best one; a tree merges the continuations of the best
    ones into a trie, in that order, until its budget is spent (it grows its own shape: of the TreeSpec only depth and
    number of nodes matter). A continuation ends where the committed tokens end. Without an occurrence there is only
    the root.
    """

    name = "ngram"
    vocab_size: int | None = None
    max_depth = 63
    can_tree = True
    can_sample = False
    taps: tuple[int, ...] = ()
    lookahead = 0
    kv: KVCache | None = None

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram: found {min_ngram}, allowed: 1 to max_ngram ({max_ngram})")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        pass

    def prefill(self, batch: PassBatch, features: Tensor | None) -> None:
        pass

    def observe(self, state: BatchState, features: Tensor | None, kept: Tensor) -> None:
        pass

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        if not spec.num_drafts:
            return DraftTree.from_spec(spec, state.roots[:, None])
        count = 1 if spec.is_chain else spec.num_drafts
        found = continuations(state, spec.depth, count, self.max_ngram, self.min_ngram).tokens
        if not spec.is_chain:
            return _trie(state.roots, found, spec)
        tokens = torch.cat((state.roots[:, None], found[:, 0]), dim=1)
        real = tokens >= 0
        parents = torch.where(real, spec.parents_on(tokens.device), -1)
        return DraftTree(tokens, parents, real.sum(1), spec.depth, is_chain=True)


def _trie(roots: Tensor, found: Tensor, spec: TreeSpec) -> DraftTree:
    """Merge continuations found [R, B, depth] into a tree of at most spec.num_nodes nodes, earlier ones first."""
    r, b, depth = found.shape
    device = found.device
    same = (found[:, :, None] == found[:, None, :]).cumprod(-1).bool()  # [R, B, B, depth]: equal up to here
    # The first continuation that shares this prefix owns its node.
    owner = same.to(torch.int8).argmax(2)  # [R, B, depth]
    real = found >= 0
    new = real & (owner == torch.arange(b, device=device)[:, None])
    index = new.flatten(1).cumsum(1).view(r, b, depth)  # node number of new nodes, in order: parents come first
    node = index.gather(1, owner)
    above = torch.cat((torch.zeros_like(node[..., :1]), node[..., :-1]), dim=-1)
    width = spec.num_nodes
    place = torch.where(new & (index < width), index, width).flatten(1)  # column `width` takes what does not fit

    def scatter(values: Tensor, first: Tensor) -> Tensor:
        out = values.new_full((r, width + 1), -1)
        out[:, 0] = first
        return out.scatter(1, place, values.flatten(1))[:, :width]

    tokens = scatter(found, roots)
    parents = scatter(above, torch.full_like(roots, -1))
    return DraftTree(tokens, parents, (tokens >= 0).sum(1), depth)
