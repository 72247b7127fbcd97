"""e4m3 to bf16 in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Two pairs of e4m3, of the high bytes of a word's halves and of the low. With the sign at bit 15 of a half and the
    rest at bits 10 to 4, they are bf16 of the values times 2^-120."""
    sign, rest = Int32(0x80008000 - (1 << 32)), Int32(0x07F007F0)
    return (word & sign) | ((word >> 4) & rest), ((word << 8) & sign) | ((word << 4) & rest)


@cute.jit
def multiply(pair: Int32, factor: Int32) -> Int32:
    """Product of two pairs of bf16, subnormal numbers included."""
    return cute.arch.inline_ptx(
        "mul.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[pair, factor]
    )


@cute.jit
def e4m3_factor() -> Int32:
    """2^120 as a pair of bf16, in a register."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, 0x7B807B80;", write_only_types=[Int32])
