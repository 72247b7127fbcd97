"""A static confidence threshold on traces whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_runtime.tuning.acceptance import Suite, checked_suite, typed
from dspark_runtime.tuning.confidence import best_policy
from tests.dspark_runtime.tuning.curves import chain_curve, curve, point

DRAFTS = 5
STEEP = chain_curve({t: 4.0 + 3.0 * t for t in range(1, DRAFTS + 2)})


def trace(knows: bool, steps: int = 4000, seed: int = 0) -> Suite:
    """Half of the steps are easy (0.95 a draft), half hard (0.1); the confidence says which, or only the mean."""
    rng = np.random.default_rng(seed)
    p = np.where(rng.random((steps, 1)) < 0.5, 0.95, 0.1).repeat(DRAFTS, 1)
    accepted = (rng.random(p.shape) < p).cumprod(1).sum(1)
    confidence = p if knows else np.full_like(p, 0.525)
    survival = [float((accepted >= i).mean()) for i in range(1, DRAFTS + 1)]
    return checked_suite("x", survival, steps, accepted=accepted, requests=np.arange(steps), confidence=confidence)


def test_confidence_that_knows_pays_where_verifying_costs() -> None:
    found = best_policy(STEEP, [trace(knows=True)], fixed=1, num_requests=1, context=64)
    assert found.pays and found.k == DRAFTS and 0.1 < found.threshold < 0.95 and found.gain[0] > 1.1
    # By hand: easy steps verify all drafts, hard ones none.
    easy, tokens = 1 + sum(0.95**i for i in range(1, DRAFTS + 1)), 1 + DRAFTS
    want = 1e3 * (easy + 1) / (4 + 3 * tokens + 4 + 3)
    assert found.goodput == pytest.approx(want, rel=0.03)


def test_confidence_that_knows_nothing_does_not_pay() -> None:
    assert not best_policy(STEEP, [trace(knows=False)], fixed=1, num_requests=1, context=64).pays


def test_where_verifying_is_free_everything_is_verified() -> None:
    flat = chain_curve({t: 10.0 for t in range(1, DRAFTS + 2)})
    found = best_policy(flat, [trace(knows=True)], fixed=DRAFTS, num_requests=1, context=64)
    assert not found.pays and found.gain[0] < 1.01


def test_steps_of_many_requests_share_a_pass() -> None:
    """The mean of 64 requests' tokens hardly varies: its cost is that of the mean."""
    many = curve([point(64, t, t - 1, 4.0 + 3.0 * t) for t in range(1, DRAFTS + 2)])
    found = best_policy(many, [trace(knows=True)], fixed=1, num_requests=64, context=64)
    want = 64e3 * found.acceptance_length / (4 + 3 * found.verified_tokens)
    assert found.pays and found.goodput == pytest.approx(want, rel=0.03)


def test_without_a_trace_there_is_nothing_to_say() -> None:
    assert best_policy(STEEP, [typed("0.5", True, 500)], 1, 1, 64) is None
