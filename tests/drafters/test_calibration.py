"""Scores of a confidence, and its temperatures, against sums over all samples in plain Python floats."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.dspark.calibration import FILE, Calibration, auc, ece, fit, prefixes, read, survival

FLOATS = st.floats(0, 1) | st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0, math.nan])
SAMPLES = st.lists(st.tuples(FLOATS, st.booleans()), min_size=1, max_size=60)


def ece_by_enumeration(samples: list[tuple[float, bool]]) -> float | None:
    seen = [(p, y) for p, y in samples if not math.isnan(p)]
    total = 0.0
    for b in range(20):
        inside = [(p, y) for p, y in seen if b <= p * 20 < b + 1 or (b == 19 and p == 1)]
        if inside:
            predicted = math.fsum(p for p, _ in inside) / len(inside)
            happened = sum(y for _, y in inside) / len(inside)
            total += len(inside) / len(seen) * abs(predicted - happened)
    return total if seen else None


def auc_by_enumeration(samples: list[tuple[float, bool]]) -> float | None:
    yes = [p for p, y in samples if y and not math.isnan(p)]
    no = [p for p, y in samples if not y and not math.isnan(p)]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in yes for b in no]
    return math.fsum(wins) / len(wins) if wins else None


@given(SAMPLES)
@settings(max_examples=300, deadline=None)
def test_ece_and_auc_equal_the_sums_over_all_samples(samples: list[tuple[float, bool]]) -> None:
    p, y = np.array([s[0] for s in samples]), np.array([s[1] for s in samples])
    for score, want in ((ece, ece_by_enumeration(samples)), (auc, auc_by_enumeration(samples))):
        got = score(p, y)
        assert (got is None) == (want is None) and (got is None or got == pytest.approx(want, abs=1e-12))
        if len(samples) % 2 == 0:  # any shape
            assert score(p.reshape(2, -1), y.reshape(2, -1)) == got


@given(
    st.lists(st.lists(st.floats(-800, 800) | st.just(math.nan), min_size=3, max_size=3), min_size=1, max_size=9),
    st.lists(st.floats(0.125, 8), min_size=3, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_survival_is_the_product_of_scaled_sigmoids_and_keeps_each_slots_order(
    logits: list[list[float]], temperatures: list[float]
) -> None:
    got = survival(np.array(logits), temperatures)
    for row, line in zip(got, logits):
        product = 1.0
        for k, (z, t) in enumerate(zip(line, temperatures)):
            x = z / t
            # exp of a positive number may overflow a float, so each sign has its own form.
            product *= 1 / (1 + math.exp(-x)) if x >= 0 or math.isnan(x) else math.exp(x) / (1 + math.exp(x))
            assert row[k] == pytest.approx(product, rel=1e-12, abs=1e-300, nan_ok=True)
    for k, t in enumerate(temperatures):
        slot = np.array([line[k] for line in logits if not math.isnan(line[k])])
        assert (np.diff(survival(np.sort(slot)[:, None], t)[:, 0]) >= 0).all()


def roll_outs(temperatures: list[float], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a head that is right once scaled, and how many drafts were accepted."""
    random = np.random.default_rng(seed)
    z = random.normal(1.5, 2, (count, len(temperatures)))
    c = 1 / (1 + np.exp(-z / temperatures))
    return z, (random.random(c.shape) < c).cumprod(1).sum(1)


def test_fit_finds_the_temperatures_and_lowers_the_error_on_other_samples() -> None:
    true = [1.6, 2.2, 0.7, 1.0]
    found = fit(*roll_outs(true, 40_000))
    assert found == pytest.approx(true, rel=0.12)
    z, accepted = roll_outs(true, 40_000, seed=1)
    happened = prefixes(accepted, 4)
    before, after = ece(survival(z), happened), ece(survival(z, found), happened)
    assert before > 0.05 and after < 0.01
    for k in range(4):
        assert ece(survival(z, found)[:, k], happened[:, k]) < 0.02
    assert auc(survival(z[:, :1], found[:1]), happened[:, :1]) == auc(survival(z[:, :1]), happened[:, :1])


def test_each_temperature_is_the_best_of_the_grid_given_those_before_it() -> None:
    z, accepted = roll_outs([2.0, 0.5, 1.3], 300)
    found = fit(z, accepted)
    happened = prefixes(accepted, 3)
    for k in range(3):
        reached = ece(survival(z[:, : k + 1], found[: k + 1])[:, k], happened[:, k])
        for i in range(-96, 97):
            other = survival(z[:, : k + 1], [*found[:k], 2.0 ** (i / 32)])[:, k]
            assert ece(other, happened[:, k]) >= reached - 1e-12


def test_what_was_never_judged_changes_nothing() -> None:
    z, accepted = roll_outs([2.0, 2.0, 2.0], 500)
    more = np.full((40, 3), np.nan)
    more[:20, 0] = z[:20, 0]
    both = fit(np.concatenate((z, more)), np.concatenate((accepted, np.minimum(accepted[:40], 1))))
    first = np.concatenate((z[:, :1], more[:20, :1])), np.concatenate((accepted, np.minimum(accepted[:20], 1)))
    assert both[0] == fit(*first)[0]
    assert fit(np.full((5, 2), np.nan), np.zeros(5, int)) == [1.0, 1.0]


GOOD = {"temperatures": [1.5, 1.0], "dataset": "a", "num_samples": 3, "ece_before": 0.1, "ece_after": 0.05}


def test_the_file_round_trips_and_may_be_absent(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / FILE).write_text(Calibration(**GOOD).model_dump_json())
    assert json.loads((tmp_path / FILE).read_text()) == GOOD
    assert read(tmp_path) == Calibration(**GOOD)


@pytest.mark.parametrize(
    "text,words",
    [
        ("{", "calibration.json: Invalid JSON"),
        ("[]", "calibration.json: "),
        ("\x00", "calibration.json: Invalid JSON"),
        (json.dumps(GOOD | {"temperatures": [1.0, 0.0]}), "calibration.json: temperatures.1: found 0"),
        (json.dumps(GOOD | {"temperatures": ["warm"]}), "calibration.json: temperatures.0: found 'warm'"),
        (json.dumps(GOOD | {"temperatures": [math.inf]}), "calibration.json: temperatures.0: found inf"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "dataset"}), "calibration.json: dataset: missing"),
        (json.dumps(GOOD | {"num_samples": 0}), "calibration.json: num_samples: found 0"),
        (json.dumps(GOOD | {"ece_after": 2}), "calibration.json: ece_after: found 2"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_field(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError) as raised:
        read(tmp_path)
    assert words in str(raised.value) and "\n" not in str(raised.value)
