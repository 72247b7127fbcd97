"""Matrix products of the verify pass."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """LM head: x [T, H], weight [V, H] -> float32 [T, V] (rounded to x's dtype first, as the product is)."""
    return F.linear(x, weight).float()


def greedy_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """LM head and arg-max: x [T, H], weight [V, H] -> (ids [T] int64, their logits [T] float32).

    Ties go to the lowest id. A row that holds a NaN returns NaN as its logit. Nothing of size T x V has to be kept.
    """
    best, ids = F.linear(x, weight).max(dim=-1)
    return ids, best.float()
