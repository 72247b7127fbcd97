"""The sequential (Markov) head and the confidence head of DSpark (fact sheet §1.3, §1.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verify_kernels import ops
from verify_kernels.markov import Markov


class MarkovHead(nn.Module):
    """The weights of a `verify_kernels.markov.Markov` as parameters."""

    def __init__(
        self, kind: str, w1: Tensor, w2: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        self.w1, self.w2 = nn.Parameter(w1), nn.Parameter(w2)
        self.weight = None if weight is None else nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def embed(self, previous: Tensor) -> Tensor:
        """previous [N] int64 target ids -> e [N, r]."""
        return ops.embedding(previous, self.w1)

    @property
    def weights(self) -> Markov:
        return Markov(self.kind, self.w1, self.w2, self.weight, self.bias)

    def forward(self, e: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """e [N, r], hidden [N, d], state [N, r] (None at the start of a block) -> (z [N, r], the next state)."""
        weights = self.weights
        return weights.step(e, weights.of_hidden(hidden), state)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's draft is accepted, given that those before it were.

    weight [1, d] or, with the previous token's embedding, [1, d + r]; bias [1]. Reads the hidden state after the final
    norm.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """hidden [N, d], e [N, r] or None -> float32 [N]."""
        x = hidden if self.weight.shape[1] == hidden.shape[1] else torch.cat((hidden, e), dim=-1)
        return ops.linear(x, self.weight, self.bias).squeeze(-1).float()
