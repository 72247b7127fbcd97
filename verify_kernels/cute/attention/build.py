"""Compiling the attention kernels, the schedule and both write sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute

from verify_kernels.cute.attention.append import AppendKV
from verify_kernels.cute.attention.commit import CommitPath
from verify_kernels.cute.attention.plan import Plan
from verify_kernels.cute.attention.schedule import RECORD
from verify_kernels.cute.attention.verify import VerifyAttention
from verify_kernels.cute.fake import DTYPES, compact, f32, i32, i64, size, stream, stride, strided
from verify_kernels.cute.variants import AppendVariant, CommitVariant, PlanVariant, Variant


def compiled(variant: Variant | PlanVariant | AppendVariant | CommitVariant, options: str) -> Any:
    """The DSL's compiled function of a variant."""
    if isinstance(variant, PlanVariant):
        arguments = _plan(variant)
    elif isinstance(variant, CommitVariant):
        arguments = _commit(variant)
    elif isinstance(variant, AppendVariant):
        arguments = _append(variant)
    else:
        arguments = _verify(variant)
    return cute.compile(*arguments, stream(), options=options)


def _plan(variant: PlanVariant) -> tuple[Any, ...]:
    plan = Plan(**dataclasses.asdict(variant))
    return plan, compact(i32, size()), compact(i32, size()), compact(i32, size(), RECORD), i32(1), i32(0)


def _commit(variant: CommitVariant) -> tuple[Any, ...]:
    cache = strided(i32, (size(), size(), size(), variant.words), (stride(4), stride(4), variant.words, 1), assumed_align=16)
    table, index, path = compact(i32, size(), size()), compact(i64, size()), compact(i64, size(), size())
    return CommitPath(variant.words), cache, cache if variant.values else None, table, index, path


def _append(variant: AppendVariant) -> tuple[Any, ...]:
    constants = dataclasses.asdict(variant)
    dtype = DTYPES[constants.pop("dtype")]
    tokens, heads, kv_heads, head_dim = size(), variant.heads, variant.kv_heads, variant.head_dim

    def rows(heads: int) -> Any:
        return strided(dtype, (tokens, heads, head_dim), (stride(8), head_dim, 1), assumed_align=16)

    cache = strided(
        cutlass.Uint8 if variant.fp8 else dtype,
        (size(), size(), kv_heads, head_dim),
        (stride(16 if variant.fp8 else 8), kv_heads * head_dim, head_dim, 1),
        assumed_align=16,
    )
    scales = compact(f32, kv_heads) if variant.fp8 else None
    index = compact(i64, tokens)
    weight = compact(dtype, head_dim, align=16) if variant.norm else None
    table, out = compact(f32, size(), head_dim), compact(dtype, tokens, heads, head_dim)
    kernel = AppendKV(dtype, **constants)
    inputs = (rows(heads), rows(kv_heads), rows(kv_heads), cache, cache, index, index, table, weight, weight)
    return kernel, *inputs, out, f32(0.0), scales, scales


def _verify(variant: Variant) -> tuple[Any, ...]:
    constants = dataclasses.asdict(variant)
    dtype = DTYPES[constants.pop("dtype")]
    tokens, slots = size(), size()
    queries = compact(dtype, tokens, variant.heads, variant.head_dim)
    stored = cutlass.Uint8 if variant.fp8 else dtype
    cache = compact(stored, size(), variant.page_size, variant.kv_heads, variant.head_dim)
    scales = compact(f32, variant.kv_heads) if variant.fp8 else None
    partial, stats = compact(f32, slots, variant.rows, variant.head_dim), compact(f32, slots, variant.rows, 2)
    table, masks, records = compact(i32, size(), size()), compact(i64, tokens), compact(i32, size(), RECORD)
    kernel = VerifyAttention(dtype, **constants)
    inputs = (queries, cache, cache, table, masks, records, queries, partial, stats)
    return kernel, *inputs, f32(1.0), f32(0.0), i32(0), scales, scales
