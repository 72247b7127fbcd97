"""The sequential (Markov) head of DSpark drafters (drafters fact sheet §1.3): its weights and its arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("vanilla", "gated", "rnn")


class Markov(NamedTuple):
    """Adds to a slot's logits what the token before it says: logits + w2 @ z.

    e is the previous token's row of w1. vanilla: z = e. gated: z = sigmoid(G [h; e] + b) * e. rnn: (g, c, o) = J [s; e;
    h] + b, z = tanh(o), and the state becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c); it starts at 0.

    w1 [V, r] over the target's vocabulary, w2 [V_draft, r], weight [r, d + r] and bias [r] (gated) or weight
    [3 r, 2 r + d] and bias [3 r] (rnn).
    """

    kind: str
    w1: Tensor
    w2: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    def of_hidden(self, hidden: Tensor) -> Tensor | None:
        """hidden [..., d] -> the part of the gates that no drafted token enters, [..., r] or [..., 3 r]."""
        if self.weight is None:
            return None
        d = hidden.shape[-1]
        columns = self.weight[:, :d] if self.kind == "gated" else self.weight[:, -d:]
        return F.linear(hidden, columns, self.bias)

    def of_draft(self) -> Tensor | None:
        """The other columns: [r, r] over e (gated), [3 r, 2 r] over [s; e] (rnn)."""
        if self.weight is None:
            return None
        r = self.w1.shape[1]
        return self.weight[:, -r:] if self.kind == "gated" else self.weight[:, : 2 * r]

    def step(self, e: Tensor, gates: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """e [N, r], gates [N, ...] of the slot's hidden states, state [N, r] (None at the start of a block) -> (z [N, r],
        the next state)."""
        if self.kind == "vanilla":
            return e, None
        if self.kind == "gated":
            return torch.sigmoid(gates + F.linear(e, self.of_draft())) * e, None
        state = torch.zeros_like(e) if state is None else state
        g, c, o = (gates + F.linear(torch.cat((state, e), dim=-1), self.of_draft())).chunk(3, dim=-1)
        g = torch.sigmoid(g)
        return torch.tanh(o), g * state + (1 - g) * torch.tanh(c)
