"""Kimi delta attention (KDA) over new tokens that may be rejected, for Hopper (sm_90a): one launch from the projections
to the outputs, the states only read; see `verify_kernels.reference.recurrence`, whose letters are used here.

A CTA takes some value columns (rows of the state, which do not meet) of a request's head, and reads them once, into
registers, before it waits for the projections. Its threads then make, for all nodes, the convolution of queries and keys
with SiLU, the gates and the sums of log-decays to every node, and a warp multiplies the state with all queries and keys
at once: a thread has 4 rows and 16 of 128 channels, so that 8 lanes' sums meet in shuffles.

**Delta form, not token by token.** A step through the state is decay, read, update, read: 4 operations an element and
node, each waiting for a sum across lanes, and along a tree every leaf's line anew. With the updates u as unknowns the
state is multiplied once for the whole tree, 2 operations an element and node without a wait; what is left is a system of
nodes x nodes, masked by ancestry. For 8, 16, 32 nodes of a head in thousands of operations, in 2 parts of 64 columns:

                                            8        16        32
    token by token, a chain               524      1049      2097   (a tree: as many steps as its lines have nodes)
    delta form                            271       574      1278   (keys with keys and queries twice, once a part)

**Exponents.** exp(G_t - G_j) of node t and its ancestor j is made of two factors, so that the products are those of two
matrices: k_t D_t and k_j / D_j with D = lift * exp(G). `lift`, a power of two, keeps both within float32: up to 16
nodes at the bound of -5 it is 1, and 2^111 for 32. Scaling by it is exact. exp(G) is exp(G / 2) squared, which does not
vanish on its way.

**Budget**, bytes of shared memory and registers a thread (without spills): 8 nodes x 8 columns 20 KiB, 16 x 16 39 KiB,
32 x 64 89 KiB; up to 168 registers.

**Floors and predictions, before any measurement**, one layer of a TP16 rank of Kimi-K3 (6 heads), us. Floor: the larger
of states' bytes / 4.5 TB/s and 4 operations (2 multiply-adds) an element and node at 60 TFLOP/s of float32. Predicted,
by `eval.bench_recurrence.predicted_us`, as launched after one another within a graph.

| T | R=1: floor | predicted | R=8: floor | predicted | R=32: floor | predicted |
|---|---|---|---|---|---|---|

Of one request nothing is bound by bytes or operations: launch, the projections' way from L2 (0.5 us), five barriers and
the nodes' chain of dependent updates are.

**Not fused**: the norm of the outputs needs all value columns of a head, which several CTAs hold; exchanging its sums in
a cluster would bind 8 or 16 CTAs to one GPC. It is a launch of its own (`norm.py`).

Launched with programmatic dependent launch; before `griddepcontrol.wait` only weights, states and the pass's own tables
are read, in the pass's first layer (`fresh`) nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

DIM = 128  # channels of a head
WIDTH = 4  # taps of the convolution
CHUNK = 8  # nodes whose products with a row are summed together, with key and query
TILE = 4  # rows of the state, or keys, in a thread's registers
SHARE = DIM // 8  # channels of a row that one of 8 lanes holds
LOG2_E = 1.4426950408889634
EPS = 1e-6  # under the root of the norms of queries and keys
NOTHING = -WIDTH  # a tap before the request's beginning; -1 - w is row w of the window, others are tokens


class KdaVerify:
    """One compiled variant. nodes: 8, 16 or 32, of which a request may have fewer; columns: values of a head in a CTA, 8,
    16, 32 or 64; tree: ancestors are read, else each request is a chain. Rows of x and of the gate are an even number
    of elements apart."""

    on_gpu = True

    def __init__(self, dtype: type[cutlass.Numeric], nodes: int, columns: int, tree: bool) -> None:
        for name, found, allowed in (("nodes", nodes, (8, 16, 32)), ("columns", columns, (8, 16, 32, 64))):
            if found not in allowed:
                raise ValueError(f"kda_verify: {name}: found {found}, allowed: {', '.join(map(str, allowed))}")
        self.dtype, self.nodes, self.columns, self.tree = dtype, nodes, columns, tree
        self.parts = DIM // columns
        self.words = 4 * dtype.width // 32  # that four elements take
        self.groups = 4 if columns == 64 else 1  # of TILE rows that a warp holds
        self.state_warps = columns // (TILE * self.groups)
        self.warps = 4 if columns == 64 else min(nodes, 16)
        self.threads = 32 * self.warps
        # CTAs on a multiprocessor that registers are kept for.
        self.resident = 16 // self.warps if columns < 64 else 3

    def shared(self) -> tuple[tuple[type[cutlass.Numeric], int, int], ...]:
        """(element, rows, columns) of what lies in shared memory."""
        nodes, columns = self.nodes, self.columns
        integers = ((Int32, nodes, WIDTH), (Int32, nodes, 1))  # taps, lines
        vectors = ((2 * nodes, DIM), (nodes, DIM), (nodes, DIM), (2 * nodes, 32))  # both, faded, gates, squares
        own = ((nodes, columns), (columns, WIDTH), (columns, DIM))  # values, their taps, state
        pairs = ((nodes, nodes), (nodes, nodes))  # system, scores
        return (*integers, *((Float32, *shape) for shape in ((nodes, 1), *vectors, *own, *pairs)))

    def after_gates(self, gates: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """(solved, reads) [nodes, columns], in the gates' room once all sums of them are made."""
        layout = cute.make_layout((self.nodes, self.columns), stride=(self.columns, 1))
        solved = cute.make_tensor(gates.iterator, layout)
        return solved, cute.make_tensor(solved.iterator + self.nodes * self.columns, layout)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [N, 3 H D], rows may be strided
        raw_gate: cute.Tensor,  # [N, H D], likewise
        raw_beta: cute.Tensor,  # [N, H], likewise
        conv: cute.Tensor,  # [3 H D, 4] float32
        a_log: cute.Tensor,  # [H] float32
        dt_bias: cute.Tensor,  # [H, D] float32
        lower_bound: Float32,
        lift: Float32,
        state: cute.Tensor,  # [rows, H, D, D] float32
        window: cute.Tensor,  # [rows, 3, 3 H D]
        rows: cute.Tensor,  # [R] int64
        context_lens: cute.Tensor,  # [R] int32
        offsets: cute.Tensor,  # [R + 1] int32
        ancestors: cute.Tensor | None,  # [N] int64
        y: cute.Tensor,  # [N, H, D]
        inputs: cute.Tensor,  # [R, n, 3 H D]
        keys: cute.Tensor,  # [R, n, H, D] float32
        log_decay: cute.Tensor,  # [R, n, H, D] float32
        updates: cute.Tensor,  # [R, n, H, D] float32
        fresh: Int32,  # 1: the tables may just have been made
        stream: Any,
    ) -> None:
        self.kernel(
            x, raw_gate, raw_beta, conv, a_log, dt_bias, lower_bound, lift, state, window, rows, context_lens, offsets,
            ancestors, y, inputs, keys, log_decay, updates, fresh,
        ).launch(
            grid=[self.parts, state.shape[1], rows.shape[0]],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
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
        fresh: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        part, head, request = cute.arch.block_idx()

        smem = cutlass.memory.SmemAllocator()

        def room(element: type[cutlass.Numeric], rows: int, columns: int) -> cute.Tensor:
            return smem.allocate_tensor(element, cute.make_layout((rows, columns), stride=(columns, 1)), 16)

        taps, lines, beta, both, faded, gates, squares, values, value_taps, own, system, scores = (
            room(*shape) for shape in self.shared()
        )
        solved, reads = self.after_gates(gates)

        if fresh != 0:
            cute.arch.griddepcontrol_wait()
        first = offsets[request]
        count = offsets[request + 1] - first
        row, started = rows[request], context_lens[request] > 0
        self.fetch_taps(conv, part, head, state.shape[1], value_taps, thread)
        cute.arch.cp_async_commit_group()
        self.fetch_state(state[row, head, None, None], started, part, own, thread)
        cute.arch.cp_async_commit_group()
        weights = cute.make_rmem_tensor(cute.make_layout((WIDTH, 4, 2)), Float32)
        bias = cute.make_rmem_tensor(4, Float32)
        self.read_weights(conv, dt_bias[head, None], part, head, weights, bias, thread, state.shape[1])
        rate = cute.math.exp(a_log[head])
        self.find_taps(ancestors, first, count, started, taps, lines, thread)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        self.convolve(
            x, raw_gate, raw_beta, lower_bound, window[row, None, None], taps, weights, value_taps, bias, rate, first,
            count, part, head, inputs[request, None, None], log_decay[request, None, head, None], both, gates, squares, values,
            beta, thread,
        )  # fmt: skip
        cute.arch.sync_threads()
        self.fade(lines, both, faded, gates, squares, keys[request, None, head, None], count, part, lift, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.multiply(own, lines, both, faded, values, beta, system, scores, solved, reads, count, 1.0 / lift, thread)
        cute.arch.sync_threads()
        for t0 in cutlass.range(0, count, CHUNK, unroll=1):
            self.solve(system, solved, t0, thread)
            cute.arch.sync_threads()
            if t0 + CHUNK < count:
                self.carry(system, solved, t0, count, thread)
                cute.arch.sync_threads()
        self.write(
            scores, solved, reads, y[None, head, None], updates[request, None, head, None], first, count, part, thread
        )

    # --- what no kernel of the pass makes

    @cute.jit
    def rows_of(self, thread: Int32) -> Int32:
        """First of a thread's TILE rows among the CTA's of the state."""
        row = thread // 32 * TILE * self.groups
        if const_expr(self.groups > 1):
            row += thread % 32 // 8 * TILE
        return row

    @cute.jit
    def fetch_state(
        self, state: cute.Tensor, started: cutlass.Boolean, part: Int32, own: cute.Tensor, thread: Int32
    ) -> None:
        """own [columns, Dk]: the CTA's rows of state [Dv, Dk], on their way."""
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        four = thread % 32
        for first in cutlass.range_constexpr(0, self.columns, self.warps):
            row = first + thread // 32
            if row < self.columns:
                target = cute.tiled_divide(own[row, None], (4,))[None, four]
                if not started:
                    cute.autovec_copy(nothing, target)
                else:
                    source = cute.tiled_divide(state[part * self.columns + row, None], (4,))[None, four]
                    self.fetch(source, target)

    @cute.jit
    def fetch(self, source: cute.Tensor, target: cute.Tensor) -> None:
        """16 bytes into shared memory, asynchronously."""
        if const_expr(self.on_gpu):
            cute.copy(cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128), source, target)
        else:
            cute.autovec_copy(source, target)

    @cute.jit
    def fetch_taps(
        self, conv: cute.Tensor, part: Int32, head: Int32, heads: Int32, value_taps: cute.Tensor, thread: Int32
    ) -> None:
        """value_taps [columns, WIDTH]: of the CTA's values, on their way."""
        if thread < self.columns:
            channel = (2 * heads + head) * DIM + part * self.columns + thread
            self.fetch(conv[channel, None], value_taps[thread, None])

    @cute.jit
    def hold(self, rows: cute.Tensor, first: Int32, held: cute.Tensor, thread: Int32) -> None:
        """held [SHARE, TILE]: a lane's channels of TILE rows, runs of 4, 32 apart."""
        for r in cutlass.range_constexpr(TILE):
            runs, kept = cute.tiled_divide(rows[first + r, None], (4,)), cute.tiled_divide(held[None, r], (4,))
            for c in cutlass.range_constexpr(SHARE // 4):
                cute.autovec_copy(runs[None, 8 * c + thread % 8], kept[None, c])

    @cute.jit
    def value_of(self, thread: Int32) -> tuple[Int32, Int32]:
        """(first node, four of the CTA's value columns) that a thread convolves."""
        return thread // (self.columns // 4), thread % (self.columns // 4)

    @cute.jit
    def channel(
        self, which: cutlass.Constexpr, part: Int32, head: Int32, heads: Int32, thread: Int32
    ) -> Int32:
        """First of the four channels of x that a thread convolves: of queries, keys, values."""
        four = thread % 32
        if const_expr(which == 2):
            four = part * (self.columns // 4) + self.value_of(thread)[1]
        return (which * heads + head) * DIM + 4 * four

    @cute.jit
    def read_weights(
        self,
        conv: cute.Tensor,
        dt_bias: cute.Tensor,
        part: Int32,
        head: Int32,
        weights: cute.Tensor,
        bias: cute.Tensor,
        thread: Int32,
        heads: Int32,
    ) -> None:
        """weights [WIDTH, 4, 2]: the taps of a thread's queries and keys; bias [4]: of its log-decays."""
        cute.autovec_copy(cute.tiled_divide(dt_bias, (4,))[None, thread % 32], bias)
        for which in cutlass.range_constexpr(2):
            channel = self.channel(which, part, head, heads, thread)
            for i in cutlass.range_constexpr(4):
                cute.autovec_copy(conv[channel + i, None], weights[None, i, which])

    @cute.jit
    def find_taps(
        self,
        ancestors: cute.Tensor | None,
        first: Int32,
        count: Int32,
        started: cutlass.Boolean,
        taps: cute.Tensor,
        lines: cute.Tensor,
        thread: Int32,
    ) -> None:
        """lines [nodes]: bit j for each node j that the node stands on, itself included. taps [nodes, WIDTH]: the tokens
        that its convolution sees, oldest first."""
        if thread < count:
            own = Int32(1) << thread
            below = own - 1
            line = below | own
            if const_expr(self.tree):
                line = ancestors[first + thread].to(Int32) & line
            lines[thread, 0] = line
            taps[thread, WIDTH - 1] = first + thread
            left, before = line & below, WIDTH - 1
            before = Int32(before)
            for back in cutlass.range_constexpr(1, WIDTH):
                tap = NOTHING
                tap = Int32(tap)
                if left != 0:
                    node = highest(left)
                    tap = first + node
                    left = left ^ (Int32(1) << node)
                else:
                    before -= 1
                    if started:
                        tap = -1 - before
                taps[thread, WIDTH - 1 - back] = tap

    # --- the pass

    @cute.jit
    def convolve(
        self,
        x: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        lower_bound: Float32,
        window: cute.Tensor,
        taps: cute.Tensor,
        weights: cute.Tensor,
        value_taps: cute.Tensor,
        bias: cute.Tensor,
        rate: Float32,
        first: Int32,
        count: Int32,
        part: Int32,
        head: Int32,
        inputs: cute.Tensor,
        log_decay: cute.Tensor,
        both: cute.Tensor,
        gates: cute.Tensor,
        squares: cute.Tensor,
        values: cute.Tensor,
        beta: cute.Tensor,
        thread: Int32,
    ) -> None:
        """A warp a node: keys and queries into both [2 nodes, D] with their parts of the squares' sums, log-decays into
        gates, the CTA's values into `values`. Of the records, of which every CTA of the head has all, it writes its
        own columns, and its part of the nodes."""
        heads, four = raw_beta.shape[1], thread % 32
        out = cute.make_rmem_tensor(4, Float32)
        raw = cute.make_rmem_tensor(self.words, Int32)
        seen = cute.make_rmem_tensor(cute.make_layout((self.words, WIDTH, 3)), Int32)
        of_query, of_key, of_value = (self.channel(which, part, head, heads, thread) for which in range(3))
        step = cute.make_rmem_tensor(1, self.dtype)
        step.fill(0.0)
        if thread < count:
            step[0] = raw_beta[first + thread, head]
        tv, column = self.value_of(thread)  # never before the warp's own node
        for t in cutlass.range(thread // 32, count, self.warps, unroll=1):
            # All reads are on their way before the first of them is waited for.
            self.read_taps(x, window, taps[t, None], of_query, seen[None, None, 0])
            self.read_taps(x, window, taps[t, None], of_key, seen[None, None, 1])
            if tv < count:
                self.read_taps(x, window, taps[tv, None], of_value, seen[None, None, 2])
            self.read(raw_gate[first + t, None], head * DIM + 4 * four, raw)

            mine = t % self.parts == part
            for i in cutlass.range_constexpr(4):
                out[i] = lower_bound * self.sigmoid(rate * (cute.recast_tensor(raw, self.dtype)[i].to(Float32) + bias[i]))
            cute.autovec_copy(out, cute.tiled_divide(gates[t, None], (4,))[None, four])
            if mine:
                cute.autovec_copy(out, cute.tiled_divide(log_decay[t, None], (4,))[None, four])
            for which in cutlass.range_constexpr(2):
                self.short_conv(seen[None, None, which], weights[None, None, which], out)
                at = t if const_expr(which == 1) else self.nodes + t  # keys come first
                cute.autovec_copy(out, cute.tiled_divide(both[at, None], (4,))[None, four])
                squares[at, four] = out[0] * out[0] + out[1] * out[1] + out[2] * out[2] + out[3] * out[3]
                if mine:
                    channel = of_key if const_expr(which == 1) else of_query
                    target = cute.tiled_divide(inputs[t, None], (4,))[None, channel // 4]
                    cute.autovec_copy(cute.recast_tensor(seen[None, WIDTH - 1, which], self.dtype), target)
            if tv < count:
                own_taps = cute.make_rmem_tensor(cute.make_layout((WIDTH, 4)), Float32)
                for i in cutlass.range_constexpr(4):
                    cute.autovec_copy(value_taps[4 * column + i, None], own_taps[None, i])
                self.short_conv(seen[None, None, 2], own_taps, out)
                cute.autovec_copy(out, cute.tiled_divide(values[tv, None], (4,))[None, column])
                target = cute.tiled_divide(inputs[tv, None], (4,))[None, of_value // 4]
                cute.autovec_copy(cute.recast_tensor(seen[None, WIDTH - 1, 2], self.dtype), target)
            tv += 4 * self.threads // self.columns
        if thread < count:
            beta[thread, 0] = self.sigmoid(step[0].to(Float32))

    @cute.jit
    def read(self, source: cute.Tensor, channel: Int32, words: cute.Tensor) -> None:
        """Four elements of a vector, from a multiple of four on, as they are packed: who takes a word apart waits for
        it."""
        packed = cute.recast_tensor(source, Int32)
        for i in cutlass.range_constexpr(self.words):
            words[i] = packed[channel // 4 * self.words + i]

    @cute.jit
    def read_taps(
        self, x: cute.Tensor, window: cute.Tensor, taps: cute.Tensor, channel: Int32, seen: cute.Tensor
    ) -> None:
        """seen [words, WIDTH]: four channels of what a node's convolution sees."""
        for k in cutlass.range_constexpr(WIDTH):
            tap = taps[k]
            if tap >= 0:
                self.read(x[tap, None], channel, seen[None, k])
            elif tap > NOTHING:
                self.read(window[-1 - tap, None], channel, seen[None, k])
            else:
                seen[None, k].fill(0)

    @cute.jit
    def short_conv(self, seen: cute.Tensor, weights: cute.Tensor, out: cute.Tensor) -> None:
        """out [4]: convolution and SiLU, rounded to x's dtype."""
        out.fill(0.0)
        for k in cutlass.range_constexpr(WIDTH):
            values = cute.recast_tensor(seen[None, k], self.dtype)
            for i in cutlass.range_constexpr(4):
                out[i] = out[i] + values[i].to(Float32) * weights[k, i]
        for i in cutlass.range_constexpr(4):
            mixed = out[i] * self.sigmoid(out[i], exact=self.dtype.width > 16)
            out[i] = mixed.to(self.dtype).to(Float32)

    @cute.jit
    def fade(
        self,
        lines: cute.Tensor,
        both: cute.Tensor,
        faded: cute.Tensor,
        gates: cute.Tensor,
        squares: cute.Tensor,
        keys: cute.Tensor,
        count: Int32,
        part: Int32,
        lift: Float32,
        thread: Int32,
    ) -> None:
        """A warp a node: with D of all its ancestors, k D and q D in place in `both` and k / D into `faded`."""
        four = thread % 32
        key = cute.make_rmem_tensor(4, Float32)
        query = cute.make_rmem_tensor(4, Float32)
        along = cute.make_rmem_tensor(4, Float32)
        back = cute.make_rmem_tensor(4, Float32)
        gate = cute.make_rmem_tensor(4, Float32)
        for t in cutlass.range(thread // 32, count, self.warps, unroll=1):
            line = lines[t, 0]
            along.fill(0.0)
            for j in cutlass.range(t + 1, unroll=4):
                cute.autovec_copy(cute.tiled_divide(gates[j, None], (4,))[None, four], gate)
                on = ((line >> j) & 1).to(Float32)
                for i in cutlass.range_constexpr(4):
                    along[i] = along[i] + on * gate[i]
            key_row, query_row = (cute.tiled_divide(both[at, None], (4,))[None, four] for at in (t, self.nodes + t))
            cute.autovec_copy(key_row, key)
            cute.autovec_copy(query_row, query)
            of_key = cute.math.rsqrt(self.total(squares[t, None], four) + EPS)
            of_query = cute.math.rsqrt(self.total(squares[self.nodes + t, None], four) + EPS) * DIM**-0.5
            for i in cutlass.range_constexpr(4):
                key[i] = key[i] * of_key
            if t % self.parts == part:
                cute.autovec_copy(key, cute.tiled_divide(keys[t, None], (4,))[None, four])
            for i in cutlass.range_constexpr(4):
                half = cute.math.exp(0.5 * along[i])
                decay = half * lift * half
                back[i] = key[i] * self.reciprocal(decay)
                key[i] = key[i] * decay
                query[i] = query[i] * of_query * decay
            cute.autovec_copy(key, key_row)
            cute.autovec_copy(query, query_row)
            cute.autovec_copy(back, cute.tiled_divide(faded[t, None], (4,))[None, four])

    @cute.jit
    def total(self, parts: cute.Tensor, lane: Int32) -> Float32:
        """The sum of 32 numbers, in every lane of a warp."""
        return cute.arch.warp_reduction_sum(parts[lane])

    @cute.jit
    def sigmoid(self, value: Float32, exact: cutlass.Constexpr = True) -> Float32:
        """Where not exact: to about 1e-6, for what is rounded to 16 bits after it."""
        if const_expr(exact):
            falling = cute.math.exp(-value)
        else:
            falling = cute.math.exp2(value * -LOG2_E, fastmath=True)
        return self.reciprocal(1.0 + falling)

    @cute.jit
    def reciprocal(self, value: Float32) -> Float32:
        result = value
        if const_expr(self.on_gpu):
            result = cute.arch.rcp_approx(value)
        else:
            result = 1.0 / value
        return result

    @cute.jit
    def multiply(
        self,
        own: cute.Tensor,
        lines: cute.Tensor,
        both: cute.Tensor,
        faded: cute.Tensor,
        values: cute.Tensor,
        beta: cute.Tensor,
        system: cute.Tensor,
        scores: cute.Tensor,
        solved: cute.Tensor,
        reads: cute.Tensor,
        count: Int32,
        unlift: Float32,
        thread: Int32,
    ) -> None:
        """All keys and queries with rows of the state, by the first warps, and with faded keys, by all in turn."""
        warp = thread // 32
        held = cute.make_rmem_tensor(cute.make_layout((SHARE, TILE)), Float32)
        if warp < self.state_warps:
            self.hold(own, self.rows_of(thread), held, thread)
            for t0 in cutlass.range(0, count, CHUNK, unroll=1):
                sums = cute.make_rmem_tensor(self.values_of(self.groups) * TILE, Float32)
                self.products(held, both, t0, thread, sums, self.groups)
                self.meet(sums)
                self.put_reads(sums, values, beta, solved, reads, t0, count, unlift, thread)
        turn = (warp + self.warps - self.state_warps) % self.warps
        for j0 in cutlass.range(turn * TILE, count, self.warps * TILE, unroll=1):
            self.hold(faded, j0, held, thread)
            for t0 in cutlass.range(j0 // CHUNK * CHUNK, count, CHUNK, unroll=1):
                sums = cute.make_rmem_tensor(self.values_of(1) * TILE, Float32)
                self.products(held, both, t0, thread, sums, 1)
                self.meet(sums)
                self.put_pairs(sums, lines, beta, system, scores, j0, t0, count, thread)

    def values_of(self, groups: int) -> int:
        """Of the 2 CHUNK keys and queries, those that a thread multiplies: where a warp holds TILE rows only, its four
        groups of 8 lanes take a quarter each."""
        return 2 * CHUNK if groups > 1 else CHUNK // 2

    @cute.jit
    def value_at(self, thread: Int32, t0: Int32, value: cutlass.Constexpr, groups: cutlass.Constexpr) -> Int32:
        """Row of `both` that a thread's `value` is: eight keys, then eight queries, from node t0 on."""
        row = t0 + value % CHUNK + value // CHUNK * self.nodes
        if const_expr(groups == 1):
            quarter = thread % 32 // 8
            row = t0 + value + quarter % 2 * (CHUNK // 2) + quarter // 2 * self.nodes
        return row

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
        """sums [TILE * values]: of a lane's channels."""
        mine = self.values_of(groups)
        sums.fill(0.0)
        entry = cute.make_rmem_tensor(4, Float32)
        for c in cutlass.range_constexpr(SHARE // 4):
            for value in cutlass.range_constexpr(mine):
                row = both[self.value_at(thread, t0, value, groups), None]
                cute.autovec_copy(cute.tiled_divide(row, (4,))[None, 8 * c + thread % 8], entry)
                for r in cutlass.range_constexpr(TILE):
                    for i in cutlass.range_constexpr(4):
                        sums[r * mine + value] = sums[r * mine + value] + held[4 * c + i, r] * entry[i]

    @cute.jit
    def meet(self, sums: cute.Tensor) -> None:
        """Adds up eight lanes' sums; lane l is left with the l-th eighth of them, in front."""
        lane = cute.arch.lane_idx()
        for step in cutlass.range_constexpr(3):
            distance = 4 >> step
            half = cute.size(sums) >> step + 1
            upper = lane & distance != 0
            for i in cutlass.range_constexpr(half):
                keep = sums[i + half] if upper else sums[i]
                give = sums[i] if upper else sums[i + half]
                sums[i] = keep + cute.arch.shuffle_sync_bfly(give, distance)

    @cute.jit
    def put_reads(
        self,
        sums: cute.Tensor,
        values: cute.Tensor,
        beta: cute.Tensor,
        solved: cute.Tensor,
        reads: cute.Tensor,
        t0: Int32,
        count: Int32,
        unlift: Float32,
        thread: Int32,
    ) -> None:
        """What the state holds under queries, and values less what it holds under keys, times beta."""
        mine = self.values_of(self.groups)
        eighth = mine * TILE // 8
        begin = thread % 8 * eighth
        column = self.rows_of(thread) + begin // mine
        for i in cutlass.range_constexpr(eighth):
            if const_expr(self.groups == 1):
                quarter = thread % 32 // 8
                t = t0 + begin % mine + i + quarter % 2 * (CHUNK // 2)
                query = quarter // 2 == 1
            else:
                t, query = t0 + i, begin % mine != 0
            found = sums[i] * unlift
            if t < count:
                if query:
                    reads[t, column] = found
                else:
                    solved[t, column] = beta[t, 0] * (values[t, column] - found)

    @cute.jit
    def put_pairs(
        self,
        sums: cute.Tensor,
        lines: cute.Tensor,
        beta: cute.Tensor,
        system: cute.Tensor,
        scores: cute.Tensor,
        j0: Int32,
        t0: Int32,
        count: Int32,
        thread: Int32,
    ) -> None:
        """system [j, t]: -beta_t times key t with key j; scores [j, t]: query t with key j; 0 where j is no ancestor."""
        mine = self.values_of(1)
        eighth = mine * TILE // 8
        begin = thread % 8 * eighth
        j, quarter = j0 + begin // mine, thread % 32 // 8
        for i in cutlass.range_constexpr(eighth):
            t = t0 + begin % mine + i + quarter % 2 * (CHUNK // 2)
            if t < count and j < count:
                on = (lines[t, 0] >> j) & 1 == 1
                found = sums[i] if on else Float32(0.0)
                if quarter // 2 == 1:
                    scores[j, t] = found
                else:
                    system[j, t] = -beta[t, 0] * found

    @cute.jit
    def solve(self, system: cute.Tensor, solved: cute.Tensor, t0: Int32, thread: Int32) -> None:
        """The updates of CHUNK nodes from t0 on, in place, a thread a value column. Nodes past the request's last see
        what was never written, and nobody sees them."""
        if thread < self.columns:
            u = cute.make_rmem_tensor(CHUNK, Float32)
            factors = cute.make_rmem_tensor(4, Float32)
            for t in cutlass.range_constexpr(CHUNK):
                u[t] = solved[t0 + t, thread]
            for j in cutlass.range_constexpr(CHUNK - 1):
                for four in cutlass.range_constexpr((j + 1) // 4, CHUNK // 4):
                    row = cute.tiled_divide(system[t0 + j, None], (4,))
                    cute.autovec_copy(row[None, t0 // 4 + four], factors)
                    for i in cutlass.range_constexpr(4):
                        if const_expr(4 * four + i > j):
                            u[4 * four + i] = u[4 * four + i] + factors[i] * u[j]
                solved[t0 + j + 1, thread] = u[j + 1]

    @cute.jit
    def carry(self, system: cute.Tensor, solved: cute.Tensor, t0: Int32, count: Int32, thread: Int32) -> None:
        """What the updates of CHUNK nodes from t0 on do to the nodes after them."""
        after = t0 + CHUNK
        for i in cutlass.range(thread, (count - after) * self.columns, self.threads, unroll=1):
            t, column = after + i // self.columns, i % self.columns
            rest = solved[t, column]
            for j in cutlass.range_constexpr(CHUNK):
                rest += system[t0 + j, t] * solved[t0 + j, column]
            solved[t, column] = rest

    @cute.jit
    def write(
        self,
        scores: cute.Tensor,
        solved: cute.Tensor,
        reads: cute.Tensor,
        y: cute.Tensor,
        updates: cute.Tensor,
        first: Int32,
        count: Int32,
        part: Int32,
        thread: Int32,
    ) -> None:
        """Outputs and updates, a thread a value of a node."""
        for i in cutlass.range(thread, count * self.columns, self.threads, unroll=1):
            t, column = i // self.columns, i % self.columns
            out = reads[t, column]
            for j in cutlass.range(t + 1, unroll=4):
                out += scores[j, t] * solved[j, column]
            y[first + t, part * self.columns + column] = out.to(self.dtype)
            updates[t, part * self.columns + column] = solved[t, column]


@cute.jit
def highest(word: Int32) -> Int32:
    """Index of the highest bit of a word above 0."""
    for step in cutlass.range_constexpr(5):
        word = word | (word >> (1 << step))
    return cute.arch.popc(word) - 1
