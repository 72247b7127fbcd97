"""Measured kernels (configs/kernels) as rules: microseconds of an operation class from its bytes and flops, with the
spread of the measurements around the rule. Nothing here has seen the time of a whole step. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from pydantic import Field, model_validator

from dspark_runtime.configs import find, read_yaml
from dspark_runtime.cost.facts import BYTES, Precision, Sourced, Strict
from dspark_runtime.validation import checked
from dspark_runtime.cost.routing import interpolate


@dataclass(frozen=True)
class Interval:
    """A value with what it may be: low <= mid <= high. Sums add the ends, so errors are taken to agree (the worst
    case)."""

    low: float
    mid: float
    high: float

    @staticmethod
    def exact(value: float) -> Interval:
        return Interval(value, value, value)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def __mul__(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    def widen(self, low: float, high: float) -> Interval:
        return Interval(self.low * low, self.mid, self.high * high)


ZERO = Interval.exact(0.0)


@dataclass(frozen=True)
class Rule:
    """us = latency_us + bytes / (efficiency x reference bandwidth); low and high: the extremes of measured / rule."""

    latency_us: float
    us_per_byte: float
    low: float
    high: float

    def us(self, size: float, scale: float = 1.0) -> Interval:
        """scale: reference bandwidth / bandwidth of the machine at hand."""
        value = self.latency_us + size * self.us_per_byte * scale
        return Interval(value * self.low, value, value * self.high)


def fit(points: list[tuple[float, float]]) -> Rule:
    """Least squares of relative errors over (bytes, us), with latency and slope of at least 0."""
    a = b = c = d = e = 0.0  # normal equations of sum (latency / us + slope bytes / us - 1)^2
    for size, us in points:
        x, y = 1 / us, size / us
        a, b, c, d, e = a + x * x, b + x * y, c + y * y, d + x, e + y
    det = a * c - b * b
    latency, slope = ((d * c - e * b) / det, (a * e - b * d) / det) if det > 1e-12 * a * c else (d / a, 0.0)
    if latency < 0:
        latency, slope = 0.0, e / c
    if slope < 0:
        latency, slope = d / a, 0.0
    ratios = [us / (latency + slope * size) for size, us in points]
    return Rule(latency, slope, min(1.0, *ratios), max(1.0, *ratios))


class Recurrent(Strict):
    """One layer of a delta rule with `heads` heads of 128 x 128: us by number of requests, for decoding and for
    verifying 2, 4, 8 tokens."""

    heads: int
    batches: tuple[int, ...]
    decode: tuple[float, ...]
    verify: dict[int, tuple[float, ...]]


class MoeTable(Strict):
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    precision: Precision = "mxfp4"
    tokens: tuple[int, ...]
    rows: str

    @cached_property
    def curves(self) -> dict[tuple[int, int, str], tuple[float, ...]]:
        """(moe_tp, moe_ep, distribution) -> us, one for each of `tokens`."""
        out = {}
        for line in self.rows.splitlines():
            tp, ep, law, *us = line.split()
            out[int(tp), int(ep), law] = tuple(map(float, us))
        return out

    @model_validator(mode="after")
    def _complete(self) -> MoeTable:
        for line in self.rows.splitlines():
            cells = line.split()
            if len(cells) != 3 + len(self.tokens):
                raise ValueError(f"rows: found {len(cells)} cells in {line[:24]!r}, allowed: {3 + len(self.tokens)}")
        return self

    @property
    def expert_bytes(self) -> float:
        return 3 * self.hidden_size * self.intermediate_size * BYTES[self.precision]


class TorchOps(Strict):
    append_us: float
    attention_gbps: tuple[float, float, float]


class Kernels(Sourced):
    """A table of measured kernels of one machine."""

    title: str
    reference_bandwidth_gbps: float = Field(gt=0)
    elementwise_us: tuple[float, float, float]
    gemm: tuple[tuple[int, int, float], ...]
    attention: tuple[tuple[float, float, float], ...]
    moe: MoeTable
    all_reduce: tuple[float, float, float, float] | None = None
    all_reduce_ranks: int = Field(default=8, ge=2, description="among which all_reduce was measured")
    all_reduce_large_high_us: float = 0.0
    recurrent: Recurrent | None = None
    torch: TorchOps | None = None

    free = ("sources", "title")

    @cached_property
    def gemm_rule(self) -> Rule:
        return fit([(2.0 * n * k, us) for n, k, us in self.gemm])

    @cached_property
    def attention_rule(self) -> Rule:
        """Of memory-bound shapes: those with fewer than 64 flops a byte."""
        return fit([(size, us) for size, flops, us in self.attention if flops < 64 * size])

    @cached_property
    def moe_rules(self) -> dict[int, Rule]:
        """By moe_tp (a slice of an expert is narrower, and slower, the more ranks share it): bytes of distinct experts
        on a rank -> us, over passes of up to 64 balanced tokens."""
        points: dict[int, list[tuple[float, float]]] = {}
        t = self.moe
        for (tp, ep, law), curve in t.curves.items():
            if law != "balanced":
                continue
            for tokens, us in zip(t.tokens, curve):
                if tokens <= 64:
                    # Balanced picks: as many distinct experts as there are picks, up to all of them, evenly on the
                    # ranks.
                    unique = t.num_experts * (1 - (1 - t.num_experts_per_tok / t.num_experts) ** tokens)
                    points.setdefault(tp, []).append((max(1.0, unique / ep) * t.expert_bytes / tp, us))
        return {tp: fit(p) for tp, p in points.items()}

    def moe_us(self, tp: int, ep: int, law: str, tokens: float) -> Interval | None:
        """The measured curve of a shard, between its points; None where it was not measured."""
        t = self.moe
        curves = {name: t.curves[tp, ep, name] for name in ("balanced", "zipf") if (tp, ep, name) in t.curves}
        if not curves:
            return None
        values = {name: interpolate(t.tokens, curve, tokens) for name, curve in curves.items()}
        mid = values.get(law, values["balanced"])
        return Interval(min(values.values()), mid, max(values.values()))

    def recurrent_us(self, heads: float, requests: float, tokens_per_request: float) -> Interval | None:
        """Between measured numbers of requests (work goes with requests x heads) and of tokens."""
        r = self.recurrent
        if r is None:
            return None
        batch = requests * heads / r.heads
        lengths = [1, *sorted(r.verify)]
        values = [interpolate(r.batches, r.decode if q == 1 else r.verify[q], batch) for q in lengths]
        value = interpolate(lengths, values, max(1.0, tokens_per_request))
        return Interval(0.9 * value, value, 1.1 * value)


@lru_cache(maxsize=None)
def load_kernels(name: str) -> Kernels:
    """A table of configs/kernels."""
    path = find("kernels", name)
    return checked(Kernels, read_yaml(path), str(path))
