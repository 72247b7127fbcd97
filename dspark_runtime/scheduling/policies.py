"""Policies: from estimated acceptance to the drafts that are verified. Tensor code without host reads.

What keeps them lossless (drafters fact sheet §5.3): whether a draft is verified may depend on the context, on past
steps, on other requests and on the drafts before it, never on the draft itself or those behind it. Survival never rises
along a path, so the best B drafts of all requests are closed under prefixes, and which draft is the next best is known
before it is looked at. Ties go to the lower depth, then to the lower row. A budget is therefore lossless if it is found
on the way down that order (`EarlyStop`) or without this step's confidences (`Budget`, `Lagged`); the best budget in
hindsight is not: it looks at the confidences behind a draft, which depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafters.topology import TreeSpec
from dspark_runtime.errors import ConfigError
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.scheduling.outlook import Outlook
from dspark_runtime.tuning.curve import Curve

Value = TypeVar("Value")

_ONE = 0x3F800000
"""The bits of 1.0 as a float32."""


@dataclass
class Drafts:
    """What R requests drafted, as a policy sees it; entry 0 of a request is its root.

    survival      [R, n] float32  estimated probability that a node and all its ancestors are accepted: 1 for roots, 0
                                  for padding, never above the parent's; None for a policy that needs no confidence
    depths        [R, n] or [n]   int64
    context_lens  [R] int64
    stale         [R, n] float32  survival as it was `Policy.lag` steps ago, 1 for a request that was not there then;
                                  None where the policy has no lag
    """

    survival: Tensor | None
    depths: Tensor
    context_lens: Tensor
    stale: Tensor | None = None


class Policy(Protocol):
    """Which drafts are verified."""

    needs_confidence: bool
    lag: int
    """How many steps old the survival is that it wants beside this step's; 0: none."""

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        """Called before the first step, and when what is drafted changes. Raises ConfigError for what does not fit."""

    def drafts(self, context_lens: Tensor) -> bool:
        """Asked before each step: whether it drafts, or is a plain one. context_lens [R] int64, on the host."""

    def keep(self, drafts: Drafts) -> Tensor:
        """[R, n] bool: the nodes that are verified, closed under ancestors; roots always are, padding says nothing."""


def on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def ranked(survival: Tensor) -> tuple[Tensor, Tensor]:
    """(places [R, n] int64, the same sorted [R * n]): the best node has the lowest place, and no two are equal.

    A place is a float32's bits, whose order from 0 to 1 is the numbers', counted down from 1, and under them the index
    j * R + r. Roots come first.
    """
    rows, width = survival.shape
    index = _index(rows, width, survival.device)
    places = (_ONE - survival.view(torch.int32)).long().bitwise_left_shift_(32).bitwise_or_(index)
    if on_host(places):  # numpy sorts integers many times faster than torch does
        return places, torch.from_numpy(np.sort(places.numpy(), axis=None))
    return places, places.flatten().sort().values


@lru_cache(maxsize=64)
def _index(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(rows * width, device=device).view(width, rows).t()


def values_of(best: Tensor) -> Tensor:
    """The survival that sorted places stand for, float32, largest first."""
    return (_ONE - best.bitwise_right_shift(32)).int().view(torch.float32)


def descending(survival: Tensor) -> Tensor:
    """[R * n] float32: the values alone, largest first."""
    if on_host(survival):
        return torch.from_numpy(np.sort(survival.numpy(), axis=None)[::-1].copy())
    return survival.flatten().sort(descending=True).values


def throughput(values: Tensor, ms: Tensor, num_requests: int) -> Tensor:
    """Expected tokens a millisecond of passes of R, R + 1, ... tokens, the best nodes first: float64."""
    emitted = values.cumsum(0, dtype=torch.float64)[num_requests - 1 :]
    return emitted / ms[: emitted.shape[0]]


def first(places: Tensor, best: Tensor, tokens: Tensor) -> Tensor:
    """[R, n] bool: the `tokens` ([1] int64) best nodes, roots among them."""
    return places <= best.index_select(0, (tokens - 1).clamp_(max=best.shape[0] - 1))


class FixedLength:
    """Drafts up to a depth; a table {requests at once: depth} for different loads (see `at_load`)."""

    needs_confidence, lag = False, 0

    def __init__(self, depth: int | Mapping[int, int]) -> None:
        self.depth = depth

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        if not isinstance(self.depth, Mapping) and self.depth > spec.depth:
            raise ConfigError(
                f"scheduler: found {self.depth} drafts, allowed: at most {spec.depth}, the depth that is drafted"
            )

    def drafts(self, context_lens: Tensor) -> bool:
        return self._depth(context_lens) > 0

    def keep(self, drafts: Drafts) -> Tensor:
        return (drafts.depths <= self._depth(drafts.context_lens)).expand(drafts.context_lens.shape[0], -1)

    def _depth(self, context_lens: Tensor) -> int:
        return at_load(self.depth, context_lens.shape[0]) if isinstance(self.depth, Mapping) else self.depth


class Threshold:
    """Drafts whose survival is not below a threshold; a table {requests at once: (depth, threshold)} for different
    loads (see `at_load`)."""

    needs_confidence, lag = True, 0

    def __init__(self, threshold: float | Mapping[int, tuple[int, float]]) -> None:
        self.threshold = threshold

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        pass

    def drafts(self, context_lens: Tensor) -> bool:
        return not isinstance(self.threshold, Mapping) or at_load(self.threshold, context_lens.shape[0])[0] > 0

    def keep(self, drafts: Drafts) -> Tensor:
        if not isinstance(self.threshold, Mapping):
            return drafts.survival >= self.threshold
        depth, threshold = at_load(self.threshold, drafts.survival.shape[0])
        return (drafts.survival >= threshold) & (drafts.depths <= depth)


class Budget:
    """The best drafts of all requests, so that a pass has at most so many tokens, roots included."""

    needs_confidence, lag = True, 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        if self.tokens < max_num_requests:
            raise ConfigError(
                f"scheduler: found a budget of {self.tokens} tokens, allowed: {max_num_requests} or more, one a request"
            )

    def drafts(self, context_lens: Tensor) -> bool:
        return self.tokens > context_lens.shape[0]

    def keep(self, drafts: Drafts) -> Tensor:
        places, best = ranked(drafts.survival)
        return places <= best[min(self.tokens, best.shape[0]) - 1]


class EarlyStop:
    """Algorithm 1 of the DSpark paper: admit drafts, best first, until the next one would not raise expected tokens a
    second. Synchronous: the confidences are this step's. It stops before a cost jump even where going further pays."""

    needs_confidence, lag = True, 0

    def __init__(self, curve: Curve) -> None:
        self.curve = curve

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        self.costs = StepCosts(self.curve, spec, max_num_requests, device)
        self.outlook = Outlook(self.costs)

    def drafts(self, context_lens: Tensor) -> bool:
        return self.outlook.drafts(context_lens)

    def keep(self, drafts: Drafts) -> Tensor:
        rows = drafts.survival.shape[0]
        places, best = ranked(drafts.survival)
        values = values_of(best)
        self.outlook.learn(values, rows)
        rate = throughput(values, self.costs.ms(drafts.context_lens), rows)
        # Whether a draft gains reads the sums up to it and nothing behind.
        gains = (rate[1:] > rate[:-1]).cumprod(0).sum(0, keepdim=True)
        return first(places, best, rows + gains)


class Lagged:
    """Asynchronous search: the budget with the most expected tokens a second, of all, by confidences `lag` steps old;
    this step's confidences only say which drafts fill it."""

    needs_confidence, lag = True, 2

    def __init__(self, curve: Curve) -> None:
        self.curve = curve

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        self.costs = StepCosts(self.curve, spec, max_num_requests, device)
        self.outlook = Outlook(self.costs)

    def drafts(self, context_lens: Tensor) -> bool:
        return self.outlook.drafts(context_lens)

    def budget(self, stale: Tensor, context_lens: Tensor) -> Tensor:
        """Tokens of the pass, roots included: [1] int64; the fewest of equally good ones."""
        rows = stale.shape[0]
        return rows + throughput(descending(stale), self.costs.ms(context_lens), rows).argmax(0, keepdim=True)

    def keep(self, drafts: Drafts) -> Tensor:
        tokens = self.budget(drafts.stale, drafts.context_lens)
        places, best = ranked(drafts.survival)
        self.outlook.learn(values_of(best), drafts.survival.shape[0])
        return first(places, best, tokens)


def at_load(table: Mapping[int, Value], num_requests: int) -> Value:
    """The entry of the next larger number of requests, or of the largest."""
    return table[min((b for b in table if b >= num_requests), default=max(table))]
