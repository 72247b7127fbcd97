"""Acceptance: the readers, what they refuse, and how wide the doubt is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from drafters.topology import TreeSpec
from drafters.tree_search import survival as tree_survival
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import (
    Suite,
    checked_suite,
    draws,
    enough,
    pooled,
    profiles,
    rank_shares,
    read_acceptance,
    typed,
)


def test_typed_rates_are_conditional_and_survival_is_not() -> None:
    assert typed("0.8,0.5", True, None).survival == pytest.approx((0.8, 0.4))
    assert typed("0.8,0.5", False, 300) == Suite("typed", (0.8, 0.5), 300)
    assert typed("0.8,0.5", False, None).acceptance_length == pytest.approx(2.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: typed("0.8,x", True, None), "rates: found '0.8,x', allowed: numbers"),
        (lambda: typed("0.8,1.2", True, None), "rates: found 1.2, allowed: 0 to 1"),
        (lambda: typed("0.5,0.8", False, None), r"survival\[1\]: found 0.8 after 0.5, allowed: never more"),
        (lambda: typed("-0.1", False, None), r"survival\[0\]: found -0.1"),
        (lambda: typed("nan", False, None), "survival: found"),
        (lambda: typed("0.5", False, 0), "num_steps: found 0"),
        (
            lambda: enough([typed("0.5", False, 99)], "steps"),
            "steps: found 99 steps in all, allowed: 100 or more .too few",
        ),
        (lambda: checked_suite("x", []), "survival: found 0 positions"),
        (lambda: checked_suite("x", [0.5] * 64), "survival: found 64 positions"),
        (lambda: checked_suite("x", "0.5"), "survival: found '0.5'"),
        (
            lambda: checked_suite("x", [0.9, 0.8], acceptance_length=3.2),
            "acceptance_length: found 3.2, allowed: at most 3",
        ),
        (lambda: checked_suite("x", [0.9, 0.8], acceptance_length=2.0), "allowed: 1 . the sum of survival, 2.700"),
        (lambda: checked_suite("x", [0.5], profile=[0.8, 0.4]), "profile: found"),
    ],
)
def test_what_cannot_be_right_is_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def write(path: Path, values: object) -> Path:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_files_of_suites(tmp_path: Path) -> None:
    rows = [
        {"name": "math", "survival": [0.9, 0.8], "num_steps": 500, "profile": [0.9, 0.05]},
        {"name": "chat", "survival": [0.5, 0.2, 0.1], "num_steps": 1500, "acceptance_length": 1.8},
    ]
    suites = read_acceptance(write(tmp_path / "a.json", {"suites": rows}))
    assert [s.name for s in suites] == ["math", "chat"] and suites[0].profile == (0.9, 0.05)
    joint = pooled(suites)
    assert joint.survival == pytest.approx((0.6, 0.35)) and joint.num_steps == 2000 and joint.profile is None
    for broken, message in (
        ({"suites": []}, "suites: missing"),
        ({"suites": [{"name": "x"}]}, r"suites\[0\]: survival: missing"),
        ({"suites": [3]}, r"suites\[0\]: found 3"),
        ("{", "not JSON"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_acceptance(write(tmp_path / "b.json", broken))


def test_an_evaluations_chains_at_one_temperature(tmp_path: Path) -> None:
    def row(suite: str, temperature: float, shape: str, rates: list[float | None]) -> dict[str, object]:
        return dict(
            suite=suite, temperature=temperature, shape=shape, steps=400, target="t", drafter="d",
            spec_decode_conditional_acceptance_rates=rates,
        )  # fmt: skip

    rows = [
        row("math", 0.0, "chain", [0.8, 0.5, None]),
        row("math", 0.0, "tree-16", [0.9, 0.9]),
        row("math", 1.0, "chain", [0.6, 0.5]),
        row("chat", 0.0, "chain", [0.5, 0.5]),
    ]
    path = write(tmp_path / "e.json", {"results": rows})
    first = read_acceptance(path)
    assert [s.name for s in first] == ["math", "chat"] and first[0].survival == pytest.approx((0.8, 0.4, 0.0))
    assert first[0].pair == ("t", "d") and first[0].num_steps == 400
    assert read_acceptance(path, 1.0)[0].survival == pytest.approx((0.6, 0.3))
    with pytest.raises(ConfigError, match="temperature: found 0.5, allowed: 0, 1"):
        read_acceptance(path, 0.5)
    with pytest.raises(ConfigError, match="found no chains"):
        read_acceptance(write(tmp_path / "t.json", {"results": rows[1:2]}))


def test_traces(tmp_path: Path) -> None:
    lines = [
        {"accepted": 2, "confidence": [0.9, 0.8], "request": 0},
        {"accepted": 0, "confidence": [0.3], "request": 1},
        {"accepted": 0, "confidence": [], "request": 1, "suite": "other"},
        {"accepted": 1, "confidence": [0.9, 0.1], "suite": "other"},
    ]
    main, other = read_acceptance(write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines))))
    assert (main.name, other.name) == ("t", "other")
    assert main.survival == (0.5, 0.5) and other.survival == (0.5, 0.0)
    assert np.isnan(main.confidence[1, 1]) and main.requests.tolist() == [0, 1]
    for line, message in (
        ("{", "t.jsonl:1: not JSON"),
        ('{"accepted": 1}', "accepted, confidence: missing"),
        ('{"accepted": 2, "confidence": [0.5]}', "accepted: found 2, allowed: 0 to 1"),
        ('{"accepted": 0, "confidence": [1.5]}', "confidence: found"),
        ('{"accepted": 0, "confidence": [0.5], "request": "a"}', "request: found 'a'"),
        ('{"accepted": 0, "confidence": []}', "found no drafts"),
        ("", "found no steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_acceptance(write(tmp_path / "t.jsonl", line))


def test_draws_are_the_posterior_of_each_position() -> None:
    s = typed("0.8,0.5,0.1", False, 200)
    drawn = draws([s], 40_000, np.random.default_rng(0))
    assert (np.diff(drawn, axis=1) <= 0).all()
    for column, p in zip(drawn.T, s.survival):
        want = stats.beta(200 * p + 0.5, 200 * (1 - p) + 0.5).interval(0.9)
        assert np.percentile(column, (5, 95)) == pytest.approx(want, abs=0.01)
    exact = draws([typed("0.8,0.5", False, None)], 3, np.random.default_rng(0))
    assert (exact == [0.8, 0.5]).all()


def test_steps_of_one_request_count_for_less_than_as_many_of_many() -> None:
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random(40) < 0.5, 50)  # 40 requests, each all right or all wrong
    accepted, requests = easy.astype(int), np.repeat(np.arange(40), 50)
    together = checked_suite("x", [float(easy.mean())], 2000, accepted=accepted, requests=requests)
    alone = checked_suite("x", [float(easy.mean())], 2000, accepted=accepted, requests=np.arange(2000))
    wide, narrow = (draws([s], 4000, np.random.default_rng(1)).std() for s in (together, alone))
    assert narrow == pytest.approx(0.5 / np.sqrt(2000), rel=0.1) and wide == pytest.approx(0.5 / np.sqrt(40), rel=0.1)


def test_a_chain_under_the_profile_has_the_measured_survival() -> None:
    survival = (0.8, 0.6, 0.3, 0.0)
    ranks = profiles(survival, rank_shares(None))
    assert tree_survival(TreeSpec.chain(4), ranks) == pytest.approx(survival)
    assert sum(ranks[0][1:]) == pytest.approx(0.75 * 0.2) and len(ranks[0]) == 16
    assert rank_shares([0.8, 0.1, 0.05]) == pytest.approx([0.5, 0.25])
