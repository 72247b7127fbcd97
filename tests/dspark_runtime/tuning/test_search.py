"""The choice against enumeration, the doubt against simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.topology import TreeSpec
from drafters.tree_search import survival as tree_survival
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import checked_suite, profiles, rank_shares, typed
from dspark_runtime.tuning.curve import Curve
from dspark_runtime.tuning.search import tune
from tests.drafters.test_tree_search import every_tree
from tests.dspark_runtime.tuning.curves import chain_curve, curve, point

NODES, DEPTH = 6, 3
MS = st.floats(1, 20)


@st.composite
def cases(draw) -> tuple[Curve, list[float]]:
    """A curve without any order in it, but that drafting deeper takes no less time, and rates."""
    drafting = [0.0, *sorted(draw(st.lists(MS, min_size=DEPTH, max_size=DEPTH)))]
    points = [point(1, k + 1, k, draw(MS), draft=drafting[k]) for k in range(DEPTH + 1)]
    points += [point(1, t, DEPTH - (t == 4), draw(MS), draft=30 + draw(MS)) for t in (4, 5, NODES)]
    rates = draw(st.lists(st.floats(0.05, 0.95), min_size=DEPTH, max_size=DEPTH))
    return curve(points, draw(st.sampled_from(["step", "linear"]))), rates


@settings(deadline=None, max_examples=60)
@given(cases(), st.sampled_from([None, [0.6, 0.3, 0.1], [0.5, 0.2]]))
def test_no_shape_is_better(case: tuple[Curve, list[float]], profile: list[float] | None) -> None:
    c, rates = case
    suite = checked_suite("x", np.cumprod(rates).tolist(), profile=profile)
    (choice,) = tune(c, [suite], [1], 64)
    ranks = profiles(suite.survival, rank_shares(suite.profile))

    def goodput(spec: TreeSpec) -> float:
        return 1e3 * (1 + math.fsum(tree_survival(spec, ranks))) / sum(c.cost(1, spec.num_nodes, spec.depth, 64))

    def useful(spec: TreeSpec) -> bool:
        """Without nodes that are never accepted: padding a tree with those is no choice, even where it is cheaper."""
        nodes = list(zip(spec.ranks, spec.depths, strict=True))[1:]
        return spec.is_chain or all(r < len(ranks[d - 1]) for r, d in nodes)

    every = [s for n in range(1, NODES + 1) for s in every_tree(n, DEPTH) if useful(s)]
    assert choice.best.goodput == pytest.approx(max(map(goodput, every)), rel=1e-9)
    assert choice.chain.goodput == pytest.approx(max(goodput(TreeSpec.chain(k)) for k in range(DEPTH + 1)), rel=1e-9)
    assert choice.best.goodput == pytest.approx(goodput(choice.best.shape.spec))
    assert all(choice.regret(s.shape) >= -1e-12 for s in choice.scored)


def test_the_choice_sits_at_the_edge_of_a_step() -> None:
    """Graphs of 1, 4 and 8 tokens: with every further draft free up to an edge, 3 drafts or 7, never 5."""
    rates = typed("0.7,0.7,0.7,0.7,0.7,0.7,0.7", True, None)
    for last, want in ((30.0, "k=3"), (12.0, "k=7")):
        (choice,) = tune(chain_curve({1: 10.0, 4: 11.0, 8: last}, between="step"), [rates], [1], 64)
        assert choice.best.shape.name == want
    jagged = {1: 10.0, 2: 10.1, 3: 16.0, 4: 16.1, 5: 10.4}  # a measured size that happens to be fast is used
    (choice,) = tune(chain_curve(jagged), [typed("0.7,0.7,0.7,0.7", True, None)], [1], 64)
    assert choice.best.shape.name == "k=4"


def test_goodput_decides_and_not_acceptance() -> None:
    """The same acceptance: worth 7 drafts where verifying is free, none where it is dear."""
    rates = typed("0.9,0.9,0.9,0.9,0.9,0.9,0.9", True, 5000)
    points = [point(1, t, t - 1, 10.0 + 0.05 * t) for t in range(1, 9)]
    points += [point(32, t, t - 1, 10.0 * t) for t in range(1, 9)]
    one, many = tune(curve(points), [rates], [1, 32], 64)
    assert one.best.shape.name == "k=7" and one.speculate == "yes" and one.ratio[0] > 5
    assert many.best.shape.name == "plain" and many.speculate == "no" and many.break_even == pytest.approx(2.0)
    assert many.regret(one.best.shape) == pytest.approx(1 - (1 + sum(rates.survival)) / 8)
    assert many.break_even > many.speculative.shape.acceptance_length


def test_break_even_is_where_the_two_meet() -> None:
    c = chain_curve({1: 10.0, 4: 15.0})
    (choice,) = tune(c, [typed("0.8,0.6,0.4", False, None)], [1], 64, use_trees=False)
    assert choice.break_even == pytest.approx(1.5)
    for al, better in ((1.51, True), (1.49, False)):
        survival = [min(1.0, al - 1), 0.0, 0.0]
        (choice,) = tune(c, [checked_suite("x", survival)], [1], 64)
        k3 = next(s for s in choice.scored if s.shape.name == "k=3")
        assert (k3.goodput > choice.plain.goodput) == better


def test_a_latency_limit_judges_every_number_of_requests() -> None:
    points = [point(b, t, t - 1, 10.0 * b**0.5) for b in (1, 4, 16) for t in (1, 3)]
    found = tune(curve(points), [typed("0.5,0.5", True, None)], [1, 4, 16], 64, latency_ms=12.0)
    assert [c.within for c in found] == [True, True, False]
    with pytest.raises(ConfigError, match="latency: found 0"):
        tune(curve(points), [typed("0.5", True, None)], [1], 64, latency_ms=0.0)


def test_noise_is_called_noise() -> None:
    level = {t: 10.0 + 0.6 * (t - 1) for t in range(1, 5)}
    few = typed("0.06,0.02,0.01", False, 150)
    (choice,) = tune(chain_curve(level, spread=0.05), [few], [1], 64)
    assert choice.speculate == "in doubt" and choice.tied and choice.loss > 0.002
    sure = typed("0.9,0.8,0.7", False, 10_000)
    (choice,) = tune(chain_curve(level), [sure], [1], 64)
    assert choice.speculate == "yes" and not choice.tied and choice.loss == 0 and choice.best.chance == 1


def test_what_drifts_together_does_not_blur_the_order() -> None:
    ms = {1: 10.0, 2: 10.0, 3: 10.0}
    rates = typed("0.5,0.1", False, None)
    (own,) = tune(chain_curve(ms, spread=0.1), [rates], [1], 64)
    (shared,) = tune(chain_curve(ms, drift=0.1), [rates], [1], 64)
    assert own.tied and not shared.tied
    assert shared.ratio == pytest.approx((1.6, 1.6)) and shared.best.low < 0.95 * shared.best.goodput


@pytest.mark.parametrize("steps, spread, drift", [(300, 0.03, 0.0), (150, 0.0, 0.05), (2000, 0.05, 0.02)])
def test_intervals_cover_the_truth(steps: int, spread: float, drift: float) -> None:
    """400 simulated studies: steps drawn from true rates, medians of 5 noisy repeats of true times, repeats that drift.
    A 90 % interval has to hold the true tokens/s and the true speed-up in about 90 % of them."""
    rng = np.random.default_rng(0)
    survival, true_ms = np.array([0.8, 0.55, 0.4]), np.array([10.0, 10.5, 11.5, 12.0])
    truth = 1e3 * (1 + survival.sum()) / true_ms[3]
    rate_hits = ratio_hits = 0
    studies = 400
    for i in range(studies):
        accepted = (rng.random((steps, 1)) < survival).sum(1)
        seen = [float((accepted >= j).mean()) for j in (1, 2, 3)]
        shared = 1 + drift * rng.standard_normal(5)
        times = true_ms[:, None] * shared * (1 + spread * rng.standard_normal((4, 5)))
        relative = np.log(times / np.median(times, axis=1, keepdims=True))
        common = np.median(relative, axis=0)
        spreads = (relative - common).std(axis=1, ddof=1)
        points = [point(1, t + 1, t, float(np.median(times[t])), spread=float(spreads[t])) for t in range(4)]
        c = curve(points, drift=float(common.std(ddof=1)))
        (choice,) = tune(c, [checked_suite("x", seen, steps)], [1], 64, use_trees=False, seed=i)
        k3 = next(s for s in choice.scored if s.shape.name == "k=3")
        rate_hits += k3.low <= truth <= k3.high
        if choice.best.shape.name == "k=3":
            ratio_hits += choice.ratio[0] <= truth / (1e3 / true_ms[0]) <= choice.ratio[1]
        else:
            ratio_hits += 0.9
    assert rate_hits / studies > 0.86 and ratio_hits / studies > 0.85
    assert rate_hits / studies < 0.99
