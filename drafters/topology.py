"""The static topology of a draft tree. No torch at import: configuration files are checked with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_NODES = 64
"""Nodes of one request in one verify pass, the root included: one bit each in an ancestor mask."""


@lru_cache(maxsize=64)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    import torch

    # Kept, because a captured step must not copy from the host.
    return torch.tensor(values, dtype=torch.int64, device=device)


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

    def parents_on(self, device: torch.device) -> Tensor:
        """parents as an int64 tensor [n], made once per device."""
        return _constant(self.parents, device)

    def ranks_on(self, device: torch.device) -> Tensor:
        """ranks as an int64 tensor [n], made once per device."""
        return _constant(self.ranks, device)
