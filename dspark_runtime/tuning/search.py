"""Which shape gives the most tokens a second: every chain and, for every size and depth, the best tree, at the cost
that the curve says. Acceptance alone decides nothing: the goodput R * AL / step does.

Uncertainty: acceptance is resampled from its steps and every point of the curve from its spread; a shape is computed
under the same resamples as its rivals, so differences are paired. A predicted curve errs in all points alike. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafters.topology import TreeSpec
from drafters.tree_search import best_trees
from drafters.tree_search import survival as tree_survival
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import Suite, draws, pooled, profiles, rank_shares
from dspark_runtime.tuning.curve import Curve

DRAWS = 1000
INTERVAL = (5.0, 95.0)
"""Percentiles of every interval that is printed."""
RIVALS = 24
"""Trees that are resampled: the best ones at the stated rates. Chains all are."""


@dataclass(frozen=True)
class Shape:
    """A chain or tree, and the share of steps that accept a draft at each of its depths."""

    spec: TreeSpec
    survival: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        return 1.0 + math.fsum(self.survival)

    @property
    def name(self) -> str:
        if not self.spec.num_drafts:
            return "plain"
        if self.spec.is_chain:
            return f"k={self.spec.num_drafts}"
        return f"tree {self.spec.num_nodes}, depth {self.spec.depth}"


@dataclass(frozen=True)
class Scored:
    """A shape at one number of requests. low, high: 90 % interval of tokens/s. chance: share of the resamples in which
    it is the best of all (nan: not resampled)."""

    shape: Shape
    num_requests: int
    draft_ms: float
    verify_ms: float
    low: float = math.nan
    high: float = math.nan
    chance: float = math.nan

    @property
    def step_ms(self) -> float:
        return self.draft_ms + self.verify_ms

    @property
    def goodput(self) -> float:
        """Tokens a second of all requests."""
        return 1e3 * self.num_requests * self.shape.acceptance_length / self.step_ms

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token of one request, on average."""
        return self.step_ms / self.shape.acceptance_length


@dataclass(frozen=True)
class Choice:
    """What to do at one number of requests. best, chain, tree: the best shape of all, of the chains (plain included),
    of the trees (None without); plain: no speculation. within: whether best meets the latency limit. ratio: interval of
    best / plain; break_even: the AL at which the best speculative shape gains nothing; loss: expected share of the
    goodput that is lost because best may be the wrong one; tied: shapes that cannot be told from best."""

    num_requests: int
    best: Scored
    chain: Scored
    tree: Scored | None
    plain: Scored
    speculative: Scored | None
    ratio: tuple[float, float]
    break_even: float | None
    loss: float
    tied: tuple[Scored, ...]
    within: bool
    scored: tuple[Scored, ...]

    @property
    def speculate(self) -> str:
        if not self.best.shape.spec.num_drafts:
            return "in doubt" if any(s.shape.spec.num_drafts for s in self.tied) else "no"
        return "yes" if self.ratio[0] > 1 else "in doubt"

    def regret(self, shape: Shape) -> float:
        """Share of the goodput that is lost with another shape."""
        other = next((s for s in self.scored if s.shape.spec == shape.spec), None)
        if other is None:
            return math.nan
        return 1 - other.goodput / self.best.goodput


def chains(survival: Sequence[float]) -> list[Shape]:
    """Chains of 0, 1, ... drafts."""
    return [Shape(TreeSpec.chain(k), tuple(survival[:k])) for k in range(len(survival) + 1)]


def trees(survival: Sequence[float], shares: np.ndarray, largest: int) -> list[Shape]:
    """The best tree of every size up to `largest` nodes and every limit of depth, without chains and repetitions.

    Among them is the best shape as long as drafting deeper takes no less time.
    """
    ranks = profiles(survival, shares)
    found: dict[TreeSpec, Shape] = {}
    for depth in range(1, len(ranks) + 1):
        for spec in best_trees(ranks[:depth], largest):
            if not spec.is_chain and spec not in found:
                found[spec] = Shape(spec, tuple(tree_survival(spec, ranks)))
    return list(found.values())


def lengths(shapes: Sequence[Shape], survival: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """AL of each shape under each resample. survival [D, depth]; returns [D, shapes]."""
    before = np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)
    rates = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    out = np.ones((len(survival), len(shapes)))
    for j, shape in enumerate(shapes):
        spec = shape.spec
        if spec.is_chain:
            out[:, j] += survival[:, : spec.num_drafts].sum(1)
            continue
        reach = [np.ones(len(survival))]
        for parent, rank, depth in zip(spec.parents[1:], spec.ranks[1:], spec.depths[1:]):
            first = rates[:, depth - 1]
            reach.append(reach[parent] * (first if rank == 0 else (1 - first) * shares[rank - 1]))
        out[:, j] = np.sum(reach, axis=0)
    return out


def resampled_points(curve: Curve, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, points] float64: factors on each point's times. A measured point is the median of `repeats` whose
    relative standard deviations are its own spread and the curve's drift; both are themselves estimates from so few."""
    spread = np.array([p.spread for p in curve.points])
    if curve.source == "model":
        return (1 + rng.standard_normal((count, 1)) * spread).clip(0.1, 10.0)
    if curve.repeats < 2:
        return np.ones((count, len(spread)))
    degrees, median = curve.repeats - 1, math.sqrt(math.pi / 2 / curve.repeats)
    own = rng.standard_t(degrees, (count, len(spread))) * spread
    shared = rng.standard_t(degrees, (count, 1)) * curve.drift
    return (1 + median * (own + shared)).clip(0.1, 10.0)


def costs(curve: Curve, shapes: Sequence[Shape], num_requests: int, context: int, factors: np.ndarray) -> np.ndarray:
    """Milliseconds of a step of each shape under each resample of the points, [D, shapes]."""
    weights = np.zeros((len(curve.points), len(shapes)))
    for j, shape in enumerate(shapes):
        draft, verify = curve.terms(num_requests, shape.spec.num_nodes, shape.spec.depth, context)
        for i, w in draft.items():
            weights[i, j] += w * curve.points[i].draft_ms
        for i, w in verify.items():
            weights[i, j] += w * (curve.points[i].verify_ms + curve.points[i].other_ms)
    return factors @ weights


def tune(
    curve: Curve,
    suites: Sequence[Suite],
    num_requests: Sequence[int],
    context: int,
    latency_ms: float | None = None,
    use_trees: bool = True,
    seed: int = 0,
) -> list[Choice]:
    """The best shape for each number of requests. latency_ms: most milliseconds per token of a request; `within` says
    whether the best shape (and with it any) meets it.

    Raises ConfigError where the curve does not reach.
    """
    if latency_ms is not None and not latency_ms > 0:
        raise ConfigError(f"latency: found {latency_ms:g}, allowed: more than 0 ms per token")
    rng = np.random.default_rng(seed)
    suite = pooled(suites)
    shares = rank_shares(suite.profile)
    sampled = draws(suites, DRAWS, rng)
    factors = resampled_points(curve, DRAWS, rng)
    deepest = min(suite.depth, curve.max_depth)
    survival = suite.survival[:deepest]
    rows = chains(survival)
    branched: list[Shape] = []
    if use_trees and curve.can_tree:
        largest = max(curve.largest_tree(b, context) for b in num_requests)
        branched = trees(survival, shares, largest) if largest > 2 else []
    return [
        _choose(curve, [*rows, *branched], b, context, latency_ms, sampled[:, :deepest], factors, shares)
        for b in num_requests
    ]


def score(curve: Curve, shape: Shape, num_requests: int, context: int) -> Scored:
    draft, rest = curve.cost(num_requests, shape.spec.num_nodes, shape.spec.depth, context)
    return Scored(shape, num_requests, draft, rest)


def _choose(
    curve: Curve,
    shapes: Sequence[Shape],
    num_requests: int,
    context: int,
    latency_ms: float | None,
    sampled: np.ndarray,
    factors: np.ndarray,
    shares: np.ndarray,
) -> Choice:
    reach = curve.longest_chain(num_requests, context), curve.largest_tree(num_requests, context)
    every = [
        score(curve, s, num_requests, context)
        for s in shapes
        if (
            s.spec.num_drafts <= reach[0]
            if s.spec.is_chain
            else s.spec.num_nodes <= reach[1] and s.spec.depth <= reach[0]
        )
    ]
    plain = every[0]
    # With so many requests, most tokens/s and least time per token are the same shape: the limit only judges it.
    best = max(every, key=lambda s: s.goodput)

    grown = sorted((s for s in every if not s.shape.spec.is_chain), key=lambda s: -s.goodput)
    rivals = [s for s in every if s.shape.spec.is_chain] + grown[:RIVALS]
    if best not in rivals:
        rivals.append(best)
    al = lengths([s.shape for s in rivals], sampled, shares)
    rates = 1e3 * num_requests * al / costs(curve, [s.shape for s in rivals], num_requests, context, factors)
    low, high = np.percentile(rates, INTERVAL, axis=0)
    chance = np.bincount(rates.argmax(1), minlength=len(rivals)) / len(rates)
    known = {
        s.shape.spec: Scored(s.shape, num_requests, s.draft_ms, s.verify_ms, *map(float, numbers))
        for s, *numbers in zip(rivals, low, high, chance)
    }
    here = next(j for j, s in enumerate(rivals) if s is best)
    ahead = np.percentile(rates / rates[:, here : here + 1], INTERVAL[1], axis=0)
    tied = [known[s.shape.spec] for j, s in enumerate(rivals) if j != here and ahead[j] >= 1]
    ratio = np.percentile(rates[:, here] / rates[:, rivals.index(plain)], INTERVAL)

    speculative = max((s for s in every if s.shape.spec.num_drafts), key=lambda s: s.goodput, default=None)
    ours = best if best.shape.spec.num_drafts else speculative
    pick = {s.shape.spec: s for s in every} | known
    chain = max((s for s in every if s.shape.spec.is_chain), key=lambda s: s.goodput)
    tree = grown[0] if grown else None
    return Choice(
        num_requests=num_requests,
        best=pick[best.shape.spec],
        chain=pick[chain.shape.spec],
        tree=pick[tree.shape.spec] if tree else None,
        plain=pick[plain.shape.spec],
        speculative=pick[speculative.shape.spec] if speculative else None,
        ratio=(float(ratio[0]), float(ratio[1])),
        break_even=ours.step_ms / plain.step_ms if ours else None,
        loss=float(np.mean(1 - rates[:, here] / rates.max(1))),
        tied=tuple(sorted(tied, key=lambda s: s.shape.spec.num_nodes)),
        within=latency_ms is None or best.tpot_ms <= latency_ms,
        scored=tuple(pick[s.shape.spec] for s in every),
    )
