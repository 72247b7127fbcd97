"""A step-cost curve as tensors that a policy can index by tokens."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor

from drafters.topology import TreeSpec
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import Curve


class StepCosts:
    """Milliseconds of a step in which R requests verify B tokens together, all of them having drafted `spec`.

    Drafting costs what it costs at the spec's depth, whatever is verified. A pass of B tokens costs what the curve says
    of B / R tokens a request: of a chain up to the spec's depth, of a tree beyond it. Raises ConfigError where the
    curve does not reach 1 to max_num_requests requests or the spec.
    """

    def __init__(self, curve: Curve, spec: TreeSpec, max_num_requests: int, device: torch.device) -> None:
        self.curve, self.spec, self.device = curve, spec, device
        self._contexts = torch.tensor(curve.contexts, dtype=torch.float64, device=device)
        self._known = curve.contexts
        self._tables: dict[int, Tensor] = {}
        self._plain: dict[int, list[float]] = {}
        inside = {b for b in curve.num_requests if b < max_num_requests}
        try:
            for b in sorted({1, max_num_requests, *inside}):
                self._table(b)
        except ConfigError as error:
            raise ConfigError(
                f"scheduler: the curve must reach 1 to {max_num_requests} requests of {spec.num_nodes} tokens ({error})"
            ) from None

    def _table(self, num_requests: int) -> Tensor:
        """[contexts, R * (n - 1) + 1] float64: B = R ... R * n. Made once, before any capture."""
        if num_requests in self._tables:
            return self._tables[num_requests]
        curve, n, deepest = self.curve, self.spec.num_nodes, self.spec.depth
        rows = []
        for context in curve.contexts:
            draft = curve.cost(num_requests, n, deepest, context)[0]
            straight = min(deepest, curve.longest_chain(num_requests, context)) + 1
            shapes = [(t, t - 1 if t <= straight else deepest) for t in range(1, n + 1)]
            verify = np.array([curve.cost(num_requests, t, depth, context)[1] for t, depth in shapes])
            tokens = np.arange(num_requests, num_requests * n + 1)
            if curve.between == "step":
                ms = verify[-(-tokens // num_requests) - 1]
            else:
                ms = np.interp(tokens / num_requests, np.arange(1, n + 1), verify)
            rows.append(draft + ms)
        table = self._tables[num_requests] = torch.tensor(np.array(rows), device=self.device)
        return table

    def ms(self, context_lens: Tensor) -> Tensor:
        """[R * (n - 1) + 1] float64: a step of R, R + 1, ... R * n tokens. context_lens [R] int64, whose mean lies
        between the measured contexts, or counts as the nearest."""
        table = self._table(context_lens.shape[0])
        if len(table) == 1:
            return table[0]
        known = self._contexts
        mean = context_lens.double().mean().clamp(known[0], known[-1])
        below = (known[1:-1] <= mean).sum()[None]
        low, high = known.index_select(0, below), known.index_select(0, below + 1)
        share = (mean - low) / (high - low)
        return torch.lerp(table.index_select(0, below), table.index_select(0, below + 1), share[:, None])[0]

    def plain_ms(self, num_requests: int, context_len: float) -> float:
        """Of a step that drafts nothing, at this mean context; see `ms`."""
        if num_requests not in self._plain:
            self._plain[num_requests] = [sum(self.curve.cost(num_requests, 1, 0, c)) for c in self._known]
        return float(np.interp(context_len, self._known, self._plain[num_requests]))

    def step_ms(self, num_requests: int, tokens: int, context_len: float) -> float:
        """Of one step with so many tokens in all, roots included, at this mean context; see `ms`. Reads the host."""
        table, known = self._table(num_requests), self._known
        context = min(max(context_len, known[0]), known[-1])
        low = min(bisect_right(known, context) - 1, max(len(known) - 2, 0))
        below = table[low, tokens - num_requests].item()
        if len(known) == 1:
            return below
        share = (context - known[low]) / (known[low + 1] - known[low])
        return below + share * (table[low + 1, tokens - num_requests].item() - below)
