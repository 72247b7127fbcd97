"""Functions of the expert kernels as functions of NumPy arrays: the DSL compiles them for the CPU. Needs the DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.runtime import from_dlpack

from verify_kernels.cute.moe.kernel import tokens_below


@cute.jit
def _tokens_below(masks: cute.Tensor, out: cute.Tensor, words: cutlass.Constexpr[int]) -> None:
    for e in range(masks.shape[1]):
        for t in range(out.shape[1]):
            out[e, t] = tokens_below(masks, e, t, words)


def tokens_before_each(masks: np.ndarray) -> np.ndarray:
    """masks [words, E] int32 -> [E, 32 * words] int32."""
    words, experts = masks.shape
    found = np.zeros((experts, 32 * words), np.int32)
    _tokens_below(from_dlpack(masks), from_dlpack(found), words)
    return found
