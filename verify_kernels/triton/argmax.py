"""Arg-max of logits in two small launches that read them once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["arg_max"]

BLOCK = 4096  # logits of a program


@triton.jit
def _of_blocks(logits, stride, best, vocab, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == 0, 0.0, x)  # the two zeros are equal
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the floats
    key = tl.where(x != x, 0x7FFFFFFF, key)
    # Above the id, the lowest of which is to win.
    packed = key.to(tl.int64) * 4294967296 + (4294967295 - at.to(tl.int64))
    tl.store(best + row * tl.num_programs(1) + block, tl.max(packed, axis=0))


@triton.jit
def _of_rows(best, ids, values, blocks, N: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    packed = tl.load(best + row * blocks + block, mask=block < blocks, other=-9223372036854775808)
    found = tl.max(packed, axis=0)
    key = (found >> 32).to(tl.int32)
    tl.store(ids + row, 4294967295 - (found & 4294967295))
    tl.store(values + row, tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True))


def arg_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, of logits in 16 or 32 bits; rows may lie apart."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = logits.new_empty(rows, blocks, dtype=torch.int64)
    ids, values = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
    _of_blocks[(rows, blocks)](logits, logits.stride(0), best, vocab, BLOCK=BLOCK, num_warps=8)
    _of_rows[(rows,)](best, ids, values, blocks, N=triton.next_power_of_2(blocks), num_warps=1)
    return ids, values
