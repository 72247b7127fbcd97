"""Compiling the small-T linear."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute

from verify_kernels.cute.fake import DTYPES, compact, f32, i32, size, stream, stride, strided
from verify_kernels.cute.linear.kernel import Linear
from verify_kernels.cute.linear.pack import BYTES
from verify_kernels.cute.variants import LinearVariant


def compiled(variant: LinearVariant, options: str) -> Any:
    """The DSL's compiled function of a variant."""
    constants = dataclasses.asdict(variant)
    dtype = DTYPES[constants.pop("dtype")]
    tokens, rows, k = size(), size(), size(divisibility=8)

    def matrix(*shape: Any, align: int) -> Any:
        """Rows may lie apart: a slice of another product."""
        return strided(dtype, shape, (stride(align), 1), assumed_align=2 * align)

    return cute.compile(
        Linear(dtype, **constants),
        matrix(tokens, k, align=8),
        matrix(rows, k, align=8) if variant.kind == "plain" else compact(cutlass.Uint8, size(), size(), BYTES),
        matrix(tokens, size(), align=1),
        compact(f32, size(), -(-variant.rows // 64), variant.tokens // 8, 128, 4),
        compact(i32, size()),
        compact(dtype, rows) if variant.bias else None,
        matrix(tokens, rows, align=1) if variant.residual else None,
        compact(f32, size(), tokens) if variant.rms_in else None,
        f32(0.0),
        compact(dtype, rows) if variant.rms_out else None,
        matrix(tokens, rows, align=1) if variant.rms_out else None,
        compact(f32, size(), tokens) if variant.rms_out else None,
        i32(1),
        i32(1),
        stream(),
        options=options,
    )
