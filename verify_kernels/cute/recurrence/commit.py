"""The states of all layers moved past the accepted path, with the convolution's windows, in one launch.

A CTA takes 32 value columns (rows of the state) of a head of a request in a layer: each of its four warps reads 8 rows of
512 bytes at once, before anything else, and writes them once. What comes between, for a path of nodes: every key fades by
the log-decays after it, and each row adds the path's updates times those keys. So a state's bytes are moved twice, which
is what takes the time: 6 heads, 69 layers and one request are 27 MB, 54 MB moved, 13.6 us at 4.0 TB/s, and 10 MB at most
of records are read beside.

Launched without programmatic dependent launch, so that nothing reads states while they are written.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from verify_kernels.cute.recurrence.verify import DIM, WIDTH

THREADS = DIM
COLUMNS = 32
ROWS = COLUMNS // (THREADS // 32)  # of a warp
AHEAD = 8  # nodes that are read at once


class KdaCommit:
    """One compiled variant. nodes: the longest path."""

    def __init__(self, dtype: type[cutlass.Numeric], nodes: int) -> None:
        if not 1 <= nodes <= 64:
            raise ValueError(f"kda_commit: nodes: found {nodes}, allowed: 1 to 64")
        self.dtype, self.nodes = dtype, nodes

    @cute.jit
    def __call__(
        self,
        state: cute.Tensor,  # [layers, rows, H, D, D] float32
        window: cute.Tensor,  # [layers, rows, 3, 3 H D]
        inputs: cute.Tensor,  # [layers, R, n, 3 H D]
        keys: cute.Tensor,  # [layers, R, n, H, D] float32
        log_decay: cute.Tensor,  # [layers, R, n, H, D] float32
        updates: cute.Tensor,  # [layers, R, n, H, D] float32
        rows: cute.Tensor,  # [R] int64
        context_lens: cute.Tensor,  # [R] int64
        path: cute.Tensor,  # [R, a] int64
        stream: Any,
    ) -> None:
        self.kernel(state, window, inputs, keys, log_decay, updates, rows, context_lens, path).launch(
            grid=[DIM // COLUMNS, state.shape[2], state.shape[0] * rows.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
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
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        part, head, index = cute.arch.block_idx()
        layer, request = index // rows.shape[0], index % rows.shape[0]
        smem = cutlass.memory.SmemAllocator()
        faded = smem.allocate_tensor(Float32, cute.make_layout((self.nodes, DIM), stride=(DIM, 1)), 16)
        taken = smem.allocate_tensor(Float32, cute.make_layout((self.nodes, COLUMNS), stride=(COLUMNS, 1)), 16)
        total = smem.allocate_tensor(Float32, cute.make_layout(DIM), 16)
        nodes = smem.allocate_tensor(Int32, cute.make_layout(self.nodes), 16)

        started = context_lens[request] > 0
        row = rows[request]
        own = cute.make_rmem_tensor(cute.make_layout((4, ROWS)), Float32)
        mine = state[layer, row, head, None, None]
        self.read_state(mine, started, part, own, thread)
        count = self.read_path(path[request, None], nodes, thread)
        cute.arch.sync_threads()
        self.fade(
            keys[layer, request, None, head, None], log_decay[layer, request, None, head, None],
            updates[layer, request, None, head, None], nodes, count, part, faded, taken, total, thread,
        )  # fmt: skip
        if part == 0:
            self.slide(
                window[layer, row, None, None], inputs[layer, request, None, None], nodes, count, started, head,
                state.shape[2], thread,
            )  # fmt: skip
        cute.arch.sync_threads()
        if count > 0 or not started:
            self.advance(mine, own, faded, taken, total, count, part, thread)

    @cute.jit
    def row_of(self, part: Int32, r: int, thread: Int32) -> Int32:
        return part * COLUMNS + thread // 32 * ROWS + r

    @cute.jit
    def read_state(
        self, state: cute.Tensor, started: cutlass.Boolean, part: Int32, own: cute.Tensor, thread: Int32
    ) -> None:
        """own [4, ROWS] from state [Dv, Dk]; zeros for a request that begins."""
        own.fill(0.0)
        if started:
            for r in cutlass.range_constexpr(ROWS):
                values = state[self.row_of(part, r, thread), None]
                cute.autovec_copy(cute.tiled_divide(values, (4,))[None, thread % 32], own[None, r])

    @cute.jit
    def read_path(self, path: cute.Tensor, nodes: cute.Tensor, thread: Int32) -> Int32:
        """nodes: the path's; returns how many they are."""
        count = Int32(0)
        for i in cutlass.range(path.shape[0], unroll=4):
            if path[i] >= Int64(0):
                count += 1
        if thread < count:
            nodes[thread] = path[thread].to(Int32)
        return count

    @cute.jit
    def fade(
        self,
        keys: cute.Tensor,
        log_decay: cute.Tensor,
        updates: cute.Tensor,
        nodes: cute.Tensor,
        count: Int32,
        part: Int32,
        faded: cute.Tensor,
        taken: cute.Tensor,
        total: cute.Tensor,
        thread: Int32,
    ) -> None:
        """A thread a channel, from the path's end to its root: faded [nodes, D]; total [D]: the state's own decay. taken
        [nodes, COLUMNS]: the path's updates."""
        key = cute.make_rmem_tensor(AHEAD, Float32)
        gate = cute.make_rmem_tensor(AHEAD, Float32)
        after = Float32(0.0)
        for begin in cutlass.range(0, count, AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                at = count - 1 - begin - i
                key[i], gate[i] = Float32(0.0), Float32(0.0)
                if at >= 0:
                    key[i], gate[i] = keys[nodes[at], thread], log_decay[nodes[at], thread]
            for i in cutlass.range_constexpr(AHEAD):
                at = count - 1 - begin - i
                if at >= 0:
                    faded[at, thread] = key[i] * cute.math.exp(after)
                after += gate[i]
        total[thread] = cute.math.exp(after)
        for i in cutlass.range(thread // COLUMNS, count, THREADS // COLUMNS, unroll=2):
            taken[i, thread % COLUMNS] = updates[nodes[i], part * COLUMNS + thread % COLUMNS]

    @cute.jit
    def slide(
        self,
        window: cute.Tensor,
        inputs: cute.Tensor,
        nodes: cute.Tensor,
        count: Int32,
        started: cutlass.Boolean,
        head: Int32,
        heads: Int32,
        thread: Int32,
    ) -> None:
        """The newest inputs of a head's queries, keys and values: of the path, then of the window before."""
        seen = cute.make_rmem_tensor(WIDTH - 1, self.dtype)
        for which in cutlass.range_constexpr(3):
            channel = (which * heads + head) * DIM + thread
            for w in cutlass.range_constexpr(WIDTH - 1):
                at = count + w - (WIDTH - 1)
                seen[w] = self.dtype(0.0)
                if at >= 0:
                    seen[w] = inputs[nodes[at], channel]
                elif started:
                    seen[w] = window[count + w, channel]
            for w in cutlass.range_constexpr(WIDTH - 1):
                window[w, channel] = seen[w]

    @cute.jit
    def advance(
        self,
        state: cute.Tensor,
        own: cute.Tensor,
        faded: cute.Tensor,
        taken: cute.Tensor,
        total: cute.Tensor,
        count: Int32,
        part: Int32,
        thread: Int32,
    ) -> None:
        warp, lane = thread // 32, thread % 32
        key = cute.make_rmem_tensor(4, Float32)
        update = cute.make_rmem_tensor(ROWS, Float32)
        cute.autovec_copy(cute.tiled_divide(total, (4,))[None, lane], key)
        for r in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(4):
                own[i, r] = own[i, r] * key[i]
        for j in cutlass.range(count, unroll=2):
            cute.autovec_copy(cute.tiled_divide(faded[j, None], (4,))[None, lane], key)
            cute.autovec_copy(cute.tiled_divide(taken[j, None], (ROWS,))[None, warp], update)
            for r in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(4):
                    own[i, r] = own[i, r] + update[r] * key[i]
        for r in cutlass.range_constexpr(ROWS):
            values = state[self.row_of(part, r, thread), None]
            cute.autovec_copy(own[None, r], cute.tiled_divide(values, (4,))[None, lane])
