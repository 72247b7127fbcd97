"""The serving simulator: exact timelines, the engine's own steps, queueing theory, conservation, traces."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.scripted import ScriptedDrafter
from drafters.topology import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.scheduling.policies import Budget, EarlyStop, FixedLength, Lagged, Policy, Threshold
from dspark_runtime.scheduling.scheduler import Scheduler
from dspark_runtime.simulation.acceptance import Acceptance, Rates, Recorded, offsets
from dspark_runtime.simulation.measures import measures
from dspark_runtime.simulation.simulator import Run, System, simulate
from dspark_runtime.simulation.workload import Workload, closed_loop, poisson, read_trace
from dspark_runtime.tuning.acceptance import Suite, read_acceptance
from dspark_runtime.tuning.curve import Curve
from tests.drafters.scripted_cases import PROMPT, V, logits, right_for
from tests.dspark_runtime.tuning.curves import curve, point

K = 4
ROWS = 6


def cost(b: int, tokens: int, context: int) -> float:
    """Milliseconds of a verify pass of b requests with so many tokens each; drafting adds 0.5 per draft."""
    return 8.0 + 0.4 * b * tokens + b * context / 64


COSTS = curve(
    [
        point(b, t, t - 1, cost(b, t, c), draft=0.5 * (t - 1), context=c)
        for b in (1, 2, ROWS) for t in range(1, K + 2) for c in (8, 72)
    ]
)  # fmt: skip
POLICIES = {
    "all": None, "fixed": FixedLength(2), "threshold": Threshold(0.3), "budget": Budget(12),
    "early-stop": EarlyStop(COSTS), "async": Lagged(COSTS),
}  # fmt: skip


def of(arrival: list[float], prompt: list[int], output: list[int], **fields: list[float]) -> Workload:
    n = len(arrival)
    zeros = dict(after=[-1] * n, delay=[0.0] * n, cached=[0] * n) | fields
    rest = {k: np.array(v) for k, v in zeros.items()}
    return Workload("by hand", np.array(arrival, float), prompt=np.array(prompt), output=np.array(output), **rest)


def system(k: int = K, policy: Policy | None = None, rows: int = ROWS, **fields: object) -> System:
    return System(COSTS, k, policy, rows, **fields)


def always(accepted: int, k: int = K, between: float = 0.0) -> Rates:
    """Every step accepts the first so many drafts, and no more."""
    return Rates([1.0] * accepted + [0.0] * (k - accepted), between, between)


# ------------------------------------------------------------------------------------------------ exact timelines


@pytest.mark.parametrize("accepted", range(K + 1))
def test_one_request_alone_costs_what_the_curve_says(accepted: int) -> None:
    """Every step by hand, through the last one, which drafts no more than can still be emitted."""
    output, context = 23, 40
    run = simulate(system(), of([0.0], [context + 1], [output]), always(accepted))
    left, seconds, steps = output, 0.0, 0
    while left:
        drafts = min(K, left - 1)
        seconds += (cost(1, 1 + drafts, context) + 0.5 * K) / 1e3
        emitted = min(accepted, drafts) + 1
        context, left, steps = context + emitted, left - emitted, steps + 1
    assert len(run.step_ms) == steps and run.emitted.sum() == output
    assert run.ended[0] == pytest.approx(seconds, rel=1e-12)
    assert run.step_ms.sum() == pytest.approx(1e3 * seconds, rel=1e-12)
    numbers = measures(run)
    assert numbers.output_throughput == pytest.approx(output / seconds, rel=1e-12)
    assert numbers.output_throughput_per_user[99] == pytest.approx(output / seconds, rel=1e-12)
    assert numbers.spec_decode_acceptance_length == pytest.approx(output / steps)


def test_plain_decoding_of_a_full_loop_costs_what_the_curve_says() -> None:
    """Equal requests go in step: each round is one decode of ROWS requests."""
    rounds, output, context = 3, 5, 30
    w = closed_loop(ROWS, ROWS * rounds, (context + 1, context + 1), (output, output), np.random.default_rng(0))
    run = simulate(system(0), w, always(0))
    want = rounds * sum(cost(ROWS, 1, context + i) for i in range(output))
    assert run.step_ms.sum() == pytest.approx(want, rel=1e-12) and run.requests.tolist() == [ROWS] * rounds * output
    assert (run.admitted == run.ready).all()


def test_arrivals_by_hand() -> None:
    """Two rows, prompts of 8 and 20 tokens at 1 token a millisecond in passes of at most 16, plain decoding.

    0: ready at 0. 1: ready at 5 ms, in the prefill of 0. 2: waits for a row. 3: ready 4 ms after the end of 2.
    """
    fields = dict(after=[-1, -1, -1, 2], delay=[0.0, 0.0, 0.0, 0.004], cached=[0, 0, 0, 100])
    w = of([0.0, 0.005, 0.006, 0.0], [9, 21, 1, 150], [2, 1, 1, 1], **fields)
    run = simulate(system(0, rows=2, prefill_rate=1000.0, max_prefill_tokens=16), w, always(0))
    shortest = cost(1, 1, 8)
    t = max(8, shortest)  # prefill of 0
    a0 = t
    t += 16
    t += max(4, shortest)  # prefill of 1
    c1 = t
    t += cost(2, 1, (8 + 20) / 2)  # one token each: 1 ends
    e1 = t
    t += cost(2, 1, 8)  # 0 and 2, whose mean context of 4.5 counts as the curve's shortest
    e0 = t
    r3 = t + 4
    t = r3 + 3 * 16 + max(1, shortest)  # 49 tokens of 3 are not there yet: three whole passes and one of a token
    c3 = t
    t += cost(1, 1, 72)  # 149 tokens count as the curve's longest context
    assert 1e3 * run.computed == pytest.approx([a0, c1, e1, c3])
    assert 1e3 * run.admitted == pytest.approx([0, a0, e1, r3])
    assert 1e3 * run.ready == pytest.approx([0, 5, 6, r3])
    assert 1e3 * run.first == pytest.approx([e1, e1, e0, t]) and 1e3 * run.ended == pytest.approx([e0, e1, e0, t])
    assert run.requests.tolist() == [2, 2, 1] and run.prefill_ms == pytest.approx(c1 + c3 - r3)


def test_one_server_waits_as_queueing_theory_says() -> None:
    """M/D/1: one row, one token each, always the same service time D. Each wait follows from the one before it; their
    mean is rho D / (2 (1 - rho)), within four standard errors (batch means: 2 to 3 % of it at this length)."""
    service = cost(1, 1, 8) / 1e3
    for rho in (0.3, 0.7):
        w = poisson(rho / service, 40_000, (9, 9), (1, 1), np.random.default_rng(0))
        run = simulate(system(0, rows=1), w, always(0))
        waits = run.admitted - run.ready
        wait, want = 0.0, [0.0]
        for gap in np.diff(w.arrival):
            wait = max(0.0, wait + service - gap)
            want.append(wait)
        assert waits == pytest.approx(want, abs=1e-8)
        assert waits.mean() == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.1)
        assert run.step_ms.sum() / 1e3 / run.step_end[-1] == pytest.approx(rho, rel=0.02)


# ------------------------------------------------------------------------------------------------ the engine's steps


class Sure(ScriptedDrafter):
    """Right for `right` drafts, with the confidences of every step given."""

    def __init__(self, right: int, confidence: list[float] | None) -> None:
        super().__init__(right_for(right), V)
        self.confidence = confidence
        self.temperatures = () if confidence is None else (1.0,)

    def propose(self, state, spec, sample):
        tree = super().propose(state, spec, sample)
        if self.confidence is None:
            return tree
        sure = torch.tensor([1.0, *self.confidence])[: tree.width].expand_as(tree.tokens).contiguous()
        return replace(tree, confidence=sure)


def recorded(accepted: int, confidence: list[float] | None) -> Recorded:
    one = np.array([accepted])
    drafted = None if confidence is None else np.array([confidence])
    survival = tuple(float(accepted >= i) for i in range(1, K + 1))
    return Recorded([Suite("s", survival, 1, accepted=one, drafted=np.array([K]), requests=one, confidence=drafted)])


@pytest.mark.parametrize("confidence", [[0.9, 0.8, 0.5, 0.2], None], ids=["head", "estimated"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("accepted", [0, 2, K])
def test_the_simulator_takes_the_engines_steps(accepted: int, name: str, confidence: list[float] | None) -> None:
    """The same scheduler, the same requests: every step has the same requests in the same rows, the same drafts
    verified and the same tokens emitted, as requests come, go and leave rows to others."""
    prompts, outputs = [3, 30, 1, 17, 5, 9, 40, 2, 2], [7, 3, 12, 1, 30, 5, 9, 2, 16]
    rows = 4
    policy = POLICIES[name]
    scheduler = None if policy is None else Scheduler(policy)
    engine = Engine(
        ScriptedModel(V, logits), Sure(accepted, confidence), spec=TreeSpec.chain(K), max_num_requests=rows,
        max_prefill_tokens=16, scheduler=scheduler,
    )  # fmt: skip
    for prompt, output in zip(prompts, outputs):
        engine.submit(PROMPT * prompt, SamplingParams(max_tokens=output, temperature=0.0))
    while engine.has_work:
        engine.step()

    w = of([0.0] * len(prompts), prompts, outputs)
    options = dict(rows=rows, prefill_rate=1e3, max_prefill_tokens=16)
    run = simulate(system(K, policy, **options), w, recorded(accepted, confidence))
    assert [r.num_requests for r in engine.records] == run.requests.tolist()
    assert [r.verified_tokens for r in engine.records] == run.tokens.tolist()
    assert [sum(r.emitted) for r in engine.records] == run.emitted.tolist()
    finished: dict[int, int] = {}
    for i, record in enumerate(engine.records):
        finished |= {request: i for request in record.request_ids}
    assert [run.step_end[finished[i]] for i in range(len(prompts))] == run.ended.tolist()


# ------------------------------------------------------------------------------------------------ conservation


def check(run: Run, rows: int, k: int) -> None:
    """No request and no token is lost or made up, and times are in order."""
    w = run.workload
    assert run.emitted.sum() == w.output.sum()
    assert (np.diff([run.ready, run.admitted, run.computed, run.first, run.ended], axis=0) >= 0).all()
    assert (run.ready >= w.arrival).all() and (run.step_ms > 0).all() and (np.diff(run.step_end) > 0).all()
    assert (run.requests >= 1).all() and (run.requests <= rows).all()
    assert (run.tokens >= run.requests).all() and (run.tokens <= run.requests * (k + 1)).all()
    assert (run.emitted >= run.requests).all() and (run.emitted <= run.tokens).all()
    assert run.ended.max() == run.step_end[-1]
    order = np.lexsort((np.arange(len(w)), run.ready))
    assert (np.diff(run.admitted[order]) >= 0).all()  # first come, first served
    follows = w.after >= 0
    assert (run.ready[follows] >= run.ended[w.after[follows]] + w.delay[follows]).all()
    # Little's law in its exact form: the requests' time in a row is the rows' time in use.
    if run.prefill_ms == 0:
        assert (run.ended - run.admitted).sum() * 1e3 == pytest.approx((run.step_ms * run.requests).sum())


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 25))
    ints = lambda low, high: draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # noqa: E731
    prompt, output = ints(1, 60), ints(1, 20)
    arrival = [x / 100 for x in ints(0, 100)]
    users = draw(st.integers(1, n))
    cached = [min(c, p - 1) for c, p in zip(ints(0, 60), prompt)]
    after = [i - users if i >= users and draw(st.booleans()) else -1 for i in range(n)]
    return of(arrival, prompt, output, after=after, delay=[x / 100 for x in ints(0, 5)], cached=cached)


@settings(deadline=None, max_examples=120)
@given(
    w=workloads(),
    name=st.sampled_from(list(POLICIES)),
    rows=st.integers(1, ROWS),
    prefill_rate=st.sampled_from([math.inf, 500.0]),
    confidence=st.booleans(),
    seed=st.integers(0, 5),
)
def test_nothing_is_lost(
    w: Workload, name: str, rows: int, prefill_rate: float, confidence: bool, seed: int
) -> None:
    acceptance = Rates([0.8, 0.5, 0.3, 0.1], has_confidence=confidence)
    asked = system(K, POLICIES[name], rows, prefill_rate=prefill_rate, max_prefill_tokens=16)
    run = simulate(asked, w, acceptance, seed)
    check(run, rows, K)
    again = simulate(asked, w, acceptance, seed)
    for a, b in zip(vars(run).values(), vars(again).values()):
        assert a is b or np.array_equal(a, b)
    numbers = measures(run)
    assert 1 <= numbers.spec_decode_acceptance_length <= numbers.verified_tokens <= K + 1


def test_other_seeds_are_other_runs() -> None:
    w = closed_loop(4, 20, (5, 30), (5, 30), np.random.default_rng(0))
    one, two = (simulate(system(), w, Rates([0.8, 0.5, 0.3, 0.1]), seed) for seed in (1, 2))
    assert not np.array_equal(one.ended, two.ended)


def test_the_best_fixed_length_is_never_far_above_the_schedule() -> None:
    """With confidences that know, scheduled decoding emits more per millisecond than any fixed length."""
    w = closed_loop(ROWS, 600, (20, 40), (20, 60), np.random.default_rng(1))
    dear = curve(
        [point(b, t, t - 1, 8 + 1.5 * b * t, context=c) for b in (1, ROWS) for t in range(1, K + 2) for c in (8, 72)]
    )
    acceptance = Rates([0.75, 0.5, 0.3, 0.15], 0.5, 2.0)

    def rate(k: int, policy: Policy | None) -> float:
        return measures(simulate(System(dear, k, policy, ROWS), w, acceptance, 3)).output_throughput

    best = max(rate(k, None) for k in range(K + 1))
    assert rate(K, Lagged(dear)) > 1.03 * best and rate(K, EarlyStop(dear)) > 1.03 * best


# ------------------------------------------------------------------------------------------------ acceptance


@pytest.mark.parametrize("spreads", [(0.0, 0.0), (0.5, 1.5), (2.0, 0.3)])
@pytest.mark.parametrize("survival", [[0.8, 0.5, 0.3, 0.1], [1.0, 0.6, 0.6, 0.0]])
def test_rates_are_accepted_as_stated_and_confidence_is_calibrated(survival: list[float], spreads) -> None:
    model = Rates(survival, *spreads)
    n = 60_000
    model.start(n, np.random.default_rng(0))
    drawn = model.draw(np.arange(n), np.zeros(n, dtype=np.int64), K)
    reached = drawn.accepted[:, None] >= np.arange(1, K + 1)
    assert reached.mean(0) == pytest.approx(survival, abs=4.5 * 0.5 / math.sqrt(n))
    alive = drawn.confidence.cumprod(1)
    assert alive.mean(0) == pytest.approx(survival, abs=0.006)
    for low in np.arange(0, 1, 0.1):  # of drafts that are believed with about this chance, as many survive
        inside = (alive >= low) & (alive < low + 0.1)
        if inside.sum() > 2000:
            assert reached[inside].mean() == pytest.approx(alive[inside].mean(), abs=0.03)
    if not spreads[0] and 0 < survival[-1]:
        assert np.ptp(drawn.confidence, axis=0) == pytest.approx(np.zeros(K), abs=1e-6)


def test_offsets_without_spread_are_the_logits_of_the_conditional_rates() -> None:
    got = offsets([0.8, 0.4, 0.1], 0.0, 0.0)
    want = [math.log(p / (1 - p)) for p in (0.8, 0.5, 0.25)]
    assert got == pytest.approx(want, abs=1e-9)


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_recorded_steps_are_played_in_order(tmp_path: Path) -> None:
    """Every simulated request is one recorded request from some step on; confidence and outcome stay together."""
    steps = [{"accepted": i % 3, "confidence": [0.1 * (i % 10)] * (2 + i % 2), "request": i // 5} for i in range(15)]
    model = Recorded(read_acceptance(write(tmp_path / "t.jsonl", steps)))
    assert model.depth == 3 and model.has_confidence
    model.start(50, np.random.default_rng(0))
    played = []
    for step in range(7):
        drawn = model.draw(np.arange(50), np.full(50, step), 3)
        played.append([
            next(i for i, s in enumerate(steps)
                 if s["accepted"] == a and len(s["confidence"]) == d and abs(s["confidence"][0] - c[0]) < 1e-6
                 and (i // 5 == played[0][r] // 5 if played else True))
            for r, (a, c, d) in enumerate(zip(drawn.accepted, drawn.confidence, drawn.drafted))
        ])  # fmt: skip
    for one in np.array(played).T.tolist():
        assert one == [5 * (one[0] // 5) + (one[0] + i) % 5 for i in range(7)]
    assert len({one for one in played[0]}) > 10
    assert model.draw(np.arange(50), np.zeros(50, dtype=int), 1).drafted.max() == 1


def test_a_request_plays_its_record_step_by_step(tmp_path: Path) -> None:
    record = [3, 0, 1, 3, 2, 0, 0]
    lines = [{"accepted": a, "confidence": [0.5] * 3, "request": 1} for a in record]
    model = Recorded(read_acceptance(write(tmp_path / "t.jsonl", lines)))
    run = simulate(system(3), of([0.0], [5], [60]), model, 4)
    got = (run.emitted - 1).tolist()[:-3]  # the last steps are cut
    assert len(got) > 20 and any(got == [record[(first + i) % 7] for i in range(len(got))] for first in range(7))


def test_traces_without_confidence(tmp_path: Path) -> None:
    lines = [{"accepted": i % 2, "drafted": 1 + i % 3, "request": i // 4} for i in range(40)]
    (suite,) = read_acceptance(write(tmp_path / "t.jsonl", lines))
    assert suite.confidence is None and suite.depth == 3 and suite.drafted.tolist() == [1 + i % 3 for i in range(40)]
    assert not Recorded([suite]).has_confidence
    w = closed_loop(4, 30, (5, 9), (3, 30), np.random.default_rng(0))
    check(simulate(system(3, Lagged(COSTS), 4), w, Recorded([suite])), 4, 3)


# ------------------------------------------------------------------------------------------------ traces, refusals


def test_a_trace_of_sessions(tmp_path: Path) -> None:
    lines = [
        {"arrival": 1, "prompt": 10, "output": 4, "session": "a"},
        {"arrival": 0.5, "prompt": 7, "output": 2, "cached": 6},
        "",
        {"delay": 0.25, "prompt": 20, "output": 3, "session": "a"},
        {"arrival": 9.5, "delay": 1.0, "prompt": 23, "output": 1, "session": "a", "cached": 5},
    ]
    w = read_trace(write(tmp_path / "w.jsonl", lines))
    assert w.arrival.tolist() == [1, 0.5, 0, 9.5] and w.after.tolist() == [-1, -1, 0, 2]
    assert w.delay.tolist() == [0, 0, 0.25, 1] and w.cached.tolist() == [0, 6, 13, 22]
    run = simulate(system(prefill_rate=1e6), w, always(K))
    check(run, ROWS, K)
    assert run.ready[2] == run.ended[0] + 0.25 and run.ready[3] == 9.5
    # 9 + 0 + 6 + 0 prompt tokens in three passes, each at least as long as a plain step
    assert run.prefill_ms == pytest.approx(2 * cost(1, 1, 8))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "found no requests, allowed: 1 or more"),
        (["{"], "w.jsonl:1: not JSON"),
        (["", "3"], "w.jsonl:2: found 3, allowed: an object with arrival, prompt, output"),
        ([{"arrival": 0, "output": 4}], "w.jsonl:1: prompt: missing"),
        ([{"arrival": 0, "prompt": 0, "output": 4}], "w.jsonl:1: prompt: found 0, allowed:"),
        ([{"arrival": 0, "prompt": 2.5, "output": 4}], "w.jsonl:1: prompt: found 2.5, allowed:"),
        ([{"arrival": -1, "prompt": 1, "output": 4}], "w.jsonl:1: arrival: found -1, allowed:"),
        (['{"arrival": NaN, "prompt": 1, "output": 4}'], "w.jsonl:1: arrival: found nan, allowed:"),
        ([{"arrival": 0, "prompt": 1, "output": 4, "tokens": 3}], "w.jsonl:1: tokens: unknown field"),
        ([{"prompt": 1, "output": 4, "session": 1}], "w.jsonl:1: arrival: missing, allowed: seconds, 0 or more"),
        (
            [{"arrival": 0, "delay": 1, "prompt": 1, "output": 4}],
            "w.jsonl:1: delay: found 1, allowed: in the later turns",
        ),
        (
            [{"arrival": 0, "prompt": 5, "output": 4, "cached": 5}],
            "w.jsonl:1: cached: found 5, allowed: below the prompt's 5",
        ),
        (
            [{"arrival": 0, "prompt": 5, "output": 4, "session": 1}, {"prompt": 9, "output": 4, "session": 1}],
            "w.jsonl:2: arrival, delay: missing, allowed: one of them or both",
        ),
        (
            [{"arrival": 0, "prompt": 5, "output": 4, "session": 1},
             {"delay": 0, "prompt": 8, "output": 4, "session": 1}],
            "w.jsonl:2: prompt: found 8, allowed: 9 or more, what session 1 has said",
        ),
    ],
)  # fmt: skip
def test_bad_traces_are_one_line(lines: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(write(tmp_path / "w.jsonl", lines))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"accepted": 1}], "t.jsonl:1: accepted, confidence: missing"),
        ([{"accepted": 2, "drafted": 1}], "t.jsonl:1: accepted: found 2, allowed: 0 to 1, the drafts"),
        ([{"accepted": 0, "drafted": -1}], "t.jsonl:1: drafted: found -1, allowed: 0 to 63"),
        ([{"accepted": 0, "drafted": 2, "confidence": [0.5]}], "t.jsonl:1: drafted: found 2, allowed: 1, one for each"),
        (
            [{"accepted": 0, "drafted": 2}, {"accepted": 0, "confidence": [0.5]}],
            "confidence: found in some steps of suite 't'",
        ),
    ],
)  # fmt: skip
def test_bad_acceptance_traces_are_one_line(lines: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_acceptance(write(tmp_path / "t.jsonl", lines))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    one = of([0.0], [5], [5])
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: found 5, allowed: at most 4"):
        simulate(system(5), one, always(0))
    with pytest.raises(ConfigError, match=r"the curve must reach 1 to 7 requests of 5 tokens"):
        simulate(system(rows=7), one, always(0))
    with pytest.raises(ConfigError, match=r"prefill_rate: found 0, allowed: more than 0"):
        simulate(system(prefill_rate=0.0), one, always(0))
    with pytest.raises(ConfigError, match=r"spread_drafts: found -1, allowed: 0 to 10"):
        Rates([0.5], 0.0, -1.0)
    with pytest.raises(ConfigError, match=r"rate: found 0, allowed: more than 0"):
        poisson(0.0, 5, (1, 1), (1, 1), np.random.default_rng(0))


@settings(deadline=None, max_examples=60)
@given(
    b=st.integers(1, ROWS), extra=st.integers(0, K * ROWS), context=st.floats(1, 200),
    between=st.sampled_from(["linear", "step"]),
)  # fmt: skip
def test_one_cost_is_the_tables(b: int, extra: int, context: float, between: str) -> None:
    """What a step costs is what the policies are told it costs."""
    some: Curve = COSTS.model_copy(update={"between": between})
    costs = StepCosts(some, TreeSpec.chain(K), ROWS, torch.device("cpu"))
    tokens = b + min(extra, b * K)
    whole = int(context)
    told = costs.ms(torch.full((b,), whole))[tokens - b].item()
    assert costs.step_ms(b, tokens, whole) == pytest.approx(told, rel=1e-12)
