"""Curves: what was measured is read back, what lies between follows the stated rule, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_runtime.cost.facts import load_architecture, load_hardware
from dspark_runtime.cost.step import Load, Parallelism, cost_curve
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import differs, load_curve
from dspark_runtime.tuning.predicted import predicted_curve
from tests.dspark_runtime.tuning.curves import chain_curve, curve, point

TIMES = st.lists(st.floats(0.5, 50), min_size=2, max_size=10)


@given(TIMES, st.sampled_from(["step", "linear"]))
def test_a_jagged_curve_stays_jagged(times: list[float], between: str) -> None:
    sizes = [1 + 3 * i for i in range(len(times))]
    c = chain_curve(dict(zip(sizes, times)), between=between)
    for t, ms in zip(sizes, times):
        assert sum(c.cost(1, t, t - 1, 64)) == ms
    for t in range(1, sizes[-1]):
        below, above = (t - 1) // 3, -(-(t - 1) // 3)
        share = (t - 1) % 3 / 3
        want = times[above] if between == "step" else (1 - share) * times[below] + share * times[min(above, below + 1)]
        assert sum(c.cost(1, t, t - 1, 64)) == pytest.approx(want)


def test_requests_follow_the_rule_and_contexts_lie_on_lines() -> None:
    points = [point(b, t, t - 1, 10.0 * b + t + c / 64, context=c) for b in (1, 4) for t in (1, 2) for c in (64, 192)]
    assert sum(curve(points, "step").cost(2, 2, 1, 64)) == 43.0
    assert sum(curve(points, "linear").cost(2, 2, 1, 64)) == pytest.approx(23.0)
    assert sum(curve(points, "step").cost(4, 1, 0, 128)) == pytest.approx(43.0)


def test_a_tree_costs_its_verify_pass_and_a_chain_as_deep_plus_growing() -> None:
    points = [point(1, k + 1, k, 10.0 + k, draft=2.0 * k) for k in range(6)]
    points += [point(1, 16, 5, 20.0, draft=13.0), point(1, 32, 5, 40.0, draft=16.0)]
    c = curve(points)
    assert c.cost(1, 16, 5, 64) == (13.0, 20.0)
    assert c.cost(1, 16, 3, 64) == (pytest.approx(9.0), 20.0)  # 6 for the chain, 3 for growing
    assert c.cost(1, 24, 5, 64) == (pytest.approx(14.5), pytest.approx(30.0))
    assert c.cost(1, 8, 5, 64) == (13.0, 20.0)  # below the smallest measured tree: its cost
    assert (c.longest_chain(1, 64), c.largest_tree(1, 64)) == (5, 32)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((1, 9, 8, 64), "num_speculative_tokens: found 8, allowed: 0 to 2"),
        ((2, 2, 1, 64), "num_requests: found 2, allowed: 1 to 1"),
        ((1, 2, 1, 65), "context: found 65, allowed: 64 to 64"),
        ((1, 8, 2, 64), "tree: the curve has no trees"),
    ],
)
def test_nothing_is_extrapolated(asked: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain_curve({1: 10.0, 3: 12.0}).cost(*asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("kind"), "not a step-cost curve"),
        (lambda v: v.update(schema_version=2), "schema_version: found 2, allowed: 1"),
        (lambda v: v.update(speed=1), "speed: unknown field"),
        (lambda v: v.update(points=[]), "points"),
        (lambda v: v["points"].pop(0), "no plain step"),
        (lambda v: v["points"].append(v["points"][0]), "found two of"),
        (lambda v: v["points"][1].update(verify_ms=-1.0), "points.1.verify_ms"),
        (lambda v: v["points"][1].update(depth=7), "depth: found 7, allowed: below num_tokens"),
        (lambda v: v["points"][1].update(other_ms=-99.0), "a step of positive length"),
        (lambda v: v.update(between="smooth"), "between"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, change, message: str) -> None:
    values = json.loads(chain_curve({1: 10.0, 3: 12.0}).model_dump_json())
    change(values)
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as raised:
        load_curve(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_curve_survives_its_file(tmp_path: Path) -> None:
    c = chain_curve({1: 10.123456789, 3: 12.0}, drift=0.02)
    (tmp_path / "c.json").write_text(c.model_dump_json(indent=1))
    assert load_curve(tmp_path / "c.json") == c
    for name, text in (("missing.json", None), ("broken.json", "{")):
        if text:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            load_curve(tmp_path / name)


def test_machines_are_told_apart_by_what_they_have() -> None:
    c = chain_curve({1: 10.0})
    assert differs(c, {"cpu": "c", "cores": 2, "gpu": None}) is None
    assert differs(c, {"cpu": "c", "cores": 8, "gpu": None}) == "cores 2, here 8"
    assert differs(c, {"cpu": "c", "cores": 2, "gpu": "H200"}) == "gpu none, here H200"


def test_a_predicted_curve_is_the_performance_models() -> None:
    tokens = [1, 2, 4, 8]
    c = predicted_curve("qwen3-8b", "ngram", "h200", Parallelism(), [1, 8], [1024], [16], [0, 1, 3, 7], "test")
    model, machine = load_architecture("qwen3-8b"), load_hardware("h200")
    for t, ms in cost_curve(model, machine, Parallelism(), Load(8, 1, 1024), tokens):
        assert c.cost(8, t, t - 1, 1024) == (0.0, pytest.approx(ms))
    assert c.source == "model" and "nothing measured" in c.label and differs(c, {}) is None
    drafted = predicted_curve("qwen3-8b", "qwen3-8b-dspark", "h200", Parallelism(), [1], [1024], [16], None, "test")
    assert drafted.cost(1, 1, 0, 1024)[0] == 0 < drafted.cost(1, 8, 7, 1024)[0]
    assert drafted.longest_chain(1, 1024) == 7 and drafted.cost(1, 16, 7, 1024)[0] == drafted.cost(1, 8, 7, 1024)[0]
    with pytest.raises(ConfigError, match="num_speculative_tokens: found 9, allowed: at most 7"):
        predicted_curve("qwen3-8b", "qwen3-8b-dspark", "h200", Parallelism(), [1], [1024], [], [9], "test")
