"""Tensors that stand for a kernel's arguments while it is compiled: dtype, rank and alignment, no memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

f32, i32, i64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}

size = cute.sym_int32  # any number
strided = make_fake_tensor  # (dtype, shape, strides, assumed_align)


def stride(divisibility: int = 1) -> Any:
    """64 bits: a cache or a weight may hold more than 2^31 elements."""
    return cute.sym_int64(divisibility=divisibility)


def compact(dtype: Any, *shape: Any, align: int | None = None) -> Any:
    """Row-major without gaps. A vector is as aligned as its elements, the rest to 16 bytes, unless `align` says else."""
    align = align or (16 if len(shape) > 1 else dtype.width // 8)
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)


def stream() -> Any:
    """The caller's current stream."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
