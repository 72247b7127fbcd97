"""Functions of the expert kernels as functions of NumPy arrays: the DSL compiles them for the CPU. Needs the DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.runtime import from_dlpack

from verify_kernels.cute.moe.dequantize import e2m1_pairs, e4m3_pairs, mxfp4_bytes
from verify_kernels.cute.moe.kernel import following, tokens_below
from verify_kernels.cute.moe.route import ordered


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


@cute.jit
def _walk(tiles: cute.Tensor, out: cute.Tensor, down: cutlass.Constexpr[bool]) -> None:
    which, row, k = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for i in range(out.shape[0]):
        out[i, 0], out[i, 1], out[i, 2] = which, row, k
        which, row, k = following(down, which, row, k, (tiles[0], tiles[1]), tiles[2])


def walk(down: bool, row_tiles: int, k_tiles: int, entries: int, count: int) -> np.ndarray:
    """(entry, row tile, k tile) of the first `count` tiles of the line: [count, 3] int32."""
    found = np.zeros((count, 3), np.int32)
    _walk(from_dlpack(np.array([row_tiles, k_tiles, entries], np.int32)), from_dlpack(found), down)
    return found


@cute.jit
def _keys(words: cute.Tensor, out: cute.Tensor) -> None:
    for i in range(words.shape[0]):
        out[i] = ordered(words[i])


def keys_of(words: np.ndarray) -> np.ndarray:
    """Bits of float32 [N] int32 -> [N] int32."""
    found = np.zeros_like(words)
    _keys(from_dlpack(words), from_dlpack(found))
    return found


@cute.jit
def _pairs(words: cute.Tensor, out: cute.Tensor, fp8: cutlass.Constexpr[bool]) -> None:
    for i in range(words.shape[0]):
        if cutlass.const_expr(fp8):
            out[i, 0], out[i, 1] = e4m3_pairs(words[i])
        else:
            out[i, 0], out[i, 1], out[i, 2], out[i, 3] = e2m1_pairs(words[i])


def pairs_of_words(words: np.ndarray, kind: str) -> np.ndarray:
    """words [N] int32 -> [N, 2 or 4] int32, pairs of bf16 as they come out of the shifts."""
    found = np.zeros((len(words), 2 if kind == "fp8" else 4), np.int32)
    _pairs(from_dlpack(words), from_dlpack(found), kind == "fp8")
    return found


@cute.jit
def _bytes(words: cute.Tensor, out: cute.Tensor) -> None:
    for i in range(words.shape[0]):
        out[i, 0], out[i, 1] = mxfp4_bytes(words[i])


def factors_of_words(words: np.ndarray) -> np.ndarray:
    """words of four scales [N] int32 -> [N, 4] int32, pairs of bf16. Bytes are put together as `prmt` does it."""
    found = np.zeros((len(words), 2), np.int32)
    _bytes(from_dlpack(words), from_dlpack(found))
    low, high = found[:, :1].copy().view(np.uint8), found[:, 1:].copy().view(np.uint8)
    return np.stack((low, high, low, high), -1).reshape(len(words), 16).view(np.int32)
