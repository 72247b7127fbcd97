"""What a step's drafts are worth and what becomes of them: drawn from rates, or recorded steps played again. No torch.

A model may be used for one simulation at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import Suite

BETWEEN_REQUESTS, BETWEEN_DRAFTS = 0.5, 1.5
"""Standard deviations of a draft's logit. With survivals such as 0.75, 0.55, ... 0.1 a confidence that knows both tells
accepted from rejected drafts with an AUC of 0.83, as a trained head was measured to (drafters fact sheet §5.2)."""
NODES = 40
"""Of the quadrature over either spread."""


@dataclass
class Drawn:
    """A step of R requests with k drafts each. accepted [R] int64: how many are right before the first wrong one.
    confidence [R, k] float32, or None without a head. drafted [R] int64: how many there are, or None for k."""

    accepted: np.ndarray
    confidence: np.ndarray | None
    drafted: np.ndarray | None = None


class Acceptance(Protocol):
    """depth: most drafts. has_confidence: whether drafts come with a (calibrated) confidence. label: one line."""

    depth: int
    has_confidence: bool
    label: str

    def start(self, num_requests: int, rng: np.random.Generator) -> None:
        """Make every request of a simulation what it is."""

    def draw(self, requests: np.ndarray, steps: np.ndarray, k: int) -> Drawn:
        """The next step of the requests [R] int64, which have had `steps` [R] int64 before it."""


class Rates:
    """Drafts whose chance has the logit a_i + between_requests * z + between_drafts * e: z normal for each request, e
    for each draft, and a_i such that the share of steps that accept the first i drafts is survival[i - 1]. A confidence
    is that chance itself."""

    def __init__(
        self,
        survival: Sequence[float],
        between_requests: float = BETWEEN_REQUESTS,
        between_drafts: float = BETWEEN_DRAFTS,
        has_confidence: bool = True,
    ) -> None:
        for field, value in (("spread_requests", between_requests), ("spread_drafts", between_drafts)):
            if not 0 <= value <= 10:
                raise ConfigError(f"{field}: found {value:g}, allowed: 0 to 10 (standard deviation of a logit)")
        self.depth, self.has_confidence = len(survival), has_confidence
        self._between, self._within = np.float32(between_requests), np.float32(between_drafts)
        self._offsets = offsets(survival, between_requests, between_drafts).astype(np.float32)
        rates = " ".join(f"{s:.3f}" for s in survival)
        self.label = (
            f"survival {rates}, AL {1 + sum(survival):.2f} at {self.depth} drafts; spread of the logit "
            f"{between_requests:g} between requests, {between_drafts:g} between drafts"
        )

    def start(self, num_requests: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._requests = self._between * rng.standard_normal((num_requests, 1), dtype=np.float32)

    def draw(self, requests: np.ndarray, steps: np.ndarray, k: int) -> Drawn:
        rows, rng = len(requests), self._rng
        if not k:
            return Drawn(np.zeros(rows, dtype=np.int64), np.zeros((rows, 0), np.float32))
        logit = rng.standard_normal((rows, k), dtype=np.float32)
        logit *= self._within
        logit += self._requests[requests]
        logit += self._offsets[:k]
        chance = _sigmoid(logit)
        right = rng.random((rows, k), dtype=np.float32) < chance
        accepted = np.where(right.all(1), k, (~right).argmax(1))
        return Drawn(accepted, chance if self.has_confidence else None)


def offsets(survival: Sequence[float], between_requests: float, between_drafts: float) -> np.ndarray:
    """[depth] float64: a_i of `Rates`, by Gauss-Hermite quadrature over both spreads and bisection."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    alive = weights.copy()  # of each request node: its weight times the chance that it accepts the drafts so far
    found = []
    for share in survival:
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            chance = _sigmoid(middle + between_requests * nodes[:, None] + between_drafts * nodes) @ weights
            low, high = (low, middle) if alive @ chance > share else (middle, high)
        found.append(middle)
        alive = alive * chance
    return np.array(found)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # does not overflow


class Recorded:
    """Steps of a trace: every request plays one recorded request from a random step on, round and round.

    Whatever is verified, the next step is the next recorded one: a schedule does not change which text is drafted.
    """

    def __init__(self, suites: Sequence[Suite], has_confidence: bool = True) -> None:
        """suites: of `read_trace`. Raises ConfigError for suites that are no traces, or where some have confidences and
        others do not."""
        if any(s.accepted is None for s in suites):
            raise ConfigError("acceptance: found rates, allowed: a trace of steps")
        if len({s.confidence is None for s in suites}) > 1:
            raise ConfigError("acceptance: found steps with and without confidence, allowed: one of both")
        self.depth = min(s.depth for s in suites)
        self.has_confidence = has_confidence and suites[0].confidence is not None
        owners, confidence, base = [], [], 0
        for s in suites:
            _, owner = np.unique(s.requests, return_inverse=True)
            owners.append(owner + base)
            base += owner.max() + 1
            if self.has_confidence:
                confidence.append(np.nan_to_num(s.confidence[:, : self.depth]).astype(np.float32))
        owner = np.concatenate(owners)
        order = owner.argsort(kind="stable")
        self._accepted = np.concatenate([s.accepted for s in suites])[order]
        self._drafted = np.concatenate([s.drafted for s in suites])[order].clip(max=self.depth)
        self._confidence = np.concatenate(confidence)[order] if confidence else None
        self._lengths = np.bincount(owner)
        self._starts = self._lengths.cumsum() - self._lengths
        reached = self._accepted.clip(max=self.depth)
        self.label = (
            f"{len(owner)} recorded steps of {base} requests, AL {1 + reached.mean():.2f} at {self.depth} drafts"
        )

    def start(self, num_requests: int, rng: np.random.Generator) -> None:
        self._played = rng.integers(0, len(self._lengths), num_requests)
        self._first = rng.integers(0, self._lengths[self._played])

    def draw(self, requests: np.ndarray, steps: np.ndarray, k: int) -> Drawn:
        played = self._played[requests]
        step = self._starts[played] + (self._first[requests] + steps) % self._lengths[played]
        confidence = self._confidence[step, :k] if self.has_confidence else None
        return Drawn(self._accepted[step], confidence, np.minimum(self._drafted[step], k))
