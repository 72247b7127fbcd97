"""Which experts a pass touches: the expected number of distinct ones, by law. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dspark_runtime.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """law "uniform": every expert is as likely as any other. "zipf": expert i in proportion to i^-exponent. "recorded":
    `recorded[i]` distinct experts were counted in a pass of i + 1 tokens. overlap: share of its experts that a token
    has in common with the one before it in the same request (0: independent)."""

    law: str = "uniform"
    exponent: float = 1.0
    recorded: tuple[float, ...] = ()
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.law not in ("uniform", "zipf", "recorded"):
            raise ConfigError(f"routing: found {self.law!r}, allowed: uniform, zipf, recorded")
        if not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(f"overlap: found {self.overlap:g}, allowed: 0 to 1")
        if self.law == "recorded" and not self.recorded:
            raise ConfigError("recorded: found nothing, allowed: distinct experts of passes of 1, 2, ... tokens")

    def independent(self, requests: float, tokens: float) -> float:
        """Independently routed tokens that touch as many experts as `tokens` of `requests` do, overlap considered."""
        return tokens - self.overlap * max(0.0, tokens - requests)

    def unique(self, experts: int, top_k: int, requests: float, tokens: float) -> float:
        """Expected distinct experts of a layer in a pass of `tokens` tokens of `requests` requests."""
        count = self.independent(requests, tokens)
        if self.law == "recorded":
            whole = min(int(count), len(self.recorded))
            low = self.recorded[whole - 1] if whole else 0.0
            high = self.recorded[min(whole, len(self.recorded) - 1)]
            return min(float(experts), low + (high - low) * (count - int(count)))
        if self.law == "uniform":
            return experts * (1.0 - (1.0 - top_k / experts) ** count)
        return sum(1.0 - (1.0 - p) ** count for p in inclusion(experts, top_k, self.exponent))


@lru_cache(maxsize=64)
def inclusion(experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """Chance that a token picks expert i: min(1, c i^-exponent), with c such that the chances add up to top_k."""
    weights = [i**-exponent for i in range(1, experts + 1)]
    tails = [0.0] * (experts + 1)
    for i in range(experts - 1, -1, -1):
        tails[i] = tails[i + 1] + weights[i]
    for sure in range(top_k + 1):  # the `sure` likeliest are always picked
        c = (top_k - sure) / tails[sure]
        if sure == top_k or c * weights[sure] <= 1.0:
            return tuple([1.0] * sure + [c * w for w in weights[sure:]])
    raise AssertionError("unreachable")


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear, level before the first point, extended in proportion to x after the last."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    i = bisect_left(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
