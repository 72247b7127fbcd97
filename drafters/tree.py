"""Draft trees: the fixed shape a drafter fills (`TreeSpec`) and what it proposes (`DraftTree`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_NODES = 64
"""Nodes of one request in one verify pass, the root included: one bit each in an ancestor mask."""


@dataclass(frozen=True)
class TreeSpec:
    """A static topology in breadth-first order. parents[0] is -1 (the root); parents[i] < i.

    Node i is child number ranks[i] of its parent (0 first). A chain of k drafts is a tree of k + 1 nodes; k = 0 is
    plain decoding. A drafter that grows its own shape takes `num_nodes` as its budget and `depth` as its limit.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("parents: the first entry is the root and must be -1")
        if len(self.parents) > MAX_NODES:
            raise ValueError(f"parents: found {len(self.parents)} nodes, allowed: at most {MAX_NODES} with the root")
        for i, p in enumerate(self.parents[1:], start=1):
            if not 0 <= p < i:
                raise ValueError(f"parents[{i}]: found {p}, allowed: 0 to {i - 1} (a parent comes before its children)")
        if list(self.depths) != sorted(self.depths):
            raise ValueError("parents: nodes must be in breadth-first order (depth never decreases)")

    @classmethod
    def chain(cls, k: int) -> TreeSpec:
        """k drafts in a row."""
        if not 0 <= k < MAX_NODES:
            raise ValueError(f"num_speculative_tokens: found {k}, allowed: 0 to {MAX_NODES - 1}")
        return cls(tuple(range(-1, k)))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def num_drafts(self) -> int:
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for p in self.parents[1:]:
            depths.append(depths[p] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The longest path below the root: the most drafts that one step can accept."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        seen: dict[int, int] = {}
        ranks = [0]
        for p in self.parents[1:]:
            ranks.append(seen.get(p, 0))
            seen[p] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def is_chain(self) -> bool:
        return self.depth == self.num_drafts


@dataclass
class DraftTree:
    """The trees of R requests, padded to n nodes each. Node 0 is the root: the last committed token.

    tokens      [R, n] int64   -1 beyond num_nodes
    parents     [R, n] int64   -1 for the root and beyond num_nodes; otherwise below the node's own index
    num_nodes   [R] int64      nodes of each request, root included; they come first
    probs       [R, n, V] float32: row i is the distribution that the children of node i were drawn from. None: the tree
                is deterministic (each child counts as a point mass)
    confidence  [R, n] float32: estimated probability that the node is accepted, given that its parent was. Optional
    is_chain    host fact: every node's parent is the node before it
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
        parents = torch.tensor(spec.parents, device=tokens.device).expand(r, n)
        full = torch.full((r,), n, dtype=torch.int64, device=tokens.device)
        return cls(tokens, parents, full, spec.depth, spec.is_chain, **extra)

    def ancestors(self) -> Tensor:
        """[R, n, n] bool: entry (i, j) says that j is i or an ancestor of i. Padding nodes see only themselves."""
        r, n = self.tokens.shape
        seen = torch.eye(n, dtype=torch.bool, device=self.tokens.device).repeat(r, 1, 1)
        rows = torch.arange(r, device=self.tokens.device)[:, None]
        cursor = self.parents
        for _ in range(self.depth):
            on = cursor >= 0
            seen[rows, torch.arange(n, device=cursor.device), cursor.clamp(min=0)] |= on
            cursor = torch.where(on, self.parents.gather(1, cursor.clamp(min=0)), -1)
        return seen

    def masks(self) -> Tensor:
        """Ancestor masks [R, n] int64: bit j of node i is set where j is i or an ancestor of i."""
        if self.is_chain:
            bits = (torch.ones(self.width, dtype=torch.int64) << torch.arange(self.width)).cumsum(0)
            return bits.to(self.tokens.device).expand(self.tokens.shape[0], -1)
        bits = torch.ones(self.width, dtype=torch.int64) << torch.arange(self.width)
        return (self.ancestors() * bits.to(self.tokens.device)).sum(-1)

    def depths(self) -> Tensor:
        """Depth of each node, [R, n] int64; 0 for padding."""
        if self.is_chain:
            depths = torch.arange(self.width, device=self.tokens.device).expand(self.tokens.shape[0], -1)
            return torch.where(self.tokens >= 0, depths, 0)
        return torch.where(self.tokens >= 0, self.ancestors().sum(-1) - 1, 0)

    def prune(self, keep: Tensor) -> DraftTree:
        """The tree of the kept nodes, moved to the front in their order. keep [R, n] bool.

        A node whose parent is dropped is dropped with it; the root always stays.
        """
        r, n = self.tokens.shape
        keep = (keep & (self.tokens >= 0)).clone()
        keep[:, 0] = True
        for _ in range(self.depth):  # prefix-closed: a lost parent takes its children along
            keep &= torch.where(self.parents >= 0, keep.gather(1, self.parents.clamp(min=0)), True)
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
        new_index = keep.cumsum(1) - 1
        count = keep.sum(1)
        inside = torch.arange(n, device=keep.device) < count[:, None]
        parents = new_index.gather(1, self.parents.clamp(min=0)).masked_fill(self.parents < 0, -1)

        def move(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            index = order.view(r, n, *[1] * (x.dim() - 2)).expand_as(x)
            return x.gather(1, index)

        return DraftTree(
            tokens=torch.where(inside, move(self.tokens), -1),
            parents=torch.where(inside, move(parents), -1),
            num_nodes=count,
            depth=self.depth,
            is_chain=self.is_chain,
            probs=move(self.probs),
            confidence=move(self.confidence),
        )
