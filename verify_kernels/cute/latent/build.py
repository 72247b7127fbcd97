"""Compiling verify attention over latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute

from verify_kernels.cute.attention.schedule import RECORD
from verify_kernels.cute.fake import DTYPES, compact, f32, i32, i64, size, stream
from verify_kernels.cute.latent.verify import RANK, TILE, WIDTH, LatentAttention
from verify_kernels.cute.variants import LatentVariant


def compiled(variant: LatentVariant, options: str) -> Any:
    """The DSL's compiled function of a variant."""
    constants = dataclasses.asdict(variant)
    dtype = DTYPES[constants.pop("dtype")]
    tokens, slots = size(), size()
    queries = compact(dtype, tokens, variant.heads, WIDTH)
    out = compact(dtype, tokens, variant.heads, RANK)
    pages = compact(dtype, size(), variant.page_size, 1, WIDTH)
    partial, stats = compact(f32, slots, TILE, RANK), compact(f32, slots, TILE, 2)
    table, masks, records = compact(i32, size(), size()), compact(i64, tokens), compact(i32, size(), RECORD)
    inputs = (queries, pages, table, masks, records, out, partial, stats, f32(1.0), i32(0))
    return cute.compile(LatentAttention(dtype, **constants), *inputs, stream(), options=options)
