"""The best static topology for known acceptance rates, by exact dynamic programming (Sequoia's problem). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from drafters.topology import MAX_NODES, TreeSpec

Profile = Sequence[float]
"""profile[i]: probability that the target's token is the drafter's (i + 1)-th choice, whatever came before."""


def best_trees(profiles: Sequence[Profile], num_nodes: int) -> list[TreeSpec]:
    """For each budget of 1 to num_nodes nodes (root included) the tree with the largest expected AL.

    profiles[d]: rank acceptances of the children of nodes at depth d; the trees are at most len(profiles) deep.
    """
    depth = len(profiles)

    @cache
    def under(nodes: int, level: int) -> tuple[float, tuple[int, ...]]:
        """(most tokens expected below a node of this depth, sizes of its children's subtrees, first choice first)."""
        return children(0, nodes, level) if level < depth else (0.0, ())

    @cache
    def children(rank: int, nodes: int, level: int) -> tuple[float, tuple[int, ...]]:
        profile = profiles[level]
        if rank == len(profile) or not nodes:
            return 0.0, ()
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        for size in range(1, nodes + 1):
            rest = children(rank + 1, nodes - size, level)
            value = profile[rank] * (1 + under(size - 1, level + 1)[0]) + rest[0]
            if value > best[0]:
                best = value, (size, *rest[1])
        return best

    def build(budget: int) -> TreeSpec:
        parents, row = [-1], [(0, budget - 1)]
        for level in range(depth):
            following = []
            for node, nodes in row:
                for size in under(nodes, level)[1]:
                    following.append((len(parents), size - 1))
                    parents.append(node)
            row = following
        return TreeSpec(tuple(parents))

    return [build(budget) for budget in range(1, num_nodes + 1)]


def best_tree(profile: Profile, num_nodes: int, depth: int) -> TreeSpec:
    """The tree of at most num_nodes nodes (root included) and `depth` levels with the largest expected AL."""
    return best_trees([profile] * depth, num_nodes)[-1]


def survival(spec: TreeSpec, profiles: Sequence[Profile]) -> list[float]:
    """Share of steps that accept a draft at depth 1, 2, ... spec.depth. profiles as in `best_trees`."""
    reach, shares = [1.0], [0.0] * spec.depth
    for parent, rank, depth in zip(spec.parents[1:], spec.ranks[1:], spec.depths[1:]):
        profile = profiles[depth - 1]
        reach.append(reach[parent] * (profile[rank] if rank < len(profile) else 0.0))
        shares[depth - 1] += reach[-1]
    return shares


def expected_length(spec: TreeSpec, profile: Profile) -> float:
    """Expected AL, bonus token included."""
    return 1.0 + sum(survival(spec, [profile] * spec.depth))


def smallest_tree(profile: Profile, length: float, depth: int) -> TreeSpec | None:
    """The fewest nodes whose expected AL reaches `length`; None if MAX_NODES do not."""
    for spec in best_trees([profile] * depth, MAX_NODES):
        if expected_length(spec, profile) >= length:
            return spec
    return None


def profile_of(chain_length: float, k: int, ranks: int = 16, caught: float = 0.75, ratio: float = 0.45) -> list[float]:
    """A profile whose chain of k drafts has this AL, its later ranks assumed as in `assumed_profile`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(k + 1)) < chain_length else (low, p)
    return [round(x, 6) for x in assumed_profile(low, ranks, caught, ratio)]


def assumed_profile(first: float, ranks: int = 16, caught: float = 0.75, ratio: float = 0.45) -> list[float]:
    """Rank acceptances from the first one alone: ranks from the second on hold `caught` of what the first misses, each
    `ratio` times the one before."""
    weights = [ratio**i for i in range(ranks - 1)]
    return [first, *((1 - first) * caught * w / sum(weights) for w in weights)]


TYPICAL = 0.6
"""Probability that a drafter's one draw at temperature 1 is accepted. SmolLM2's has 0.66 at the nodes that are reached and
0.54 behind all text; with 0.6 the levels are about as large as those of trees grown best first from its confidences."""


def drawn_profile(first: Any, ranks: int) -> list[Any]:
    """Probabilities that the 1st, 2nd, ... of `ranks` siblings drawn without replacement is the one that is accepted.

    first: that of one draw alone, a float or a tensor of them. After j - 1 rejections the j-th is accepted with
    probability first / j: measured 0.66, 0.32, 0.19, 0.14, 0.10 where the first is 0.66, and alike where it is more or
    less (SmolLM2 and its drafter, temperature 1).
    """
    rates, left = [], 1.0
    for j in range(1, ranks + 1):
        rates.append(left * first / j)
        left = left * (1 - first / j)
    return rates


@lru_cache(maxsize=64)
def drawn_tree(num_nodes: int, depth: int) -> TreeSpec:
    """The best static topology for children that are drawn, where every node's first draw is as good as TYPICAL."""
    return best_tree(drawn_profile(TYPICAL, 16), num_nodes, depth)
