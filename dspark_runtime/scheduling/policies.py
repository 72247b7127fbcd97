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
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from drafters.topology import TreeSpec
from dspark_runtime.errors import ConfigError
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.tuning.curve import Curve

Value = TypeVar("Value")


@dataclass
class Drafts:
    """What R requests drafted, as a policy sees it; entry 0 of a request is its root.

    survival      [R, n] float32  estimated probability that a node and all its ancestors are accepted: 1 for roots, 0
                                  for padding, never above the parent's
    depths        [R, n] or [n]   int64
    context_lens  [R] int64
    stale         [R, n] float32  survival as it was `Policy.lag` steps ago, 1 for a request that was not there then;
                                  None where the policy has no lag
    """

    survival: Tensor
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

    def keep(self, drafts: Drafts) -> Tensor:
        """[R, n] bool: the nodes that are verified, closed under ancestors; roots always are, padding says nothing."""


def ranked(survival: Tensor) -> tuple[Tensor, Tensor]:
    """All nodes, best first: (values, order), both [R * n]; order counts j * R + r. Roots come first."""
    return survival.t().flatten().sort(descending=True, stable=True)


def best(order: Tensor, shape: torch.Size, tokens: Tensor | int) -> Tensor:
    """[R, n] bool: the first `tokens` nodes of an order; roots among them."""
    rows, width = shape
    admitted = torch.arange(rows * width, device=order.device) < tokens
    return torch.empty_like(admitted).scatter_(0, order, admitted).view(width, rows).t()


def throughput(values: Tensor, ms: Tensor, num_requests: int) -> Tensor:
    """Expected tokens a millisecond of passes of R, R + 1, ... tokens, the best nodes first. float64"""
    emitted = values.cumsum(0, dtype=torch.float64)[num_requests - 1 :]
    return emitted / ms[: emitted.shape[0]]


class FixedLength:
    """Drafts up to a depth; a table {requests at once: depth} for different loads (see `at_load`)."""

    needs_confidence, lag = False, 0

    def __init__(self, drafts: int | Mapping[int, int]) -> None:
        self.drafts = drafts if isinstance(drafts, Mapping) else {1: drafts}

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        _within(max(self.drafts.values()), spec)

    def keep(self, drafts: Drafts) -> Tensor:
        rows = drafts.survival.shape[0]
        return (drafts.depths <= at_load(self.drafts, rows)).expand_as(drafts.survival)


class Threshold:
    """Drafts whose survival is not below a threshold; a table {requests at once: (depth, threshold)} for different
    loads (see `at_load`)."""

    needs_confidence, lag = True, 0

    def __init__(self, threshold: float | Mapping[int, tuple[int, float]]) -> None:
        self.table = threshold if isinstance(threshold, Mapping) else None
        self.threshold = None if self.table else threshold

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        if self.table is not None:
            _within(max(k for k, _ in self.table.values()), spec)

    def keep(self, drafts: Drafts) -> Tensor:
        if self.table is None:
            return drafts.survival >= self.threshold
        depth, threshold = at_load(self.table, drafts.survival.shape[0])
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

    def keep(self, drafts: Drafts) -> Tensor:
        order = ranked(drafts.survival)[1]
        return best(order, drafts.survival.shape, self.tokens)


class EarlyStop:
    """Algorithm 1 of the DSpark paper: admit drafts, best first, until the next one would not raise expected tokens a
    second. Synchronous: the confidences are this step's. It stops before a cost jump even where going further pays."""

    needs_confidence, lag = True, 0

    def __init__(self, curve: Curve) -> None:
        self.curve = curve

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        self.costs = StepCosts(self.curve, spec, max_num_requests, device)

    def keep(self, drafts: Drafts) -> Tensor:
        rows = drafts.survival.shape[0]
        values, order = ranked(drafts.survival)
        rate = throughput(values, self.costs.ms(drafts.context_lens), rows)
        # A decision about a draft reads the sums up to it, whatever follows: no parallel sum changes that.
        gains = (rate[1:] > rate[:-1]).cumprod(0).sum()
        return best(order, drafts.survival.shape, rows + gains)


class Lagged:
    """Asynchronous search: the budget with the most expected tokens a second, of all, by confidences `lag` steps old;
    this step's confidences only say which drafts fill it."""

    needs_confidence, lag = True, 2

    def __init__(self, curve: Curve) -> None:
        self.curve = curve

    def start(self, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        self.costs = StepCosts(self.curve, spec, max_num_requests, device)

    def budget(self, stale: Tensor, context_lens: Tensor) -> Tensor:
        """Tokens of the pass, roots included: a 0-dimensional int64; the fewest of equally good ones."""
        rows = stale.shape[0]
        values = stale.flatten().sort(descending=True).values
        return rows + throughput(values, self.costs.ms(context_lens), rows).argmax()

    def keep(self, drafts: Drafts) -> Tensor:
        tokens = self.budget(drafts.stale, drafts.context_lens)
        return best(ranked(drafts.survival)[1], drafts.survival.shape, tokens)


def at_load(table: Mapping[int, Value], num_requests: int) -> Value:
    """The entry of the next larger number of requests, or of the largest."""
    return table[min((b for b in table if b >= num_requests), default=max(table))]


def _within(drafts: int, spec: TreeSpec) -> None:
    if drafts > spec.depth:
        raise ConfigError(f"scheduler: found {drafts} drafts, allowed: at most {spec.depth}, the depth that is drafted")
