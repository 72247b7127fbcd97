"""Whether drafting pays at all: decided before a step drafts, from what earlier ones drafted."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dspark_runtime.scheduling.costs import StepCosts

DECAY = 0.9
"""What a step, drafted or not, leaves of all that was seen before it."""
PATIENCE = 16, 256
"""Plain steps before drafting is tried again: at first, and at most; every trial in vain doubles them. Trials that take
three times a plain step then cost 0.8 % of the time."""


class Outlook:
    """Expected tokens a request against tokens verified a request, over the steps that drafted, and what they would
    bring a second now. A policy can leave out what it would verify; the draft pass it has paid for by then.

    Looks at past steps only, so that what is drafted and accepted keeps its law (drafters fact sheet §5.3).
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._expected: np.ndarray | None = None
        self._since = 0  # plain steps since one drafted
        self._patience = PATIENCE[0]

    def learn(self, best: Tensor, num_requests: int) -> None:
        """best [R * n] float32: survival of this step's nodes, the largest first, roots among them."""
        sums = best.double().cumsum(0)[num_requests - 1 :: num_requests].numpy() / num_requests
        sums = np.pad(sums, (0, self.costs.spec.num_nodes - len(sums)), "edge")  # a smaller tree, for this step only
        known = self._expected
        weight = DECAY ** (1 + self._since)
        self._expected = sums if known is None else weight * known + (1 - weight) * sums
        self._since = 0

    def drafts(self, context_lens: Tensor) -> bool:
        """Whether this step drafts. context_lens [R] int64 on the host; asked once a step."""
        if self._expected is None:
            return True
        rows = context_lens.shape[0]
        ms = self.costs.ms(context_lens).numpy()[::rows]
        plain = self.costs.plain_ms(rows, float(context_lens.double().mean()))
        if (self._expected / ms).max() > 1 / plain:
            self._patience = PATIENCE[0]
            return True
        if self._since < self._patience:
            self._since += 1
            return False
        self._patience = min(2 * self._patience, PATIENCE[1])
        return True
