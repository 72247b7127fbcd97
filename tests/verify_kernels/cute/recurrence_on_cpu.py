"""The delta attention kernels as functions of CPU tensors: the DSL compiles their phases for the CPU, a CTA's threads one
after the other between two barriers. Needs the DSL.

What differs from the GPU: shared memory comes in as tensors, full of NaN; asynchronous copies are plain ones; where eight
lanes' sums meet in shuffles, a thread makes all eight lanes' sums itself (`meet`'s own exchange: `exchanged`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import _FakeTensor as FakeTensor
from torch import Tensor

from verify_kernels.cute.fake import compact, f32, i32
from verify_kernels.cute.recurrence import build
from verify_kernels.cute.recurrence.commit import COLUMNS, KdaCommit
from verify_kernels.cute.recurrence.norm import GatedNorm
from verify_kernels.cute.recurrence.verify import CHUNK, DIM, WIDTH, KdaVerify

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class Verify(KdaVerify):
    on_gpu = False

    @cute.jit
    def cta(
        self,
        x: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        conv: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        lower_bound: Float32,
        lift: Float32,
        state: cute.Tensor,
        window: cute.Tensor,
        rows: cute.Tensor,
        context_lens: cute.Tensor,
        offsets: cute.Tensor,
        ancestors: cute.Tensor | None,
        y: cute.Tensor,
        inputs: cute.Tensor,
        keys: cute.Tensor,
        log_decay: cute.Tensor,
        updates: cute.Tensor,
        taps: cute.Tensor,
        lines: cute.Tensor,
        beta: cute.Tensor,
        both: cute.Tensor,
        faded: cute.Tensor,
        gates: cute.Tensor,
        squares: cute.Tensor,
        values: cute.Tensor,
        value_taps: cute.Tensor,
        own: cute.Tensor,
        system: cute.Tensor,
        scores: cute.Tensor,
        part: Int32,
        head: Int32,
        request: Int32,
    ) -> None:
        solved, reads = self.after_gates(gates)
        first = offsets[request]
        count = offsets[request + 1] - first
        row, started = rows[request], context_lens[request] > 0
        weights = cute.make_rmem_tensor(cute.make_layout((WIDTH, 4, 2)), Float32)
        bias = cute.make_rmem_tensor(4, Float32)
        for thread in cutlass.range(self.threads, unroll=1):
            self.fetch_taps(conv, part, head, state.shape[1], value_taps, thread)
            self.fetch_state(state[row, head, None, None], started, part, own, thread)
            self.find_taps(ancestors, first, count, started, taps, lines, thread)
        for thread in cutlass.range(self.threads, unroll=1):
            self.read_weights(conv, dt_bias[head, None], part, head, weights, bias, thread, state.shape[1])
            self.convolve(
                x, raw_gate, raw_beta, lower_bound, window[row, None, None], taps, weights, value_taps, bias,
                cute.math.exp(a_log[head]), first, count, part, head, inputs[request, None, None], log_decay[request, None, head, None], both, gates, squares,
                values, beta, thread,
            )  # fmt: skip
        for thread in cutlass.range(self.threads, unroll=1):
            self.fade(lines, both, faded, gates, squares, keys[request, None, head, None], count, part, lift, thread)
        for thread in cutlass.range(self.threads, unroll=1):
            self.multiply(
                own, lines, both, faded, values, beta, system, scores, solved, reads, count, 1.0 / lift, thread
            )
        for t0 in cutlass.range(0, count, CHUNK, unroll=1):
            for thread in cutlass.range(self.threads, unroll=1):
                self.solve(system, solved, t0, thread)
            if t0 + CHUNK < count:
                for thread in cutlass.range(self.threads, unroll=1):
                    self.carry(system, solved, t0, count, thread)
        for thread in cutlass.range(self.threads, unroll=1):
            self.write(
                scores, solved, reads, y[None, head, None], updates[request, None, head, None], first, count, part, thread
            )

    @cute.jit
    def hold(self, rows: cute.Tensor, first: Int32, held: cute.Tensor, thread: Int32) -> None:
        _HELD[:] = rows, first

    @cute.jit
    def products(
        self,
        held: cute.Tensor,
        both: cute.Tensor,
        t0: Int32,
        thread: Int32,
        sums: cute.Tensor,
        groups: cutlass.Constexpr,
    ) -> None:
        rows, first = _HELD
        count = cute.size(sums)
        one = cute.make_rmem_tensor(count, Float32)
        total = cute.make_rmem_tensor(count, Float32)
        total.fill(0.0)
        for lane in cutlass.range(8, unroll=1):
            of = thread // 8 * 8 + lane
            KdaVerify.hold(self, rows, first, held, of)
            KdaVerify.products(self, held, both, t0, of, one, groups)
            for i in cutlass.range(count, unroll=1):
                total[i] = total[i] + one[i]
        for i in cutlass.range_constexpr(count // 8):
            sums[i] = total[thread % 8 * (count // 8) + i]

    @cute.jit
    def meet(self, sums: cute.Tensor) -> None:
        pass

    @cute.jit
    def total(self, parts: cute.Tensor, lane: Int32) -> Float32:
        found = Float32(0.0)
        for i in cutlass.range_constexpr(32):
            found += parts[i]
        return found


_HELD: list[Any] = []


class Norm(GatedNorm):
    @cute.jit
    def all_rows(self, x: cute.Tensor, weight: cute.Tensor, gate: cute.Tensor, eps: Float32, out: cute.Tensor) -> None:
        for row in cutlass.range(x.shape[0] * x.shape[1], unroll=1):
            for lane in cutlass.range(32, unroll=1):
                self.row(x, weight, gate, eps, out, row, lane)

    @cute.jit
    def total(self, values: cute.Tensor, lane: Int32) -> Float32:
        square = Float32(0.0)
        for i in cutlass.range(DIM, unroll=1):
            square += values[i].to(Float32) * values[i].to(Float32)
        return square


class Commit(KdaCommit):
    @cute.jit
    def cta(
        self,
        state: cute.Tensor,
        window: cute.Tensor,
        inputs: cute.Tensor,
        keys: cute.Tensor,
        log_decay: cute.Tensor,
        updates: cute.Tensor,
        rows: cute.Tensor,
        context_lens: cute.Tensor,
        path: cute.Tensor,
        faded: cute.Tensor,
        taken: cute.Tensor,
        total: cute.Tensor,
        nodes: cute.Tensor,
        part: Int32,
        head: Int32,
        index: Int32,
    ) -> None:
        layer, request = index // rows.shape[0], index % rows.shape[0]
        started = context_lens[request] > 0
        row = rows[request]
        mine = state[layer, row, head, None, None]
        own = cute.make_rmem_tensor(cute.make_layout((4, COLUMNS // 4)), Float32)
        count = Int32(0)
        for thread in cutlass.range(DIM, unroll=1):
            count = self.read_path(path[request, None], nodes, thread)
        for thread in cutlass.range(DIM, unroll=1):
            self.fade(
                keys[layer, request, None, head, None], log_decay[layer, request, None, head, None],
                updates[layer, request, None, head, None], nodes, count, part, faded, taken, total, thread,
            )  # fmt: skip
            if part == 0:
                self.slide(
                    window[layer, row, None, None], inputs[layer, request, None, None], nodes, count, started, head,
                    state.shape[2], thread,
                )  # fmt: skip
        for thread in cutlass.range(DIM, unroll=1):
            self.read_state(mine, started, part, own, thread)
            if count > 0 or not started:
                self.advance(mine, own, faded, taken, total, count, part, thread)


_COMPILED: dict[Any, Any] = {}


def _on_cpu(argument: Any) -> Any:
    if not isinstance(argument, FakeTensor):
        return argument
    shape, strides, align = argument.shape, argument.stride, argument._assumed_align
    return FakeTensor(argument.element_type, shape, stride=strides, memspace=cute.AddressSpace.generic, assumed_align=align)


def _compiled(variant: Any, arguments: tuple[Any, ...], kernel: Any, shared: tuple[Tensor, ...]) -> Any:
    if variant not in _COMPILED:
        fakes = (*arguments, *(compact(i32 if t.dtype == torch.int32 else f32, *t.shape, align=16) for t in shared))
        fakes = [_on_cpu(a) for a in fakes]
        options = "--enable-tvm-ffi"
        _COMPILED[variant] = cute.compile(kernel.cta, *fakes, i32(0), i32(0), i32(0), options=options)
    return _COMPILED[variant]


def _shared(*shape: int) -> Tensor:
    return torch.empty(shape)


def _spoil(shared: tuple[Tensor, ...]) -> None:
    for t in shared:
        t.fill_(float("nan") if t.is_floating_point() else 1 << 30)


def verify(variant: Any, *arguments: Any) -> None:
    """As the kernel is called (see `KdaVerify.__call__`), without `fresh`. x's dtype may be float32 too."""
    kernel = Verify(DTYPES[variant.dtype], variant.nodes, variant.columns, variant.tree)
    shared = tuple(torch.empty(shape, dtype=torch.int32 if e is i32 else torch.float32) for e, *shape in kernel.shared())
    call = _compiled(variant, build.verify_arguments(variant, kernel.dtype)[:-1], kernel, shared)
    requests, heads = arguments[10].shape[0], arguments[8].shape[1]
    for request in range(requests):
        for head in range(heads):
            for part in range(kernel.parts):
                _spoil(shared)
                call(*arguments, *shared, part, head, request)


def commit(variant: Any, *arguments: Tensor) -> None:
    """As the kernel is called (see `KdaCommit.__call__`)."""
    kernel = Commit(DTYPES[variant.dtype], variant.nodes)
    shared = (
        _shared(variant.nodes, DIM), _shared(variant.nodes, COLUMNS), _shared(DIM),
        torch.empty(variant.nodes, dtype=torch.int32),
    )  # fmt: skip
    call = _compiled(variant, build.commit_arguments(kernel.dtype), kernel, shared)
    layers, heads, requests = arguments[0].shape[0], arguments[0].shape[2], arguments[6].shape[0]
    for index in range(layers * requests):
        for head in range(heads):
            for part in range(DIM // COLUMNS):
                _spoil(shared)
                call(*arguments, *shared, part, head, index)


def norm(variant: Any, *arguments: Any) -> None:
    """As the kernel is called (see `GatedNorm.__call__`)."""
    kernel = Norm(DTYPES[variant.dtype])
    if variant not in _COMPILED:
        fakes = [_on_cpu(a) for a in build.norm_arguments(kernel.dtype)]
        _COMPILED[variant] = cute.compile(kernel.all_rows, *fakes, options="--enable-tvm-ffi")
    _COMPILED[variant](*arguments)


def exchanged(sums: np.ndarray) -> np.ndarray:
    """`KdaVerify.meet` with its shuffles, of 32 lanes: [32, values] -> what each is left with [32, values / 8]."""
    lanes, values = np.arange(32), sums.copy()
    for distance in (4, 2, 1):
        half = values.shape[1] // 2
        upper = (lanes & distance != 0)[:, None]
        low, high = values[:, :half], values[:, half:]
        keep, give = np.where(upper, high, low), np.where(upper, low, high)
        values = keep + give[lanes ^ distance]
    return values
