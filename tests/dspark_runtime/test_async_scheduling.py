"""Steps that are launched before the one before them is read: outputs and records are those of one step after another."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.request import RequestOutput
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.synthetic import SyntheticLaw
from tests.dspark_runtime.test_engine import TREE, V, all_free, bushy, engine, greedy, logits, right_for


def broken_at(token: int):
    """The fixture's model, whose logits are NaN after one token."""
    return lambda prefix: [float("nan")] * V if prefix[-1] == token else logits(prefix)


def make(seed: int, asynchronous: bool) -> tuple[Engine, list[int]]:
    """An engine of random shape, and a list that grows by one with each step that is launched ahead."""
    rng = random.Random(seed)
    depth = rng.choice([1, 3, 4])
    kind = rng.choice(["plain", "chain", "chain", "tree"])
    drafts, spec = {
        "plain": (None, TreeSpec.chain(0)),
        "chain": (right_for(rng.randint(0, depth)), TreeSpec.chain(depth)),
        "tree": (bushy, TREE),
    }[kind]
    law = None
    if kind != "plain" and rng.random() < 0.3:
        law = SyntheticLaw.make(spec.depth, acceptance_length=rng.uniform(1, spec.depth))
    script = broken_at(rng.randrange(V)) if rng.random() < 0.2 else logits
    e = engine(
        ScriptedModel(V, script, max_model_len=rng.choice([40, 256])), drafts, spec=spec, synthetic=law,
        max_num_requests=rng.randint(1, 5), page_size=rng.choice([1, 4, 16]), max_prefill_tokens=rng.choice([7, 64]),
        num_pages=None, async_scheduling=asynchronous,
    )  # fmt: skip
    if rng.random() < 0.3:  # so few that requests have to be preempted
        e.pool.take(e.pool.num_free - e.pool.pages_for(40 + spec.num_nodes) - rng.randint(0, 9))
    ahead, launch = [], e._launch

    def counted(spec: TreeSpec, ahead_of_reading: bool = False):
        ahead.extend([1] * ahead_of_reading)
        return launch(spec, ahead_of_reading)

    e._launch = counted
    return e, ahead


def params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.95 else 1.0,
        max_tokens=rng.choice([1, 2, rng.randint(3, 15), rng.randint(10, 30)]),
        stop_token_ids=rng.sample(range(V), rng.choice([0, 0, 1, 6])),
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None] * 20 + [1]),
        seed=rng.randrange(1000),
    )


def drive(seed: int, asynchronous: bool, arrivals: bool) -> tuple[list[list[RequestOutput]], Engine, int]:
    """The outputs of every step. Some requests are aborted once they have so many tokens; with arrivals, some enter
    after the first has so many."""
    e, ahead = make(seed, asynchronous)
    rng = random.Random(seed + 1)
    requests = [([rng.randrange(V) for _ in range(rng.randint(1, 9))], params(rng)) for _ in range(rng.randint(1, 9))]
    cut = {i: rng.randint(1, 9) for i in range(len(requests)) if rng.random() < 0.25}
    late = requests[rng.randint(1, len(requests)) :] if arrivals else []
    for request in requests[: len(requests) - len(late)]:
        e.submit(*request)
    steps: list[list[RequestOutput]] = []
    while e.has_work or late:
        if late and (not e.has_work or len(steps) % 3 == 2):
            e.submit(*late.pop(0))
        steps.append(e.step())
        for out in steps[-1]:
            if out.request_id in cut and len(out.token_ids) >= cut[out.request_id]:
                e.abort(out.request_id)
    return steps, e, len(ahead)


def records(e: Engine) -> list[dict[str, object]]:
    return [asdict(r) | {"ms": None} for r in e.records]


def test_every_step_gives_what_it_gives_one_after_another() -> None:
    total = 0
    for seed in range(100):
        want, plain, none = drive(seed, False, arrivals=False)
        found, e, ahead = drive(seed, True, arrivals=False)
        assert found == want and records(e) == records(plain), seed
        assert e.num_preemptions == plain.num_preemptions and not none
        assert e.pool.num_free == plain.pool.num_free
        total += ahead
    assert total > 250  # the test is about something


def test_late_requests_get_what_they_get_one_after_another() -> None:
    """They may enter a step later, so that the batches differ, but nothing of any request does."""
    total = 0
    for seed in range(400, 500):
        runs = [drive(seed, asynchronous, arrivals=True) for asynchronous in (False, True)]
        finals, parts = [], []
        for steps, e, ahead in runs:
            finals.append({out.request_id: out for step in steps for out in step})
            parts.append({})
            for r in e.records:
                for at, request in enumerate(r.request_ids):
                    parts[-1].setdefault(request, []).append((r.drafted[at], r.accepted[at], r.emitted[at]))
            total += ahead
        assert finals[0] == finals[1] and parts[0] == parts[1], seed
    assert total > 200


def test_a_step_that_nobody_is_left_for_leaves_no_trace() -> None:
    e = engine(drafts=right_for(2), k=3, async_scheduling=True)
    stop = 26  # the fifth token of the stream from 7
    for _ in range(3):
        out = e.generate([[7]], greedy(30, stop_token_ids=(stop,)))[0]
        assert out.token_ids[-1] == stop and out.finish_reason == "stop" and out.num_steps == 2
        assert all_free(e) and e._ahead is None
    assert [r.emitted for r in e.records] == [[3], [2]] * 3


def test_times_of_steps_under_way_together_add_up() -> None:
    import time

    e = engine(drafts=right_for(2), k=3, async_scheduling=True)
    e.submit([7], greedy(40))
    start = time.perf_counter()
    while e.has_work:
        e.step()
    seconds = time.perf_counter() - start
    assert sum(r.ms["total"] for r in e.records) <= 1e3 * seconds


def test_what_is_read_after_every_step_is_read_before_the_next() -> None:
    """Stop strings end a request by its text, and log-probabilities lie where the next step would write them."""
    for options in (dict(logprobs=1), dict(stop=("x",))):
        e = engine(drafts=right_for(2), k=3, async_scheduling=True, detokenize=lambda tokens: "")
        launch, seen = e._launch, []
        e._launch = lambda spec, ahead=False: seen.append(ahead) or launch(spec, ahead)
        e.generate([[7]], greedy(12, **options))
        assert seen and not any(seen)


def test_one_step_has_no_tree_of_its_own_where_it_may_have_begun() -> None:
    e = engine(drafts=right_for(2), k=3, async_scheduling=True)
    e.submit([7], greedy(12))
    with pytest.raises(ConfigError, match="spec: found a tree for one step with async_scheduling, allowed: without"):
        e.step(TreeSpec.chain(1))
