"""How weights lie in memory, where an operation asks for more than a checkpoint's own order."""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 8
"""Rows of gate, then rows of up, that lie together: see `interleave`."""


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [N, K] -> [2 N, K] as `ops.linear_silu_and_mul` takes them: 8 rows of gate, 8 rows of up, and so on.

    One thread of a Hopper matrix product holds rows r and r + 8, so it holds both of a channel. Raises ValueError where N
    is no multiple of 8.
    """
    n, k = gate.shape
    if n % SIDE:
        raise ValueError(f"gate, up: found {n} rows each, allowed: multiples of {SIDE}")
    return torch.stack([gate.view(n // SIDE, SIDE, k), up.view(n // SIDE, SIDE, k)], dim=1).view(2 * n, k)


def apart(both: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up [N, K] again, from `interleave`."""
    gate, up = both.unflatten(0, (-1, 2, SIDE)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
