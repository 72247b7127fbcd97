"""Functions of latent attention as functions of NumPy arrays: the DSL compiles them for the CPU. Needs the DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.runtime import from_dlpack

from verify_kernels.cute.latent.verify import LatentAttention


@cute.jit
def _tiles(
    segments: cute.Tensor, out: cute.Tensor, at: cutlass.Int32, rank: cutlass.Int32, kernel: cutlass.Constexpr
) -> None:
    out[at, rank, 0], out[at, rank, 1] = kernel.tiles_of(segments, at, rank)


def tiles_of(heads: int, blocks: int, run: int, segments: np.ndarray) -> np.ndarray:
    """segments [S, RECORD] int32 -> [S, blocks, 2] int32: first tile, and the one after the last, of every CTA."""
    kernel = LatentAttention(cutlass.BFloat16, heads, 64, "tree", blocks=blocks, run=run)
    found = np.zeros((len(segments), blocks, 2), np.int32)
    arguments = from_dlpack(segments), from_dlpack(found)
    compiled = cute.compile(_tiles, *arguments, cutlass.Int32(0), cutlass.Int32(0), kernel)
    for at in range(len(segments)):
        for rank in range(blocks):
            compiled(*arguments, at, rank)
    return found
