"""Small-T linear for Hopper (sm_90a): y[T, N] = x[T, K] W[N, K]^T for a few tokens, at the speed of reading W.

The weights are the M side of wgmma and the tokens its N side, so 8 tokens cost 8 columns and not 64 rows. One warp
streams tiles of W, and one the columns of x that go with them, through TMA into a ring in shared memory; each warpgroup
multiplies up to 64 rows of a tile. Tiles may be as low as it takes to give every SM whole row tiles: wgmma still reads
64 rows, the others being whatever lies behind them in the ring, and nothing is made of those sums.

The grid walks the line of tiles in equal stretches (`schedule.py`): row tiles that several CTAs share are summed in
float32 through L2, in the order of k whoever comes last, so results do not change from run to run.

Weights in e4m3 come packed (`pack.py`): each thread makes bf16 of its own values in registers, from where wgmma takes
them, and puts their blocks' scales to what each block adds. Warpgroups then share a tile's columns, 128 each, and their
sums meet in shared memory.

RMSNorm takes no kernel of its own. The kernel that writes the residual stream h (`rms_out`) also writes h times the
next norm's weight, and what each warpgroup's rows add to the sums of h^2; the kernel that reads it (`rms_in`)
multiplies its sums by 1 / rms, which a spare warp makes of those while the weights stream.

Launched with programmatic dependent launch, the ring fills with weights, which no kernel writes, before x is waited
for. Nothing that another kernel of the pass writes is touched before `griddepcontrol.wait`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from verify_kernels.cute.linear.dequantize import e4m3_factor, e4m3_pairs, multiply
from verify_kernels.cute.linear.pack import BYTES, COLUMNS, ROWS

WARPGROUP = 128
BOX = 64  # columns of a TMA box: 128 bytes, one swizzle row
LOG2_E = 1.4426950408889634


class Linear:
    """One compiled variant; see `compile.LinearVariant` for the constants."""

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        tokens: int,
        rows: int,
        tile_k: int,
        stages: int,
        *,
        bias: bool,
        residual: bool,
        swiglu: bool,
        rms_in: bool,
        rms_out: bool,
        kind: str,
        pdl: bool,
    ) -> None:
        groups = -(-rows // 64)
        if tokens not in (8, 16, 32, 64):
            raise ValueError(f"linear: tokens is {tokens}, allowed: 8, 16, 32, 64")
        step = groups * (16 if swiglu else 8)
        if rows % step or not step <= rows <= 256:
            raise ValueError(f"linear: rows is {rows}, allowed: multiples of {step} up to 256")
        if tile_k not in (64, 128, 256, 512):
            raise ValueError(f"linear: tile_k is {tile_k}, allowed: 64, 128, 256, 512")
        if kind not in ("plain", "fp8"):
            raise ValueError(f"linear: kind is {kind!r}, allowed: plain, fp8")
        if kind == "fp8" and (rows % ROWS or rows > 64 or tile_k == 64 or dtype is not cutlass.BFloat16):
            raise ValueError(
                f"linear: found {dtype} and tiles of {rows} x {tile_k}, allowed with fp8: bfloat16 and 16, 32, 48 or "
                f"64 x 128, 256 or 512"
            )
        if swiglu and (bias or residual):
            raise ValueError("linear: found swiglu with bias or residual, allowed: swiglu alone")
        if rms_out and not residual:
            raise ValueError("linear: found rms_out without residual, allowed: with it")
        self.rms_in, self.rms_out = rms_in, rms_out
        self.dtype, self.tokens, self.rows, self.tile_k, self.stages = dtype, tokens, rows, tile_k, stages
        self.bias, self.residual, self.swiglu, self.pdl = bias, residual, swiglu, pdl
        self.groups, self.part = groups, rows // groups  # warpgroups, and the rows of each
        self.boxes = tile_k // BOX
        self.plain = kind == "plain"
        self.sides = 1 if self.plain else tile_k // COLUMNS  # warpgroups that share a tile's columns
        self.threads = groups * self.sides * WARPGROUP
        w_bytes = rows * tile_k * 2 if self.plain else rows // ROWS * self.sides * BYTES
        self.stage_bytes = w_bytes + tokens * tile_k * 2
        # Half of an SM's shared memory: the next kernel's CTAs fill their rings while this one still runs.
        self.resident = 2 if self.stage_bytes * stages <= 112 * 1024 else 1
        self.at_once = {8: 8, 16: 8, 32: 4, 64: 2}[tokens]  # partial sums in flight: at most 64 registers

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, K], rows may be strided
        w: cute.Tensor,  # [N, K], rows may be strided; packed: [N / 16, K / 128, bytes] uint8
        y: cute.Tensor,  # [T, N], or [T, N / 2] with swiglu
        partial: cute.Tensor,  # [2 * units, groups, tokens / 8, 128, 4] float32
        counters: cute.Tensor,  # [units * groups] int32, zero before and after
        bias: cute.Tensor | None,  # [N]
        residual: cute.Tensor | None,  # [T, N]
        squares: cute.Tensor | None,  # [P, T] float32, to be added up over P: of the rows that x is made of
        eps: Float32,
        norm: cute.Tensor | None,  # [N], weight of the norm after this product
        scaled: cute.Tensor | None,  # [T, N], y * norm
        squares_out: cute.Tensor | None,  # [row tiles * groups, T] float32
        units: Int32,
        share: Int32,
        stream: Any,
    ) -> None:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x = self.rows_apart(x)
        x_layout = cute.tile_to_shape(atom, (self.tokens, self.tile_k, self.stages), (0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(self.plain):
            w_layout = cute.tile_to_shape(atom, (self.rows, self.tile_k, self.stages), (0, 1, 2))
            w_atom, w = cpasync.make_tiled_tma_atom(
                load, self.rows_apart(w), cute.tile_to_shape(atom, (self.rows, BOX), (0, 1)), (self.rows, BOX)
            )
        else:
            w_atom = None
            w_layout = cute.make_layout((BYTES // 4, self.sides, self.rows // ROWS, self.stages))
        x_atom, x_tma = cpasync.make_tiled_tma_atom(
            load, x, cute.tile_to_shape(atom, (self.tokens, BOX), (0, 1)), (self.tokens, BOX)
        )
        major = warpgroup.OperandMajorMode.K
        source = warpgroup.OperandSource.SMEM if self.plain else warpgroup.OperandSource.RMEM
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, self.tokens), source
        )
        self.kernel(
            w_atom, w, x_atom, x_tma, y, partial, counters, bias, residual, squares, eps, norm, scaled, squares_out,
            share, w_layout, x_layout, mma,
        ).launch(
            grid=[units, 1, 1],
            block=[self.threads + (96 if self.rms_in else 64), 1, 1],
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,
            use_pdl=self.pdl,
        )

    @cute.jit
    def rows_apart(self, matrix: cute.Tensor) -> cute.Tensor:
        """The stride of a single row may be anything, and TMA wants a multiple of 16 bytes."""
        stride = cute.assume(cutlass.max(matrix.stride[0], Int64(matrix.shape[1])), divby=8)
        return cute.make_tensor(matrix.iterator, cute.make_layout(matrix.shape, stride=(stride, 1)))

    @cute.kernel
    def kernel(
        self,
        w_atom: cute.CopyAtom | None,
        w: cute.Tensor,
        x_atom: cute.CopyAtom,
        x: cute.Tensor,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        squares: cute.Tensor | None,
        eps: Float32,
        norm: cute.Tensor | None,
        scaled: cute.Tensor | None,
        squares_out: cute.Tensor | None,
        share: Int32,
        w_layout: cute.Layout | cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        unit, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, 2 * self.stages + 1)
        empty = full + self.stages
        ready = empty + self.stages
        rms = smem.allocate_tensor(Float32, cute.make_layout(self.tokens), 16)
        warp_squares = smem.allocate_tensor(Float32, cute.make_layout((self.tokens, 4, self.groups)), 16)
        arrived = smem.allocate_tensor(Int32, cute.make_layout(self.groups), 16)
        if const_expr(self.plain):
            s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        else:
            s_w = smem.allocate_tensor(Int32, w_layout, 1024)
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, 1024, x_layout.inner)
        side_sums = None
        if const_expr(self.sides > 1):
            layout = cute.make_layout((4, WARPGROUP, self.tokens // 8, self.sides - 1))
            side_sums = smem.allocate_tensor(Float32, layout, 16)

        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, self.threads // 32)
                cute.arch.mbarrier_init(ready, 1)
            if const_expr(self.plain):
                cpasync.prefetch_descriptor(w_atom)
            cpasync.prefetch_descriptor(x_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        rows, columns = y.shape[1] * (2 if self.swiglu else 1), x.shape[1]
        k_tiles = (columns + self.tile_k - 1) // self.tile_k
        begin = unit * share
        end = cutlass.min(begin + share, (rows + self.rows - 1) // self.rows * k_tiles)
        if warp == self.threads // 32:
            self.produce_w(w_atom, w, s_w, full, empty, begin, end, k_tiles)
        elif warp == self.threads // 32 + 1:
            self.produce_x(x_atom, x, s_x, full, empty, begin, end, k_tiles)
        elif warp < self.threads // 32:
            self.consume(
                mma, s_w, s_x, side_sums, full, empty, arrived, rows, y, partial, counters, bias, residual, ready, rms,
                norm, scaled, squares_out, warp_squares, unit, share, begin, end, k_tiles, thread,
            )  # fmt: skip
        elif const_expr(self.rms_in):
            self.inverse_rms(squares, eps, columns, rms, ready)

    @cute.jit
    def inverse_rms(
        self, squares: cute.Tensor, eps: Float32, width: Int32, rms: cute.Tensor, ready: cute.Pointer
    ) -> None:
        """One warp: 1 / rms of every token, from sums that are added in a fixed order."""
        lane = cute.arch.lane_idx()
        side = min(self.tokens, 32)  # tokens side by side; the lanes left over share the sums of each
        slices, turns = 32 // side, self.tokens // side
        last = squares.shape[1] - 1
        totals = cute.make_rmem_tensor(cute.make_layout(turns), Float32)
        totals.fill(0.0)
        cute.arch.griddepcontrol_wait()
        for p in cutlass.range(lane // side, squares.shape[0], slices, unroll=16):
            for turn in cutlass.range_constexpr(turns):
                totals[turn] += squares[p, cutlass.min(turn * side + lane % side, last)]
        for turn in cutlass.range_constexpr(turns):
            total = totals[turn]
            for i in cutlass.range_constexpr(slices.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=side << i)
            if lane < side:
                rms[turn * side + lane] = cute.math.rsqrt(total / width.to(Float32) + eps, fastmath=True)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ready)

    @cute.jit
    def produce_w(
        self,
        atom: cute.CopyAtom | None,
        w: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        begin: Int32,
        end: Int32,
        k_tiles: Int32,
    ) -> None:
        """One warp, which waits for no kernel before: none writes weights."""
        w_s, w_g = s_w, w
        if const_expr(self.plain):
            w_s, w_g = self.boxes_of(atom, w, s_w, self.rows)
        for i in cutlass.range(end - begin, unroll=1):
            self.load_w(atom, w_s, w_g, full, empty, begin, i, k_tiles)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def produce_x(
        self,
        atom: cute.CopyAtom,
        x_tma: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        begin: Int32,
        end: Int32,
        k_tiles: Int32,
    ) -> None:
        """One warp."""
        x_s, x_g = self.boxes_of(atom, x_tma, s_x, self.tokens)
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range(end - begin, unroll=1):
            self.load_x(atom, x_s, x_g, full, empty, begin, i, k_tiles)

    @cute.jit
    def boxes_of(
        self, atom: cute.CopyAtom, tma: cute.Tensor, s_ring: cute.Tensor, rows: cutlass.Constexpr[int]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Boxes of shared memory (box, 1, boxes of a stage, stages) and of the matrix (box, row tiles, K / BOX)."""
        g_boxes = cute.flat_divide(tma, (rows, BOX))
        s_boxes = cute.flat_divide(s_ring, (rows, BOX))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
        )

    @cute.jit
    def load_w(
        self,
        atom: cute.CopyAtom | None,
        w_s: cute.Tensor,
        w_g: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        begin: Int32,
        i: Int32,
        k_tiles: Int32,
    ) -> None:
        """This unit's i-th tile, once its stage is free. The stage's barrier waits for the bytes of W and of x,
        whichever is asked for first."""
        stage, tile = i % self.stages, begin + i
        cute.arch.mbarrier_wait(empty + stage, (i // self.stages & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
        if const_expr(self.plain):
            for c in cutlass.range_constexpr(self.boxes):
                box = tile % k_tiles * self.boxes + c
                cute.copy(atom, w_g[None, tile // k_tiles, box], w_s[None, 0, c, stage], tma_bar_ptr=full + stage)
        else:
            blocks = self.rows // ROWS
            for b in cutlass.range_constexpr(blocks):  # past the last block, that again
                block = cutlass.min(tile // k_tiles * blocks + b, w_g.shape[0] - 1)
                source = w_g[block, tile % k_tiles * self.sides, None].iterator
                with cute.arch.elect_one():
                    cute.arch.inline_ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                        read_only_args=[
                            w_s[None, 0, b, stage].iterator.toint(), source.toint(), Int32(self.sides * BYTES),
                            (full + stage).toint(),
                        ],
                    )  # fmt: skip

    @cute.jit
    def load_x(
        self,
        atom: cute.CopyAtom,
        x_s: cute.Tensor,
        x_g: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        begin: Int32,
        i: Int32,
        k_tiles: Int32,
    ) -> None:
        """What goes with the i-th tile, once its stage is free."""
        stage, tile = i % self.stages, begin + i
        cute.arch.mbarrier_wait(empty + stage, (i // self.stages & 1) ^ 1)
        for c in cutlass.range_constexpr(self.boxes):
            box = tile % k_tiles * self.boxes + c
            cute.copy(atom, x_g[None, 0, box], x_s[None, 0, c, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def consume(
        self,
        mma: cute.TiledMma,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        side_sums: cute.Tensor | None,
        full: cute.Pointer,
        empty: cute.Pointer,
        arrived: cute.Tensor,
        rows: Int32,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        ready: cute.Pointer,
        rms: cute.Tensor,
        norm: cute.Tensor | None,
        scaled: cute.Tensor | None,
        squares_out: cute.Tensor | None,
        warp_squares: cute.Tensor,
        unit: Int32,
        share: Int32,
        begin: Int32,
        end: Int32,
        k_tiles: Int32,
        thread: Int32,
    ) -> None:
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        side = Int32(0)
        if const_expr(self.sides > 1):
            group, side = Int32(0), group
        local = thread % WARPGROUP
        acc = mma.make_fragment_C(mma.partition_shape_C((64, self.tokens)))
        cute.arch.griddepcontrol_wait()

        for n in cutlass.range(begin // k_tiles, (end + k_tiles - 1) // k_tiles, unroll=1):
            first = cutlass.max(begin, n * k_tiles)
            last = cutlass.min(end, (n + 1) * k_tiles)
            acc.fill(0.0)
            ends = self.ends(bias, residual, norm, rows, n, group, local)
            if const_expr(self.plain):
                self.multiply(mma, acc, s_w, s_x, full, empty, first - begin, last - begin, group)
            else:
                self.multiply_packed(mma, acc, s_w, s_x, full, empty, first - begin, last - begin, side, local)
            if const_expr(self.sides > 1):
                self.add_sides(acc, side_sums, side, local)
            if side == 0:
                finish = True
                if last - first < k_tiles:
                    finish = self.share_sums(
                        acc, arrived, partial, counters, unit, share, n, first, k_tiles, group, local
                    )
                if finish:
                    if const_expr(self.rms_in):
                        cute.arch.mbarrier_wait(ready, 0)
                    self.store(acc, y, ends, rms, scaled, squares_out, warp_squares, rows, n, group, local)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        group: Int32,
    ) -> None:
        """Adds the products of tiles first to last, counted from this unit's first."""
        lanes = mma.get_slice(0)
        # (64, tile_k, stages): as the ring's own layout, with the rows of wgmma where that has those of a tile.
        own = cute.make_tensor(
            s_w.iterator + group * (self.part * BOX),
            cute.make_layout(
                ((8, 8), (BOX, self.boxes), (1, self.stages)),
                stride=((BOX, 8 * BOX), (1, self.rows * BOX), (0, self.rows * self.tile_k)),
            ),
        )
        f_w = mma.make_fragment_A(lanes.partition_A(own))
        f_x = mma.make_fragment_B(lanes.partition_B(s_x))
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range(first, last, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(self.tile_k // 16):
                cute.gemm(atom, acc, f_w[None, None, k, stage], f_x[None, None, k, stage], acc)
            warpgroup.commit_group()
            # One product stays in flight: the stage before is free.
            warpgroup.wait_group(1)
            if i > first:
                self.release(empty + (i - 1) % self.stages)
        warpgroup.wait_group(0)
        self.release(empty + (last - 1) % self.stages)

    @cute.jit
    def multiply_packed(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        side: Int32,
        local: Int32,
    ) -> None:
        """As `multiply`, of this side's 128 columns. Half of them are made into bf16, then the other half."""
        lanes = mma.get_slice(0)
        sides = cute.flat_divide(s_x, (self.tokens, COLUMNS))[None, None, 0, None, None]
        f_x = mma.make_fragment_B(lanes.partition_B(sides))
        steps = COLUMNS // 16
        words = cute.make_rmem_tensor(cute.make_layout((4, steps)), Int32)
        words.fill(0)
        f_w = mma.make_fragment_A(mma.partition_shape_A((64, COLUMNS)))
        f_w = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), f_w.layout)
        total = mma.make_fragment_C(mma.partition_shape_C((64, self.tokens)))
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warp = cutlass.min(local // 32, self.rows // ROWS - 1)  # past a low tile's rows, the last again
        for i in cutlass.range(first, last, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            cute.arch.mbarrier_wait(full + stage, phase)
            block = s_w[None, side, warp, stage]
            total.fill(0.0)
            for half in cutlass.range_constexpr(2):
                self.unpack(words, block, half)
                warpgroup.fence()
                for k in cutlass.range_constexpr(half * steps // 2, (half + 1) * steps // 2):
                    cute.gemm(atom, total, f_w[None, None, k], f_x[None, None, k, side, stage], total)
                warpgroup.commit_group()
            scales = cute.make_tensor(cute.recast_ptr(block.iterator, dtype=Float32), cute.make_layout(BYTES // 4))
            both = scales[ROWS * COLUMNS // 4], scales[ROWS * COLUMNS // 4 + 1]  # of rows r and r + 8
            warpgroup.wait_group(0)
            self.release(empty + stage)
            sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.tokens // 8)))
            more = cute.make_tensor(total.iterator, cute.make_layout((2, 2, self.tokens // 8)))
            for b in cutlass.range_constexpr(self.tokens // 8):
                for r in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        sums[a, r, b] = sums[a, r, b] + both[r] * more[a, r, b]

    @cute.jit
    def unpack(self, words: cute.Tensor, block: cute.Tensor, half: cutlass.Constexpr[int]) -> None:
        """Steps 4 half to 4 half + 4 of this thread's A."""
        lane = cute.arch.lane_idx()
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        quads = cute.make_tensor(block.iterator, cute.make_layout((4, 32, 4)))
        factor = e4m3_factor()
        for q in cutlass.range_constexpr(2 * half, 2 * half + 2):
            cute.autovec_copy(quads[None, lane, q], raw)
            for s in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    pairs = e4m3_pairs(raw[2 * s + j])
                    for r in cutlass.range_constexpr(2):
                        words[2 * j + r, 2 * q + s] = multiply(pairs[r], factor)

    @cute.jit
    def add_sides(self, acc: cute.Tensor, side_sums: cute.Tensor, side: Int32, local: Int32) -> None:
        """The first warpgroup gets the sums of all."""
        blocks = self.tokens // 8
        sums = cute.make_tensor(acc.iterator, cute.make_layout((4, blocks)))
        if side > 0:
            for b in cutlass.range_constexpr(blocks):
                cute.autovec_copy(sums[None, b], side_sums[None, local, b, side - 1])
        cute.arch.barrier(barrier_id=2, number_of_threads=self.threads)
        if side == 0:
            more = cute.make_rmem_tensor(cute.make_layout(4), Float32)
            for s in cutlass.range_constexpr(self.sides - 1):
                for b in cutlass.range_constexpr(blocks):
                    cute.autovec_copy(side_sums[None, local, b, s], more)
                    for e in cutlass.range_constexpr(4):
                        sums[e, b] = sums[e, b] + more[e]
        cute.arch.barrier(barrier_id=2, number_of_threads=self.threads)  # read before the next row tile's are written

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        """The warp has read the stage."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def ends(
        self,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        norm: cute.Tensor | None,
        columns: Int32,
        n: Int32,
        group: Int32,
        local: Int32,
    ) -> tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None]:
        """What this thread's sums of a row tile will meet, asked for before the weights to be there after them."""
        lane = cute.arch.lane_idx()
        row = n * self.rows + group * self.part + local // 32 * 16 + lane // 4
        added, kept, weights = None, None, None
        if const_expr(self.bias):
            added = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        if const_expr(self.residual):
            kept = cute.make_rmem_tensor(cute.make_layout((2, 2, self.tokens // 8)), self.dtype)
        if const_expr(self.rms_out):
            weights = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
        for i in cutlass.range_constexpr(2):
            c = cutlass.min(row + 8 * i, columns - 1)
            if const_expr(self.bias):
                added[i] = bias[c]
            if const_expr(self.rms_out):
                weights[i] = norm[c]
            if const_expr(self.residual):
                for b in cutlass.range_constexpr(self.tokens // 8):
                    for a in cutlass.range_constexpr(2):
                        kept[a, i, b] = residual[cutlass.min(8 * b + lane % 4 * 2 + a, residual.shape[0] - 1), c]
        return added, kept, weights

    @cute.jit
    def share_sums(
        self,
        acc: cute.Tensor,
        arrived: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        unit: Int32,
        share: Int32,
        n: Int32,
        first: Int32,
        k_tiles: Int32,
        group: Int32,
        local: Int32,
    ) -> cutlass.Boolean:
        """Leaves this unit's sums of a row tile in L2. The last unit to arrive gets the whole sum in acc, and True."""
        blocks = self.tokens // 8
        sums = cute.make_tensor(acc.iterator, cute.make_layout((4, blocks)))
        first_unit = n * k_tiles // share
        last_unit = (n * k_tiles + k_tiles - 1) // share
        slot = 2 * unit
        if first == n * k_tiles:
            slot += 1
        for b in cutlass.range_constexpr(blocks):
            cute.autovec_copy(sums[None, b], partial[slot, group, b, local, None])
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
        if local == 0:
            counter = counters.iterator + (first_unit * self.groups + group)
            cute.arch.fence_acq_rel_gpu()
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if before == last_unit - first_unit:
                counters[first_unit * self.groups + group] = 0
            arrived[group] = before
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
        finish = arrived[group] == last_unit - first_unit
        if finish:
            acc.fill(0.0)
            parts = cute.make_rmem_tensor(cute.make_layout((4, blocks, self.at_once)), Float32)
            for u in cutlass.range(first_unit, last_unit + 1, self.at_once, unroll=1):
                for j in cutlass.range_constexpr(self.at_once):
                    part = cutlass.min(u + j, last_unit)
                    at = 2 * part + (1 if part == first_unit else 0)
                    for b in cutlass.range_constexpr(blocks):
                        cute.autovec_copy(partial[at, group, b, local, None], parts[None, b, j])
                for j in cutlass.range_constexpr(self.at_once):
                    for b in cutlass.range_constexpr(blocks):
                        for e in cutlass.range_constexpr(4):
                            sums[e, b] = sums[e, b] + (parts[e, b, j] if u + j <= last_unit else Float32(0.0))
        return finish

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        y: cute.Tensor,
        ends: tuple[cute.Tensor | None, cute.Tensor | None, cute.Tensor | None],
        rms: cute.Tensor,
        scaled: cute.Tensor | None,
        squares_out: cute.Tensor | None,
        warp_squares: cute.Tensor,
        columns: Int32,
        n: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """This thread's sums to y: rows r and r + 8 of the warp's 16 are columns of y, and token pairs its rows."""
        lane = cute.arch.lane_idx()
        warp = local // 32
        sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.tokens // 8)))  # (token, row, 8 tokens)
        row = n * self.rows + group * self.part + warp * 16
        added, kept, weights = ends
        if const_expr(self.rms_out):  # whoever still reads the row tile before
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
        for b in cutlass.range_constexpr(self.tokens // 8):
            for a in cutlass.range_constexpr(2):
                t = 8 * b + lane % 4 * 2 + a
                square = Float32(0.0)
                if t < y.shape[0]:
                    scale = rms[t] if const_expr(self.rms_in) else Float32(1.0)
                    if const_expr(self.swiglu):
                        gate, up = sums[a, 0, b] * scale, sums[a, 1, b] * scale
                        if self.made(warp, 0) and row + lane // 4 < columns:
                            value = gate * up / (1.0 + cute.math.exp2(-gate * LOG2_E, fastmath=True))
                            y[t, row // 2 + lane // 4] = value.to(self.dtype)
                    else:
                        for i in cutlass.range_constexpr(2):
                            c = row + lane // 4 + 8 * i
                            if self.made(warp, i) and c < columns:
                                value = sums[a, i, b] * scale
                                if const_expr(self.bias):
                                    value += added[i].to(Float32)
                                if const_expr(self.residual):
                                    value += kept[a, i, b].to(Float32)
                                y[t, c] = value.to(self.dtype)
                                if const_expr(self.rms_out):  # of what the stream holds, as rounded
                                    rounded = value.to(self.dtype).to(Float32)
                                    scaled[t, c] = (rounded * weights[i].to(Float32)).to(self.dtype)
                                    square += rounded * rounded
                if const_expr(self.rms_out):
                    for i in cutlass.range_constexpr(3):  # the lanes with this token
                        square += cute.arch.shuffle_sync_bfly(square, offset=4 << i)
                    if lane < 4:
                        warp_squares[t, warp, group] = square
        if const_expr(self.rms_out):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
            part = n * self.groups + group
            if local < y.shape[0] and part < squares_out.shape[0]:
                total = Float32(0.0)
                for i in cutlass.range_constexpr(4):
                    total += warp_squares[local, i, group]
                squares_out[part, local] = total

    @cute.jit
    def made(self, warp: Int32, half: cutlass.Constexpr[int]) -> cutlass.Boolean:
        """Whether these 8 rows of wgmma's 64 are the tile's."""
        if const_expr(self.part == 64):
            return cutlass.Boolean(True)
        return warp * 16 + 8 * half < self.part
