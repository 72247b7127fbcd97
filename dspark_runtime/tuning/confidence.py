"""Is it worth verifying a draft that the drafter itself doubts? A static threshold against none, on a recorded trace.

The block is drafted in full; a request then verifies its drafts up to the first whose running product of confidences
falls below the threshold. That decision reads nothing of the drafts behind it, so it is lossless (facts: a static
threshold on c_k, which depends on x_<k, qualifies). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_runtime.tuning.acceptance import Suite
from dspark_runtime.tuning.curve import Curve
from dspark_runtime.tuning.search import INTERVAL

THRESHOLDS = 20
RESAMPLES = 200
BATCH_STEPS = 2048
"""Request steps of one resample."""


@dataclass(frozen=True)
class Policy:
    """k drafts, of which those above the threshold are verified (0: all of them). gain: interval of its goodput over
    the best fixed length's, on the half of the trace that did not choose it."""

    num_requests: int
    k: int
    threshold: float
    verified_tokens: float
    acceptance_length: float
    goodput: float
    gain: tuple[float, float]

    @property
    def pays(self) -> bool:
        return self.threshold > 0 and self.gain[0] > 1


def best_policy(
    curve: Curve, suites: Sequence[Suite], fixed: int, num_requests: int, context: int, seed: int = 0
) -> Policy | None:
    """The best (k, threshold) against `fixed` drafts without one. None where there is no trace with confidences.

    Chosen on the even steps, valued on the odd ones: the best of many is flattered by the data that chose it.
    """
    if not suites or any(s.confidence is None for s in suites):
        return None
    rng = np.random.default_rng(seed)
    depth = min(min(s.depth for s in suites), curve.longest_chain(num_requests, context), curve.max_depth)
    accepted = np.concatenate([s.accepted for s in suites])
    sure = np.concatenate([np.nan_to_num(s.confidence[:, :depth]).cumprod(1) for s in suites])
    costs = [curve.cost(num_requests, k + 1, k, context) for k in range(depth + 1)]
    draft, verify = np.array(costs).T
    halves = np.arange(len(accepted)) % 2
    grid = np.unique(np.concatenate([[0.0], np.quantile(sure, np.linspace(0.05, 0.95, THRESHOLDS - 1))]))

    def goodput(k: int, threshold: float, batches: np.ndarray) -> np.ndarray:
        """[...] tokens a second of batches [..., n, R] of steps."""
        kept = (sure[:, :k] >= threshold).sum(1) if k else np.zeros(len(sure), dtype=int)
        emitted = 1 + np.minimum(accepted, kept)
        tokens = (1 + kept)[batches].mean(-1)  # of a request, on average over the pass
        sizes = np.arange(1, depth + 2)
        ms = verify[np.ceil(tokens).astype(int) - 1] if curve.between == "step" else np.interp(tokens, sizes, verify)
        return 1e3 * emitted[batches].sum((-1, -2)) / (draft[k] + ms).sum(-1)

    passes = math.ceil(BATCH_STEPS / num_requests)
    choosing = rng.choice(np.flatnonzero(halves == 0), (4 * passes, num_requests))
    fixed = min(fixed, depth)
    options = [(fixed, 0.0), *((k, float(t)) for k in range(1, depth + 1) for t in grid)]
    k, threshold = max(options, key=lambda option: float(goodput(*option, choosing)))
    valuing = rng.choice(np.flatnonzero(halves == 1), (RESAMPLES, passes, num_requests))
    with_it, without = goodput(k, threshold, valuing), goodput(fixed, 0.0, valuing)
    low, high = np.percentile(with_it / without, INTERVAL)
    odd = halves == 1
    kept = (sure[:, :k] >= threshold).sum(1)[odd]
    return Policy(
        num_requests=num_requests,
        k=k,
        threshold=threshold,
        verified_tokens=float(1 + kept.mean()),
        acceptance_length=float(1 + np.minimum(accepted[odd], kept).mean()),
        goodput=float(with_it.mean()),
        gain=(float(low), float(high)),
    )
