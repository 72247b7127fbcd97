"""Steps that draft nothing, where drafting would not pay: when, how often it is tried again, that no token changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.scripted import ScriptedDrafter
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.scheduling.outlook import DECAY, PATIENCE, Outlook
from dspark_runtime.scheduling.policies import Budget, EarlyStop, FixedLength, Lagged, Policy, Threshold
from dspark_runtime.scheduling.scheduler import Scheduler
from dspark_runtime.simulation.acceptance import Rates
from dspark_runtime.simulation.simulator import Run, System, simulate
from dspark_runtime.simulation.workload import closed_loop
from dspark_runtime.tuning.curve import Curve
from tests.dspark_runtime.test_engine import TREE, bushy, right_for, target
from tests.dspark_runtime.tuning.curves import curve, point

K, ROWS = 3, 4
SPEC = TreeSpec.chain(K)
SOON = torch.tensor([64] * ROWS)


def costs(draft_ms: float, verify_ms: float = 0.5) -> Curve:
    """A pass takes 10 ms and `verify_ms` for each draft of a request; drafting takes `draft_ms`."""
    return curve(
        [
            point(b, t, depth, 10.0 + verify_ms * (t - 1), draft=draft_ms if depth else 0.0)
            for b in (1, ROWS) for t in range(1, 11) for depth in {t - 1, min(t - 1, 2)}
        ]
    )  # fmt: skip


def outlook(draft_ms: float) -> Outlook:
    return Outlook(StepCosts(costs(draft_ms), SPEC, ROWS, torch.device("cpu")))


def survivals(*alive: float) -> torch.Tensor:
    """[ROWS * (K + 1)], largest first: every request the same."""
    return torch.tensor([1.0, *alive], dtype=torch.float32).repeat_interleave(ROWS)


@given(st.floats(0.1, 30), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=K, max_size=K))
@settings(max_examples=200, deadline=None)
def test_it_drafts_where_some_length_beats_a_plain_step(draft_ms: float, verify_ms: float, rates: list[float]) -> None:
    alive = np.cumprod(np.float32(rates))
    o = Outlook(StepCosts(costs(draft_ms, verify_ms), SPEC, ROWS, torch.device("cpu")))
    assert o.drafts(SOON)  # nothing is known yet
    o.learn(survivals(*alive.tolist()), ROWS)
    expected = np.cumsum([1.0, *alive.astype(float)])
    rate = max(e / (draft_ms + 10 + verify_ms * t) for t, e in enumerate(expected))
    if rate != pytest.approx(1 / 10, rel=1e-6):
        assert o.drafts(SOON) == (rate > 1 / 10)


def test_trials_become_rarer_and_one_that_pays_ends_the_wait() -> None:
    o = outlook(30.0)
    o.learn(survivals(0.5, 0.25, 0.1), ROWS)
    waits, wait = [], 0
    for _ in range(1200):
        if o.drafts(SOON):
            o.learn(survivals(0.5, 0.25, 0.1), ROWS)
            waits.append(wait)
            wait = 0
        else:
            wait += 1
    assert waits == [16, 32, 64, 128, 256, 256, 256] and PATIENCE == (16, 256)
    while not o.drafts(SOON):
        pass
    o.costs = outlook(1.0).costs  # what a smaller load would cost
    o.learn(survivals(1.0, 1.0, 1.0), ROWS)
    assert all(o.drafts(SOON) for _ in range(1000))


def test_what_was_seen_long_ago_counts_for_little() -> None:
    o = outlook(5.0)
    o.learn(survivals(1.0, 1.0, 1.0), ROWS)
    o.learn(survivals(0.0, 0.0, 0.0), ROWS)
    assert o._expected.tolist() == pytest.approx([1 + DECAY * i for i in range(K + 1)])
    o._since = 20
    o.learn(survivals(1.0, 1.0, 1.0), ROWS)
    old = DECAY**21
    assert o._expected.tolist() == pytest.approx([1 + (old * DECAY + 1 - old) * i for i in range(K + 1)])


def test_a_smaller_tree_of_one_step_is_learned_from() -> None:
    o = outlook(0.1)
    o.learn(survivals(0.5, 0.5, 0.5), ROWS)
    o.learn(torch.ones(2 * ROWS), ROWS)
    assert o._expected.tolist() == pytest.approx([1, 1.55, 2.0, 2.45]) and o.drafts(SOON)


@pytest.mark.parametrize(
    "policy,drafts",
    [
        (FixedLength(0), False), (FixedLength({1: 3, 4: 0}), False), (FixedLength(1), True), (Budget(ROWS), False),
        (Budget(ROWS + 1), True), (Threshold({1: (0, 0.0)}), False), (Threshold({1: (2, 0.5)}), True),
        (Threshold(0.9), True),
    ],
)  # fmt: skip
def test_what_verifies_nothing_drafts_nothing(policy: Policy, drafts: bool) -> None:
    policy.start(SPEC, ROWS, torch.device("cpu"))
    assert policy.drafts(SOON) == drafts


# ------------------------------------------------------------------ served


def serve(made: Curve, policy: Policy | None, k: int, acceptance: Rates, requests: int = 24) -> Run:
    loop = closed_loop(ROWS, requests, (64, 64), (400, 400), np.random.default_rng(1))
    return simulate(System(made, k, policy, ROWS), loop, acceptance, seed=2)


def throughput(run: Run) -> float:
    return run.emitted.sum() / run.ended.max()


@pytest.mark.parametrize("policy", [EarlyStop, Lagged])
@pytest.mark.parametrize("confidence", [True, False], ids=["stated", "estimated"])
def test_drafting_that_never_pays_costs_next_to_nothing(policy, confidence: bool) -> None:
    made = costs(draft_ms=20.0)
    rates = Rates([0.5, 0.3, 0.1], has_confidence=confidence)
    plain, always = serve(made, None, 0, rates), serve(made, None, K, rates)
    chosen = serve(made, policy(made), K, rates)
    assert throughput(always) < 0.7 * throughput(plain)
    assert throughput(chosen) > 0.98 * throughput(plain)


@pytest.mark.parametrize("policy", [EarlyStop, Lagged])
@pytest.mark.parametrize("confidence", [True, False], ids=["stated", "estimated"])
def test_drafting_that_always_pays_is_never_left_out(policy, confidence: bool) -> None:
    made = costs(draft_ms=1.0)
    rates = Rates([0.9, 0.8, 0.7], between_requests=0.2, between_drafts=0.2, has_confidence=confidence)
    run, always = serve(made, policy(made), K, rates), serve(made, None, K, rates)
    assert run.step_ms.min() >= 11 and throughput(run) > 0.995 * throughput(always)


class Turning(Rates):
    """Requests after the first so many are of another kind."""

    def __init__(self, first: Rates, then: Rates, at: int) -> None:
        self.kinds, self.at = (first, then), at
        self.depth, self.has_confidence, self.label = first.depth, first.has_confidence, "turning"

    def start(self, num_requests, rng) -> None:
        for kind in self.kinds:
            kind.start(num_requests, rng)

    def draw(self, requests, steps, k):
        return self.kinds[int(requests.max() >= self.at)].draw(requests, steps, k)


@pytest.mark.parametrize("policy", [EarlyStop, Lagged])
def test_a_text_that_begins_to_pay_is_found(policy) -> None:
    made = costs(draft_ms=5.0)
    bad, good = Rates([0.2, 0.05, 0.01], 0.1, 0.1), Rates([0.95, 0.9, 0.85], 0.1, 0.1)
    run = serve(made, policy(made), K, Turning(bad, good, 12), requests=60)
    half = len(run.step_ms) // 2
    assert (run.step_ms[: half // 2] > 10).mean() < 0.1  # what drafts is dearer than a plain step
    assert (run.step_ms[half:] > 10).mean() > 0.9


# ------------------------------------------------------------------ the engine


@pytest.mark.parametrize("spec,drafts", [(TreeSpec.chain(5), right_for(2)), (TREE, bushy)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", [EarlyStop, Lagged])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_plain_decoding_s_with_steps_left_out(policy, spec, drafts, temperature: float) -> None:
    """Drafts that are not drawn emit what plain sampling draws at the same places: sampled tokens are equal too."""
    prompts = [[i + 1] * (3 + i) for i in range(ROWS)]
    params = [SamplingParams(temperature=temperature, seed=7 + i, max_tokens=60) for i in range(ROWS)]
    want = [o.token_ids for o in Engine(target()).generate(prompts, params)]
    drafter, widths = ScriptedDrafter(drafts), []
    propose = drafter.propose
    drafter.propose = lambda state, spec, sample: widths.append(spec.num_nodes) or propose(state, spec, sample)
    e = Engine(
        target(), drafter, spec=spec, page_size=4, num_pages=90, max_num_requests=ROWS,
        scheduler=Scheduler(policy(costs(draft_ms=100.0))),
    )  # fmt: skip
    assert [o.token_ids for o in e.generate(prompts, params)] == want
    assert set(widths) == {1, spec.num_nodes} and widths.count(1) > 4 * widths.count(spec.num_nodes)
