"""Compiling the grouped products of a mixture of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute

from verify_kernels.cute.fake import DTYPES, compact, f32, i32, i64, size, stream, stride, strided
from verify_kernels.cute.moe.kernel import Experts
from verify_kernels.cute.moe.pack import PART_BYTES
from verify_kernels.cute.moe.route import Route
from verify_kernels.cute.variants import ExpertsVariant, RouteVariant


def compiled(variant: ExpertsVariant | RouteVariant, options: str) -> Any:
    """The DSL's compiled function of a variant."""
    constants = dataclasses.asdict(variant)
    dtype = (DTYPES | {"float32": f32})[constants.pop("dtype")]
    if isinstance(variant, RouteVariant):
        tokens, picks = size(), variant.top_k
        return cute.compile(
            Route(dtype, **constants),
            strided(dtype, (tokens, variant.experts), (stride(), 1), assumed_align=dtype.width // 8),
            compact(f32, variant.experts) if variant.bias else None,
            compact(f32, tokens, picks, align=4),
            compact(i64, tokens, picks, align=8),
            f32(1.0),
            stream(),
            options=options,
        )
    kernel = Experts(dtype, **constants)
    tokens, inner, picks = size(), size(divisibility=8), variant.top_k
    if variant.kind == "plain":
        stacked = strided(dtype, (variant.experts, size(), inner), (stride(8), stride(8), 1), assumed_align=16)
    else:
        tile = PART_BYTES[variant.kind] * (1 if variant.down else 2)
        shape = (variant.experts, size(), size(), tile)
        stacked = strided(cutlass.Uint8, shape, (stride(16), stride(16), tile, 1), assumed_align=16)
    return cute.compile(
        kernel,
        strided(dtype, (size(), inner), (stride(8), 1), assumed_align=16),
        stacked,
        strided(i64, (tokens, picks), (size(), 1), assumed_align=8),
        None if variant.down else compact(f32, tokens, picks, align=4),
        strided(dtype, (size(), size()), (stride(), 1), assumed_align=2),
        compact(f32, size(), 2, variant.tokens // 8, 128, 4),
        compact(i32, size()),
        i32(1),
        stream(),
        options=options,
    )
