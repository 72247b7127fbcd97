"""RMSNorm of each head's outputs times weight and sigmoid(gate): a warp a row of 128, in one launch."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from verify_kernels.cute.recurrence.verify import DIM

THREADS = 128


class GatedNorm:
    """See `verify_kernels.reference.recurrence.gated_rms_norm`."""

    def __init__(self, dtype: type[cutlass.Numeric]) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [N, H, 128]
        weight: cute.Tensor,  # [128] float32
        gate: cute.Tensor,  # [N, H, 128], an even number of elements between tokens
        eps: Float32,
        out: cute.Tensor,  # [N, H, 128]
        stream: Any,
    ) -> None:
        self.kernel(x, weight, gate, eps, out).launch(
            grid=[cute.ceil_div(x.shape[0] * x.shape[1], THREADS // 32), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, gate: cute.Tensor, eps: Float32, out: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * (THREADS // 32) + thread // 32
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if row < x.shape[0] * x.shape[1]:
            self.row(x, weight, gate, eps, out, row, thread % 32)

    @cute.jit
    def row(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        gate: cute.Tensor,
        eps: Float32,
        out: cute.Tensor,
        row: Int32,
        lane: Int32,
    ) -> None:
        token, head = row // x.shape[1], row % x.shape[1]
        factors = cute.make_rmem_tensor(4, Float32)
        values = cute.make_rmem_tensor(4, self.dtype)
        raw = cute.make_rmem_tensor(4, self.dtype)
        cute.autovec_copy(cute.tiled_divide(weight, (4,))[None, lane], factors)
        cute.autovec_copy(cute.tiled_divide(x[token, head, None], (4,))[None, lane], values)
        pairs, kept = cute.tiled_divide(gate[token, head, None], (2,)), cute.tiled_divide(raw, (2,))
        for i in cutlass.range_constexpr(2):
            cute.autovec_copy(pairs[None, 2 * lane + i], kept[None, i])
        scale = cute.math.rsqrt(self.total(x[token, head, None], lane) / DIM + eps)
        for i in cutlass.range_constexpr(4):
            found = values[i].to(Float32) * scale * factors[i] / (1.0 + cute.math.exp(-raw[i].to(Float32)))
            values[i] = found.to(self.dtype)
        cute.autovec_copy(values, cute.tiled_divide(out[token, head, None], (4,))[None, lane])

    @cute.jit
    def total(self, row: cute.Tensor, lane: Int32) -> Float32:
        """The sum of a row's squares, in every lane."""
        values = cute.make_rmem_tensor(4, self.dtype)
        cute.autovec_copy(cute.tiled_divide(row, (4,))[None, lane], values)
        square = Float32(0.0)
        for i in cutlass.range_constexpr(4):
            square += values[i].to(Float32) * values[i].to(Float32)
        return cute.arch.warp_reduction_sum(square)
