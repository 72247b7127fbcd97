"""Choosing the largest entries of a vector in registers: no sort, no atomics, the same result every time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """float32 as uint32 keys in the same order, all above 0."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def largest(keys, count):
    """Which of keys [N] uint32 (0: not there) are the `count` largest; equal ones from the front. -> bool [N]"""
    bound = tl.sum(keys * 0, axis=0).to(tl.uint32)  # the count-th largest, bit by bit
    for i in tl.static_range(32):
        higher = bound | (1 << (31 - i))
        bound = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= count, higher, bound).to(tl.uint32)
    above = keys > bound
    equal = (keys == bound) & (keys > 0)
    room = count - tl.sum(above.to(tl.int32), axis=0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))


@triton.jit
def rank(keys, lanes):
    """Place of each of keys [N] uint32 from the largest down; equal ones by lane. -> int32 [N]"""
    before = (keys[None, :] > keys[:, None]) | ((keys[None, :] == keys[:, None]) & (lanes[None, :] < lanes[:, None]))
    return tl.sum(before.to(tl.int32), axis=1)
