"""Draft trees: what a drafter proposes (`DraftTree`) within a fixed topology (`TreeSpec`, from `drafters.topology`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.topology import MAX_NODES, TreeSpec
from verify_kernels import ops
from verify_kernels.reference.trees import bits

__all__ = ["MAX_NODES", "DraftTree", "TreeSpec"]


@dataclass
class DraftTree:
    """The trees of R requests, padded to n nodes each. Node 0 is the root: the last committed token.

    tokens      [R, n] int64   -1 beyond num_nodes
    parents     [R, n] int64   -1 for the root and beyond num_nodes; otherwise below the node's own index
    num_nodes   [R] int64      nodes of each request, root included; they come first
    probs       [R, n, V] float32: row i is the distribution that the children of node i were drawn from. None: the tree
                is deterministic (each child counts as a point mass)
    confidence  [R, n] float32: estimated probability that the node is accepted, given that its parent was. Optional.
                Where children were drawn (probs), it must not depend on the node's own token: schedules rely on that
    is_chain    host fact: every node's parent is the node before it (and then width > depth)
    depth       host bound on the longest path
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    depth: int
    is_chain: bool = False
    probs: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def from_spec(cls, spec: TreeSpec, tokens: Tensor, **extra: Tensor | None) -> DraftTree:
        """A full tree of static shape. tokens [R, spec.num_nodes]."""
        r, n = tokens.shape
        parents = spec.parents_on(tokens.device).expand(r, n)
        full = torch.full((r,), n, dtype=torch.int64, device=tokens.device)
        return cls(tokens, parents, full, spec.depth, spec.is_chain, **extra)

    def masks_and_depths(self) -> tuple[Tensor, Tensor]:
        """Ancestor masks [R, n] int64 (bit j of node i is set where j is i or an ancestor of i) and depths [R, n] int64.

        Padding nodes have depth 0; their masks mean nothing.
        """
        if self.is_chain:
            nodes = torch.arange(self.width, device=self.tokens.device)
            masks = (bits(self.width, self.tokens.device) * 2 - 1).expand(self.tokens.shape[0], -1)
            return masks, torch.where(self.parents >= 0, nodes, 0)
        return ops.tree_masks(self.parents, self.depth)

    def masks(self) -> Tensor:
        """Ancestor masks [R, n] int64, see `masks_and_depths`."""
        return self.masks_and_depths()[0]

    def depths(self) -> Tensor:
        """Depth of each node, [R, n] int64; 0 for padding."""
        return self.masks_and_depths()[1]

    def ancestors(self) -> Tensor:
        """[R, n, n] bool: entry (i, j) says that j is i or an ancestor of i. Rows of padding mean nothing."""
        nodes = torch.arange(self.width, device=self.tokens.device)
        if self.is_chain:
            return (nodes[:, None] >= nodes).expand(self.tokens.shape[0], -1, -1)
        return (self.masks()[:, :, None] >> nodes) & 1 == 1

    def limit(self, max_depth: Tensor) -> DraftTree:
        """The tree without nodes deeper than max_depth [R] of their request."""
        if not self.is_chain:
            return self.prune(self.depths() <= max_depth[:, None])
        count = torch.minimum(self.num_nodes, max_depth + 1)
        inside = torch.arange(self.width, device=count.device) < count[:, None]
        tokens, parents = self.tokens.masked_fill(~inside, -1), self.parents.masked_fill(~inside, -1)
        return replace(self, tokens=tokens, parents=parents, num_nodes=count)

    def prune(self, keep: Tensor) -> DraftTree:
        """The tree of the kept nodes, moved to the front in their order. keep [R, n] bool.

        A node whose parent is dropped is dropped with it; the root always stays.
        """
        r, n = self.tokens.shape
        tokens, parents, count, order = ops.prune_tree(self.tokens, self.parents, keep, self.depth)

        def move(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            index = order.view(r, n, *[1] * (x.dim() - 2)).expand_as(x)
            return x.gather(1, index)

        return DraftTree(
            tokens=tokens,
            parents=parents,
            num_nodes=count,
            depth=self.depth,
            is_chain=self.is_chain,
            probs=move(self.probs),
            confidence=move(self.confidence),
        )
