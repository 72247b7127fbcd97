"""Packed weights to bf16 registers: the bits of a 32-bit word moved to where a pair of bf16 has them.

A thread's word is made so by `pack.py` that each pair takes few instructions: the values of a pair lie 16 bits apart. Moved
into place, exponent and mantissa of the small format are the low exponent and the high mantissa bits of bf16, whatever they
are, so that a pair is the value times 2^-126 (e2m1) or 2^-120 (e4m3); one multiplication puts that and the scale right.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MXFP4_SHIFT = 64
"""Kept out of MXFP4's scale factors, which would not all be bf16 with it: sums are multiplied by 2^64 at the end."""


@cute.jit
def e2m1_pairs(word: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four pairs of e2m1, their sign at bit 15 and their exponent and mantissa at bits 8 to 6 of a half. Of a half's 16
    bits the first pair has 15, 8, 7, 6, the second those three places lower, the third six; the fourth has the rest: sign
    14, exponent 13 and 11, mantissa 10."""
    mask = Int32(0x81C081C0 - (1 << 32))
    last = ((word << 1) & Int32(0x80008000 - (1 << 32))) | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    return word & mask, (word << 3) & mask, (word << 6) & mask, last


@cute.jit
def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Two pairs of e4m3, sign at bit 15 and the rest at bits 10 to 4 of a half: the high bytes of the halves, the low."""
    sign, rest = Int32(0x80008000 - (1 << 32)), Int32(0x07F007F0)
    return (word & sign) | ((word >> 4) & rest), ((word << 8) & sign) | ((word << 4) & rest)


@cute.jit
def multiply(pair: Int32, factor: Int32) -> Int32:
    """Product of two pairs of bf16, subnormal numbers included."""
    return cute.arch.inline_ptx("mul.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[pair, factor])


@cute.jit
def e4m3_factor() -> Int32:
    """2^120 as a pair of bf16, in a register."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, 0x7B807B80;", write_only_types=[Int32])


@cute.jit
def mxfp4_bytes(scales: Int32) -> tuple[Int32, Int32]:
    """A word of four scales as `pack.py` stores them -> the low and the high bytes of four bf16: 2^(e8m0 - 127) * 2^126 /
    2^MXFP4_SHIFT."""
    return scales & Int32(0x80808080 - (1 << 32)), scales & 0x7F7F7F7F


@cute.jit
def mxfp4_factor(low: Int32, high: Int32, which: cutlass.Constexpr[int]) -> Int32:
    """The bf16 of byte `which`, as a pair."""
    order = f"0x{(4 + which) << 4 | which:02x}{(4 + which) << 4 | which:02x}"
    code = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[low, high])
