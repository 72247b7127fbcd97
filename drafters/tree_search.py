"""The best static topology for known acceptance rates, by exact dynamic programming (Sequoia's problem). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from drafters.topology import MAX_NODES, TreeSpec

Profile = Sequence[float]
"""profile[i]: probability that the target's token is the drafter's (i + 1)-th choice, whatever came before."""


def best_tree(profile: Profile, num_nodes: int, depth: int) -> TreeSpec:
    """The tree of at most num_nodes nodes (root included) and `depth` levels with the largest expected AL."""
    ranks = len(profile)

    @cache
    def under(nodes: int, levels: int) -> tuple[float, tuple[int, ...]]:
        """(most tokens expected below a node, sizes of its children's subtrees, first choice first)."""
        return children(0, nodes, levels) if levels else (0.0, ())

    @cache
    def children(rank: int, nodes: int, levels: int) -> tuple[float, tuple[int, ...]]:
        if rank == ranks or not nodes:
            return 0.0, ()
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        for size in range(1, nodes + 1):
            rest = children(rank + 1, nodes - size, levels)
            value = profile[rank] * (1 + under(size - 1, levels - 1)[0]) + rest[0]
            if value > best[0]:
                best = value, (size, *rest[1])
        return best

    parents, level = [-1], [(0, num_nodes - 1)]
    for left in range(depth, 0, -1):
        following = []
        for node, nodes in level:
            for size in under(nodes, left)[1]:
                following.append((len(parents), size - 1))
                parents.append(node)
        level = following
    return TreeSpec(tuple(parents))


def expected_length(spec: TreeSpec, profile: Profile) -> float:
    """Expected AL, bonus token included."""
    reach = [1.0]
    for parent, rank in zip(spec.parents[1:], spec.ranks[1:]):
        reach.append(reach[parent] * (profile[rank] if rank < len(profile) else 0.0))
    return sum(reach)


def smallest_tree(profile: Profile, length: float, depth: int) -> TreeSpec | None:
    """The fewest nodes whose expected AL reaches `length`; None if MAX_NODES do not."""
    for nodes in range(1, MAX_NODES + 1):
        spec = best_tree(profile, nodes, depth)
        if expected_length(spec, profile) >= length:
            return spec
    return None


def profile_of(chain_length: float, k: int, ranks: int = 16, caught: float = 0.75, ratio: float = 0.45) -> list[float]:
    """A profile whose chain of k drafts has this AL: ranks from the second on hold `caught` of what the first misses,
    each `ratio` times the one before."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(k + 1)) < chain_length else (low, p)
    weights = [ratio**i for i in range(ranks - 1)]
    rest = [(1 - low) * caught * w / sum(weights) for w in weights]
    return [round(x, 6) for x in (low, *rest)]
