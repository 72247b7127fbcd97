"""What a step costs: the points that `dspark profile` measured, and how to read between them.

A curve is a list of points (requests, tokens of a request, depth, context) with the milliseconds of drafting, of the
verify pass, and of the rest of the step. Nothing is smoothed: a measured point is read back as it was measured.
Between points the curve says which rule it wants:

step     the cost of the next measured size (steps are padded to it, as captured graphs of few sizes are)
linear   a straight line between the two neighbours

Beyond the largest measured size there is no cost: asking for one is an error. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drafters.topology import MAX_NODES
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import checked, read_json

SCHEMA_VERSION = 1
IDENTITY = ("cpu", "cores", "gpu")
"""What makes two machines the same one. Host names do not: containers have a new one each time."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(Strict):
    """One measured shape. num_tokens: tokens of one request in the verify pass, the root included; depth: its longest
    path (num_tokens - 1: a chain). Medians in milliseconds; other_ms is what they lack of the median step, so that the
    three add up to it. spread: relative standard deviation of the repeats' median steps, without what a repeat changed
    for all points alike (`Curve.drift`)."""

    num_requests: int = Field(ge=1)
    num_tokens: int = Field(ge=1, le=MAX_NODES)
    depth: int = Field(ge=0, lt=MAX_NODES)
    context_len: int = Field(ge=1)
    draft_ms: float = Field(ge=0)
    verify_ms: float = Field(gt=0)
    other_ms: float
    spread: float = Field(ge=0)

    @model_validator(mode="after")
    def _whole(self) -> Point:
        if self.depth >= self.num_tokens:
            raise ValueError(f"depth: found {self.depth}, allowed: below num_tokens ({self.num_tokens})")
        if not (math.isfinite(self.total_ms) and self.total_ms > 0):
            raise ValueError(f"other_ms: found {self.other_ms}, allowed: a step of positive length")
        return self

    @property
    def is_chain(self) -> bool:
        return self.depth == self.num_tokens - 1

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms


class Curve(Strict):
    """A step-cost curve of one target and drafter on one machine. source "model": predicted by dspark_runtime.cost.
    drift: relative standard deviation of the repeats that all points share, as when the machine slows down."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["step_cost_curve"] = "step_cost_curve"
    command: str
    source: Literal["measured", "model"]
    environment: dict[str, object]
    target: str
    drafter: str
    method: str
    dtype: str
    weights: str = "auto"
    max_depth: int = Field(ge=0)
    can_tree: bool
    between: Literal["step", "linear"]
    repeats: int = Field(ge=1)
    drift: float = Field(default=0.0, ge=0)
    notes: list[str] = []
    points: list[Point] = Field(min_length=1)

    @model_validator(mode="after")
    def _usable(self) -> Curve:
        seen: set[tuple[int, int, int, bool]] = set()
        for p in self.points:
            key = (p.num_requests, p.context_len, p.num_tokens, p.is_chain)
            if key in seen:
                raise ValueError(f"points: found two of (requests, context, tokens, chain) {key}, allowed: one")
            seen.add(key)
        for b, c in {(p.num_requests, p.context_len) for p in self.points}:
            if (b, c, 1, True) not in seen:
                raise ValueError(f"points: no plain step (1 token) of {b} requests at context {c}, allowed: one each")
        return self

    @property
    def num_requests(self) -> list[int]:
        return sorted({p.num_requests for p in self.points})

    @property
    def contexts(self) -> list[int]:
        return sorted({p.context_len for p in self.points})

    @property
    def machine(self) -> str:
        env = self.environment
        return str(env.get("gpu") or f"{env.get('cpu')}, {env.get('cores')} cores")

    @property
    def label(self) -> str:
        """One line that says where the curve comes from."""
        how = "model, nothing measured here" if self.source == "model" else f"{self.repeats} repeats"
        return f"{self.machine}: {self.target} {self.dtype}, drafter {self.drafter} ({how})"

    @cached_property
    def _chains(self) -> dict[tuple[int, int], dict[int, int]]:
        """(requests, context) -> tokens -> index of the point."""
        return self._table(lambda p: p.is_chain)

    @cached_property
    def _trees(self) -> dict[tuple[int, int], dict[int, int]]:
        return self._table(lambda p: not p.is_chain)

    def _table(self, wanted) -> dict[tuple[int, int], dict[int, int]]:
        out: dict[tuple[int, int], dict[int, int]] = {}
        for i, p in enumerate(self.points):
            if wanted(p):
                out.setdefault((p.num_requests, p.context_len), {})[p.num_tokens] = i
        return out

    def longest_chain(self, num_requests: int, context_len: int) -> int:
        """Drafts of the longest chain that can be costed."""
        return min(max(self._chains[(b, c)]) for b, c in self._cells(num_requests, context_len)) - 1

    def largest_tree(self, num_requests: int, context_len: int) -> int:
        """Tokens of the largest tree that can be costed; 0 where none was measured."""
        return min(max(self._trees.get((b, c), {0: 0})) for b, c in self._cells(num_requests, context_len))

    def terms(self, num_requests: int, num_tokens: int, depth: int, context_len: int) -> tuple[Terms, Terms]:
        """(draft, verify): the cost of a step as weights on points, {index: weight} each. The draft side weighs the
        points' draft_ms, the verify side their verify_ms + other_ms.

        A chain is read from the chains. A tree's verify pass is read from the measured trees, by tokens; its drafting
        is that of a chain as deep, plus what growing a tree of that size added to a chain where it was measured.
        """
        draft: dict[int, float] = {}
        verify: dict[int, float] = {}
        for (b, c), share in self._cells(num_requests, context_len).items():
            chains, trees = self._chains[(b, c)], self._trees.get((b, c), {})
            if depth == num_tokens - 1:
                for i, w in self._between(chains, num_tokens, "num_speculative_tokens", 1).items():
                    _add(draft, i, share * w)
                    _add(verify, i, share * w)
                continue
            # The smallest measured tree has no smaller neighbour but the chains; below it, it is an upper bound.
            for i, w in self._between(trees, max(num_tokens, min(trees, default=0)), "tree", 0).items():
                _add(verify, i, share * w)
                _add(draft, i, share * w)
                for j, v in self._between(chains, self.points[i].depth + 1, "depth", 1).items():
                    _add(draft, j, -share * w * v)
            for j, v in self._between(chains, depth + 1, "depth", 1).items():
                _add(draft, j, share * v)
        return draft, verify

    def cost(self, num_requests: int, num_tokens: int, depth: int, context_len: int) -> tuple[float, float]:
        """Milliseconds of a step: (drafting, everything else). Raises ConfigError beyond what was measured."""
        draft, verify = self.terms(num_requests, num_tokens, depth, context_len)
        p = self.points
        return (
            sum(w * p[i].draft_ms for i, w in draft.items()),
            sum(w * (p[i].verify_ms + p[i].other_ms) for i, w in verify.items()),
        )

    def _cells(self, num_requests: int, context_len: int) -> dict[tuple[int, int], float]:
        """Measured (requests, context) pairs and their weights. Contexts are always joined by lines: reading the cache
        is linear in them."""
        contexts = _weights(self.contexts, context_len, "linear", "context", f"what {self.target}'s curve measured")
        requests = _weights(self.num_requests, num_requests, self.between, "num_requests", "what the curve measured")
        cells = {(b, c): v * w for b, v in requests.items() for c, w in contexts.items()}
        for b, c in cells:
            if (b, c) not in self._chains:
                raise ConfigError(f"curve: no points of {b} requests at context {c}, allowed: profile them too")
        return cells

    def _between(self, table: Mapping[int, int], tokens: float, field: str, less: int) -> dict[int, float]:
        if not table:
            raise ConfigError(f"{field}: the curve has no trees, allowed: chains (profile with --tree-tokens)")
        sizes = sorted(table)
        found = _weights(sizes, tokens, self.between, field, "what the curve measured", less)
        return {table[n]: w for n, w in found.items()}


Terms = dict[int, float]


def _add(terms: dict[int, float], index: int, weight: float) -> None:
    terms[index] = terms.get(index, 0.0) + weight


def _weights(sizes: list[int], x: float, between: str, field: str, why: str, less: int = 0) -> dict[int, float]:
    """{measured size: weight} of a size x. less: what the user calls the size is that much smaller."""
    if not sizes[0] <= x <= sizes[-1]:
        raise ConfigError(f"{field}: found {x - less:g}, allowed: {sizes[0] - less} to {sizes[-1] - less}, {why}")
    above = next(n for n in sizes if n >= x)
    if above == x or between == "step":
        return {above: 1.0}
    below = max(n for n in sizes if n < x)
    share = (x - below) / (above - below)
    return {below: 1 - share, above: share}


# ------------------------------------------------------------------------------------------------------- files


def load_curve(path: Path) -> Curve:
    """Read a curve. Raises ConfigError naming the file and the field."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("kind") != "step_cost_curve":
        raise ConfigError(f"{path}: not a step-cost curve, allowed: a file of `dspark profile --json`")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema_version: found {values.get('schema_version')!r}, allowed: {SCHEMA_VERSION}")
    return checked(Curve, values, str(path))


def differs(curve: Curve, here: Mapping[str, object]) -> str | None:
    """How a measured curve's machine differs from this one ("gpu NVIDIA H200, here none"); None where it does not, and
    for a predicted curve, which is of no machine that anyone has."""
    if curve.source == "model":
        return None
    wrong = [f for f in IDENTITY if curve.environment.get(f) != here.get(f)]
    return ", ".join(f"{f} {curve.environment.get(f) or 'none'}, here {here.get(f) or 'none'}" for f in wrong) or None
