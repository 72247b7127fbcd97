"""Compiling the kernels of Kimi delta attention."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from verify_kernels.cute.fake import DTYPES, compact, f32, i32, i64, size, stream, stride, strided
from verify_kernels.cute.recurrence.commit import KdaCommit
from verify_kernels.cute.recurrence.norm import GatedNorm
from verify_kernels.cute.recurrence.verify import DIM, WIDTH, KdaVerify
from verify_kernels.cute.variants import GatedNormVariant, KdaCommitVariant, KdaVerifyVariant


def compiled(variant: KdaVerifyVariant | KdaCommitVariant | GatedNormVariant, options: str) -> Any:
    """The DSL's compiled function of a variant."""
    dtype = DTYPES[variant.dtype]
    if isinstance(variant, KdaVerifyVariant):
        kernel = KdaVerify(dtype, variant.nodes, variant.columns, variant.tree)
        arguments = verify_arguments(variant, dtype)
    elif isinstance(variant, KdaCommitVariant):
        kernel, arguments = KdaCommit(dtype, variant.nodes), commit_arguments(dtype)
    else:
        kernel, arguments = GatedNorm(dtype), norm_arguments(dtype)
    return cute.compile(kernel, *arguments, stream(), options=options)


def verify_arguments(variant: KdaVerifyVariant, dtype: Any) -> tuple[Any, ...]:
    """Of `KdaVerify.__call__`."""
    tokens, heads, channels, requests = size(), size(), size(divisibility=4), size()

    def matrix(columns: Any, even: int) -> Any:
        """Rows may lie apart: slices of one product."""
        return strided(dtype, (tokens, columns), (stride(even), 1), assumed_align=dtype.width // 8 * even)

    state = strided(f32, (size(), heads, DIM, DIM), (stride(4), DIM * DIM, DIM, 1), assumed_align=16)
    window = strided(dtype, (size(), WIDTH - 1, channels), (stride(4), stride(4), 1), assumed_align=8)
    record = compact(f32, requests, size(), heads, DIM)
    return (
        matrix(channels, 2), matrix(size(divisibility=4), 2), matrix(heads, 1),
        compact(f32, channels, WIDTH), compact(f32, heads), compact(f32, heads, DIM), f32(0.0), f32(1.0),
        state, window, compact(i64, requests), compact(i32, requests), compact(i32, size()),
        compact(i64, tokens) if variant.tree else None,
        compact(dtype, tokens, heads, DIM), compact(dtype, requests, size(), channels), record, record, record, i32(0),
    )  # fmt: skip


def commit_arguments(dtype: Any) -> tuple[Any, ...]:
    """Of `KdaCommit.__call__`."""
    layers, heads, channels, requests, nodes = size(), size(), size(divisibility=4), size(), size()

    def rows(count: Any) -> Any:
        return strided(dtype, (layers, size(), count, channels), (stride(4), stride(4), stride(4), 1), assumed_align=8)

    def heads_of(*shape: Any, inner: tuple[Any, ...]) -> Any:
        return strided(f32, (layers, *shape), (stride(4), stride(4), *inner, 1), assumed_align=16)

    state = heads_of(size(), heads, DIM, DIM, inner=(DIM * DIM, DIM))
    record = heads_of(requests, nodes, heads, DIM, inner=(stride(4), DIM))
    index, path = compact(i64, requests), compact(i64, requests, size(), align=8)
    return state, rows(WIDTH - 1), rows(nodes), record, record, record, index, index, path


def norm_arguments(dtype: Any) -> tuple[Any, ...]:
    """Of `GatedNorm.__call__`."""
    tokens, heads = size(), size()
    rows = compact(dtype, tokens, heads, DIM)
    gate = strided(dtype, (tokens, heads, DIM), (stride(2), stride(2), 1), assumed_align=4)
    return rows, compact(f32, DIM, align=16), gate, f32(0.0), rows
