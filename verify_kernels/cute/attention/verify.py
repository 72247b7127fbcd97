"""Verify attention for Hopper (sm_90a): trees of new tokens over a paged KV cache, split over the keys.

The query rows of one KV head (token * group + head in group) are the M side of wgmma, so a tree reads its keys once,
whatever its size. Each CTA walks its stretch of the schedule (`schedule.py`): two producer warps stream K and V pages
through TMA into rings in shared memory, two warpgroups multiply. The warpgroups share every tile and hold 64 rows each
(`rows=128`), or, for small trees, hold the same 64 rows and take alternate tiles, merging at the end (`rows=64`).

Pages are TMA boxes of min(page, tile_n) tokens; boxes past a request's end are read out of bounds, which fills zeros.
Only the tiles past the committed context see a mask: one bit test of the token's ancestor word.

Both kernels are launched with programmatic dependent launch. Before `griddepcontrol.wait` a kernel reads only what no
kernel since the one before its predecessor has written: the schedule, the page table and the committed context.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, Uint8, Uint64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from verify_kernels.cute.attention.schedule import RECORD

WARPGROUP = 128
CONSUMERS = 2 * WARPGROUP
THREADS = CONSUMERS + WARPGROUP
LOG2_E = 1.4426950408889634
MASKS = ("tree", "causal", "full")
COMBINE_THREADS = 256
COMBINE_ROWS = 32  # rows for which `combine` starts a CTA


@cute.jit
def multiply(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr[bool]
) -> None:
    """Issues acc = a b (or acc += a b) as one wgmma group. The atom is made anew: setting its flag changes it."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def window(word: Uint64, first: Int32) -> Uint64:
    """Visibility of 64 keys from `first` on, relative to the new tokens: ones in the context, then `word`."""
    ones = Uint64(0xFFFFFFFFFFFFFFFF)
    ahead = cutlass.max(first, 0)
    behind = cutlass.max(-first, 0)
    shifted = (word >> cutlass.min(ahead, 63).to(Uint64)) if ahead < 64 else Uint64(0)
    context = (Uint64(1) << cutlass.min(behind, 63).to(Uint64)) - Uint64(1)
    later = (word << cutlass.min(behind, 63).to(Uint64)) | context if behind < 64 else ones
    return shifted if first >= 0 else later


class VerifyAttention:
    """One compiled variant.

    rows: query rows of a CTA, 64 or 128; blocks: CTAs that share a unit of the schedule, each with its own rows, so
    that the second read of a tile hits L2; tile_n: keys of a tile; stages: tiles of K and of V in flight.
    """

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        mask: str,
        *,
        rows: int,
        blocks: int,
        tile_n: int,
        stages: int,
        softcap: bool,
        fp8: bool,
    ) -> None:
        if head_dim not in (64, 128):
            raise ValueError(f"verify attention: head_dim is {head_dim}, allowed: 64, 128")
        if page_size not in (16, 32, 64, 128):
            raise ValueError(f"verify attention: page_size is {page_size}, allowed: 16, 32, 64, 128")
        if heads % kv_heads or not 1 <= heads // kv_heads <= 16:
            raise ValueError(f"verify attention: heads / kv_heads is {heads} / {kv_heads}, allowed: an integer, 1 to 16")
        if mask not in MASKS:
            raise ValueError(f"verify attention: mask is {mask!r}, allowed: {', '.join(MASKS)}")
        if rows not in (64, 128) or (fp8 and rows != 64):
            raise ValueError(f"verify attention: rows is {rows}, allowed: 64, or 128 with 16-bit keys and values")
        if rows == 64 and stages % 2:
            # A stage must belong to one warpgroup, or a fast warpgroup takes the phase before last for its own.
            raise ValueError(f"verify attention: stages is {stages}, allowed with 64 rows: an even number")
        self.dtype, self.head_dim, self.heads, self.kv_heads = dtype, head_dim, heads, kv_heads
        self.group = heads // kv_heads
        self.page_size, self.mask, self.softcap, self.fp8 = page_size, mask, softcap, fp8
        self.product = cutlass.Float16 if fp8 else dtype  # what the matrix units multiply: float16 holds every e4m3 value
        self.rows, self.blocks, self.tile_n, self.stages = rows, blocks, tile_n, stages
        self.alternate = rows == 64
        self.step = 2 if self.alternate else 1
        self.box = min(page_size, tile_n)
        self.boxes = tile_n // self.box
        self.columns = head_dim if fp8 else 64  # of a box
        self.tile_bytes = tile_n * head_dim * (1 if fp8 else 2)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [N, Hq, D]
        k_pages: cute.Tensor,  # [P, page, Hkv, D]
        v_pages: cute.Tensor,  # [P, page, Hkv, D]
        page_table: cute.Tensor,  # [R, maxP] int32
        ancestors: cute.Tensor,  # [N] int64, read by mask "tree" only
        segments: cute.Tensor,  # [S, RECORD] int32
        out: cute.Tensor,  # [N, Hq, D]
        partial: cute.Tensor,  # [2 * units * blocks, rows, D] float32
        stats: cute.Tensor,  # [2 * units * blocks, rows, 2] float32: max (log2 units), sum
        scale: Float32,
        softcap: Float32,
        fresh: Int32,  # 1: the schedule may just have been made
        k_scale: cute.Tensor | None,  # [Hkv] float32, with fp8
        v_scale: cute.Tensor | None,  # [Hkv] float32, with fp8
        stream: Any,
    ) -> None:
        units = partial.shape[0] // (2 * self.blocks)
        layout = cute.make_layout(
            (k_pages.shape[0] * self.page_size, self.head_dim, self.kv_heads),
            stride=(self.kv_heads * self.head_dim, 1, self.head_dim),
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.product)
        # With fp8 the rings hold bytes, and each warpgroup has a 16-bit tile of K and of V of its own.
        kv_layout = cute.tile_to_shape(atom, (self.tile_n, self.head_dim, 2 if self.fp8 else self.stages), (0, 1, 2))
        q_layout = cute.tile_to_shape(atom, (64, self.head_dim, self.rows // 64), (0, 1, 2))
        if const_expr(self.fp8):
            box_layout = cute.make_layout((self.box, self.head_dim), stride=(self.head_dim, 1))
        else:
            box_layout = cute.tile_to_shape(atom, (self.box, 64), (0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_atom, k_tma = cpasync.make_tiled_tma_atom(
            load, cute.make_tensor(k_pages.iterator, layout), box_layout, (self.box, self.columns)
        )
        v_atom, v_tma = cpasync.make_tiled_tma_atom(
            load, cute.make_tensor(v_pages.iterator, layout), box_layout, (self.box, self.columns)
        )
        major = warpgroup.OperandMajorMode
        mma_qk = hopper.make_trivial_tiled_mma(
            self.product, self.product, major.K, major.K, Float32, (1, 1, 1), (64, self.tile_n)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.product, self.product, major.K, major.MN, Float32, (1, 1, 1), (64, self.head_dim),
            warpgroup.OperandSource.RMEM,
        )
        log2_scale = scale * LOG2_E
        cap_scale = Float32(0.0)
        if const_expr(self.softcap):
            cap_scale = scale / softcap
            log2_scale = softcap * LOG2_E
        self.kernel(
            k_atom, k_tma, v_atom, v_tma, q, page_table, ancestors, segments, out, partial, stats, log2_scale, cap_scale,
            fresh, k_scale, v_scale, q_layout, kv_layout, mma_qk, mma_pv,
        ).launch(
            grid=[units * self.blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )
        self.combine(segments, out, partial, stats).launch(
            grid=[units, self.blocks * self.rows // COMBINE_ROWS, 1],
            block=[COMBINE_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        q: cute.Tensor,
        page_table: cute.Tensor,
        ancestors: cute.Tensor,
        segments: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        log2_scale: Float32,
        cap_scale: Float32,
        fresh: Int32,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        unit, rank = block // self.blocks, block % self.blocks

        smem = cutlass.memory.SmemAllocator()
        full_k = smem.allocate_array(Int64, 4 * self.stages)
        full_v = full_k + self.stages
        empty_k = full_k + 2 * self.stages
        empty_v = full_k + 3 * self.stages
        s_q = smem.allocate_tensor(self.product, q_layout.outer, 1024, q_layout.inner)
        s_k = smem.allocate_tensor(self.product, kv_layout.outer, 1024, kv_layout.inner)
        s_v = smem.allocate_tensor(self.product, kv_layout.outer, 1024, kv_layout.inner)
        ring_k, ring_v = s_k, s_v
        if const_expr(self.fp8):
            ring = cute.make_layout(
                (self.tile_n, self.head_dim, self.stages), stride=(self.head_dim, 1, self.tile_n * self.head_dim)
            )
            ring_k = smem.allocate_tensor(Uint8, ring, 1024)
            ring_v = smem.allocate_tensor(Uint8, ring, 1024)
        exchange = None
        if const_expr(self.alternate):
            exchange = smem.allocate_tensor(Float32, cute.make_layout((WARPGROUP, self.head_dim // 2 + 4)), 16)

        if fresh != 0:
            cute.arch.griddepcontrol_wait()
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(2 * self.stages):
                    cute.arch.mbarrier_init(full_k + s, 1)
                    cute.arch.mbarrier_init(empty_k + s, 4 if self.alternate else 8)
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.produce(k_atom, k_tma, ring_k, full_k, empty_k, page_table, segments, unit, rank)
            if warp == 1:
                self.produce(v_atom, v_tma, ring_v, full_v, empty_v, page_table, segments, unit, rank)
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                mma_qk, mma_pv, s_q, s_k, s_v, ring_k, ring_v, exchange, full_k, full_v, empty_k, empty_v, q,
                ancestors, segments, out, partial, stats, log2_scale, cap_scale, k_scale, v_scale, unit, rank,
                thread - WARPGROUP,
            )

    @cute.jit
    def read_segment(self, segments: cute.Tensor, row: Int32) -> cute.Tensor:
        record = cute.make_rmem_tensor(RECORD, Int32)
        cute.autovec_copy(segments[row, None], record)
        return record

    @cute.jit
    def box_index(self, page_table: cute.Tensor, request: Int32, tile: Int32, end: Int32, boxes: Int32) -> Int32:
        """Box of this lane in a tile, in units of boxes of the cache; past the end of the cache where no key lives."""
        token = tile * self.tile_n + cute.arch.lane_idx() * self.box
        box = boxes
        if token < end:
            page = page_table[request, token // self.page_size]
            box = page * (self.page_size // self.box) + (token % self.page_size) // self.box
        return box

    @cute.jit
    def produce(
        self,
        atom: cute.CopyAtom,
        tma: cute.Tensor,
        s_tile: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        page_table: cute.Tensor,
        segments: cute.Tensor,
        unit: Int32,
        rank: Int32,
    ) -> None:
        g_boxes = cute.flat_divide(tma, (self.box, self.columns))  # (box, columns, boxes, D/columns, Hkv)
        s_boxes = cute.flat_divide(s_tile, (self.box, self.columns))  # (box, columns, tile_n/box, D/columns, stages)
        t_s, t_g = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
        )
        total = cute.size(g_boxes, mode=[2])
        segment_count = segments[unit, 11]
        count = Int32(0)
        for n in cutlass.range(segment_count, unroll=1):
            # Fields one by one: this warp has 24 registers.
            at = unit
            if n > 0:
                at = segments[unit, 12] + n - 1
            request, head, context, t0 = segments[at, 0], segments[at, 1], segments[at, 5], segments[at, 6]
            q_len, t1 = segments[at, 4], segments[at, 7]
            end = context + segments[at, 13] + q_len
            if const_expr(self.blocks > 1):
                if segments[at, 2] + rank * self.rows >= q_len * self.group:
                    t1 = t0
            following = self.box_index(page_table, request, t0, end, total)
            for t in cutlass.range(t0, t1, unroll=1):
                boxes = following
                if t + 1 < t1:
                    following = self.box_index(page_table, request, t + 1, end, total)
                stage, phase = count % self.stages, (count // self.stages) & 1
                count += 1
                if (t + 1) * self.tile_n > context:
                    cute.arch.griddepcontrol_wait()
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_bytes)
                for i in cutlass.range_constexpr(self.boxes):
                    box = cute.arch.shuffle_sync(boxes, i)
                    for c in cutlass.range_constexpr(self.head_dim // self.columns):
                        cute.copy(
                            atom, t_g[None, box, c, head], t_s[None, i, c, stage], tma_bar_ptr=full + stage
                        )

    @cute.jit
    def consume(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        ring_k: cute.Tensor,
        ring_v: cute.Tensor,
        exchange: cute.Tensor | None,
        full_k: cute.Pointer,
        full_v: cute.Pointer,
        empty_k: cute.Pointer,
        empty_v: cute.Pointer,
        q: cute.Tensor,
        ancestors: cute.Tensor,
        segments: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        log2_scale: Float32,
        cap_scale: Float32,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        unit: Int32,
        rank: Int32,
        thread: Int32,
    ) -> None:
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = cute.arch.lane_idx()
        local = thread % WARPGROUP
        own = wg * 64 if const_expr(not self.alternate) else 0  # first of this warpgroup's rows in the CTA
        row = own + (local // 32) * 16 + lane // 4  # this thread holds rows `row` and `row + 8`
        column = (lane % 4) * 2

        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        f_q = mma_qk.make_fragment_A(qk.partition_A(s_q))
        f_q = f_q[None, None, None, 0 if const_expr(self.alternate) else wg]
        f_k = mma_qk.make_fragment_B(qk.partition_B(s_k))
        s_vt = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
        f_v = mma_pv.make_fragment_B(pv.partition_B(s_vt))
        acc_o = mma_pv.make_fragment_C(mma_pv.partition_shape_C((64, self.head_dim)))
        f_p = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, self.tile_n // 16)), self.product)
        o = cute.make_tensor(acc_o.iterator, cute.make_layout((2, 2, self.head_dim // 8)))
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        keep = cute.make_rmem_tensor(2, Float32)
        words = cute.make_rmem_tensor(2, Uint64)
        limits = cute.make_rmem_tensor(2, Int32)

        record = self.read_segment(segments, unit)
        segment_count, rest = record[11], record[12]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(not self.alternate):
            if wg == 1:
                cute.arch.barrier_arrive(barrier_id=4, number_of_threads=CONSUMERS)
        queries = cute.make_rmem_tensor(cute.make_layout((8, self.rows * self.head_dim // (8 * CONSUMERS))), self.dtype)
        if segment_count > 0:
            self.read_queries(q, record, rank, thread, queries)
        count = Int32(0)
        for n in cutlass.range(segment_count, unroll=1):
            head, row0 = record[1], record[2] + rank * self.rows
            q_start, q_len, context, t0, t1, slot = (record[i] for i in range(3, 9))
            first = record[13]
            query_rows = q_len * self.group
            if const_expr(self.blocks > 1):
                if row0 >= query_rows:  # this CTA's rows lie past the request's end
                    t1 = t0

            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
            self.write_queries(s_q, thread, queries)
            for i in cutlass.range_constexpr(2):
                token = (row0 + row + 8 * i) // self.group
                words[i] = Uint64(0)
                limits[i] = first + q_len
                if const_expr(self.mask == "tree"):
                    if token < q_len:
                        own_bits = (Uint64(2) << (first + q_len - 1).to(Uint64)) - Uint64(1)
                        words[i] = ancestors[q_start + token].to(Uint64) & own_bits
                if const_expr(self.mask == "causal"):
                    limits[i] = first + cutlass.min(token + 1, q_len)
            head_log2, head_cap = log2_scale, cap_scale
            if const_expr(self.fp8):
                if const_expr(self.softcap):
                    head_cap = cap_scale * k_scale[head]
                else:
                    head_log2 = log2_scale * k_scale[head]
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            acc_o.fill(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)

            start = t0
            if const_expr(self.alternate):
                start = t0 + ((wg + count) & 1)
            if start < t1:
                # The products of one tile overlap the softmax of the one before.
                index = count + start - t0
                stage, phase = index % self.stages, (index // self.stages) & 1
                cute.arch.mbarrier_wait(full_k + stage, phase)
                acc_s = mma_qk.make_fragment_C(mma_qk.partition_shape_C((64, self.tile_n)))
                tile = self.expand(ring_k, s_k, stage, empty_k, wg, local)
                multiply(mma_qk, acc_s, f_q, f_k[None, None, None, tile], accumulate=False)
                warpgroup.wait_group(0)
                if const_expr(not self.fp8):
                    self.release(empty_k + stage)
                self.softmax(
                    acc_s, row_max, row_sum, keep, words, limits, start * self.tile_n - context, column,
                    head_log2, head_cap, masked=True,
                )
                self.round(acc_s, f_p)

                # Tiles that lie in the committed context whole need no mask; in a chain, earlier new tokens count too.
                clear = context
                if const_expr(self.mask == "causal"):
                    clear = context + first + row0 // self.group
                clear = cutlass.min(clear // self.tile_n, t1)
                second = start + self.step
                middle = second + cutlass.max(clear - second + self.step - 1, 0) // self.step * self.step
                for t in cutlass.range(second, middle, self.step, unroll=1):
                    self.next_tile(
                        mma_qk, mma_pv, f_q, f_k, f_v, f_p, acc_o, o, row_max, row_sum, keep, words, limits,
                        s_k, s_v, ring_k, ring_v, full_k, full_v, empty_k, empty_v, wg, local, count + t - t0, t * self.tile_n - context,
                        column, head_log2, head_cap, masked=False,
                    )
                for t in cutlass.range(middle, t1, self.step, unroll=1):
                    self.next_tile(
                        mma_qk, mma_pv, f_q, f_k, f_v, f_p, acc_o, o, row_max, row_sum, keep, words, limits,
                        s_k, s_v, ring_k, ring_v, full_k, full_v, empty_k, empty_v, wg, local, count + t - t0, t * self.tile_n - context,
                        column, head_log2, head_cap, masked=True,
                    )

                final = start + (t1 - 1 - start) // self.step * self.step
                index = count + final - t0
                stage, phase = index % self.stages, (index // self.stages) & 1
                cute.arch.mbarrier_wait(full_v + stage, phase)
                tile = self.expand(ring_v, s_v, stage, empty_v, wg, local)
                valid = context + first + q_len - final * self.tile_n
                if valid < self.tile_n:
                    # The last page's unused slots may hold anything, and 0 * NaN is NaN.
                    self.clear_tail(s_v, tile, valid, local)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=2 + wg, number_of_threads=WARPGROUP)
                multiply(mma_pv, acc_o, f_p, f_v[None, None, None, tile], accumulate=True)
                warpgroup.wait_group(0)
                if const_expr(not self.fp8):
                    self.release(empty_v + stage)
            count += t1 - t0

            if n + 1 < segment_count:
                # The next segment's queries are on their way while this one's results are stored.
                record.store(self.read_segment(segments, rest + n).load())
                self.read_queries(q, record, rank, thread, queries)
            for i in cutlass.range_constexpr(2):
                total = row_sum[i]
                total += cute.arch.shuffle_sync_bfly(total, 1)
                total += cute.arch.shuffle_sync_bfly(total, 2)
                row_sum[i] = total
                row_max[i] = row_max[i] * head_log2
            if const_expr(self.fp8):
                acc_o.store(acc_o.load() * v_scale[head])
            if const_expr(self.alternate):
                self.merge(exchange, acc_o, o, row_max, row_sum, wg, local)
                if wg == 0:
                    self.store(
                        o, row_max, row_sum, out, partial, stats, head, row0, q_start, query_rows, slot, rank, row, column
                    )
            else:
                self.store(
                    o, row_max, row_sum, out, partial, stats, head, row0, q_start, query_rows, slot, rank, row, column
                )

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def expand(
        self, ring: cute.Tensor, s_tile: cute.Tensor, stage: Int32, empty: cute.Pointer, wg: Int32, local: Int32
    ) -> Int32:
        """The tile of s_tile to multiply: with fp8 this warpgroup's own, filled from the ring's bytes, else the stage."""
        tile = stage
        if const_expr(self.fp8):
            chunks = self.head_dim // 16
            source = cute.tiled_divide(ring, (1, 16))  # ((1, 16), tile_n, D/16, stages)
            target = cute.tiled_divide(s_tile, (1, 8))  # ((1, 8), tile_n, D/8, 2)
            steps = self.tile_n * chunks // WARPGROUP
            raw = cute.make_rmem_tensor(cute.make_layout((16, steps)), Uint8)
            for i in cutlass.range_constexpr(steps):
                at = i * WARPGROUP + local
                cute.autovec_copy(source[(0, None), at // chunks, at % chunks, stage], raw[None, i])
            wide = cute.make_rmem_tensor(cute.make_layout((8, 2)), self.product)
            # No warp of the group may still multiply the tile before.
            cute.arch.barrier(barrier_id=2 + wg, number_of_threads=WARPGROUP)
            for i in cutlass.range_constexpr(steps):
                at = i * WARPGROUP + local
                bytes_ = cute.make_tensor(raw[None, i].iterator, cute.make_layout(16))
                values = cute.recast_tensor(bytes_, cutlass.Float8E4M3FN)
                cute.make_tensor(wide.iterator, cute.make_layout(16)).store(values.load().to(self.product))
                for half in cutlass.range_constexpr(2):
                    cute.autovec_copy(wide[None, half], target[(0, None), at // chunks, 2 * (at % chunks) + half, wg])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=2 + wg, number_of_threads=WARPGROUP)
            self.release(empty + stage)
            tile = wg
        return tile

    @cute.jit
    def read_queries(self, q: cute.Tensor, record: cute.Tensor, rank: Int32, thread: Int32, values: cute.Tensor) -> None:
        """A segment's query rows of this CTA, 16 bytes at a time; zeros past the request's end."""
        chunks = self.head_dim // 8
        row0 = record[2] + rank * self.rows
        values.fill(0.0)
        for i in cutlass.range_constexpr(self.rows * chunks // CONSUMERS):
            r = row0 + (i * CONSUMERS + thread) // chunks
            if r < record[4] * self.group:
                source = q[record[3] + r // self.group, record[1] * self.group + r % self.group, None]
                cute.autovec_copy(cute.tiled_divide(source, (8,))[None, thread % chunks], values[None, i])

    @cute.jit
    def write_queries(self, s_q: cute.Tensor, thread: Int32, values: cute.Tensor) -> None:
        chunks = self.head_dim // 8
        s_rows = cute.tiled_divide(s_q, (1, 8))  # ((1, 8), 64, D/8, rows/64)
        for i in cutlass.range_constexpr(self.rows * chunks // CONSUMERS):
            r = (i * CONSUMERS + thread) // chunks
            if const_expr(self.product is not self.dtype):
                narrow = cute.make_rmem_tensor(8, self.product)
                narrow.store(values[None, i].load().to(Float32).to(self.product))
                cute.autovec_copy(narrow, s_rows[(0, None), r % 64, thread % chunks, r // 64])
            else:
                cute.autovec_copy(values[None, i], s_rows[(0, None), r % 64, thread % chunks, r // 64])

    @cute.jit
    def next_tile(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        f_q: cute.Tensor,
        f_k: cute.Tensor,
        f_v: cute.Tensor,
        f_p: cute.Tensor,
        acc_o: cute.Tensor,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        keep: cute.Tensor,
        words: cute.Tensor,
        limits: cute.Tensor,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        ring_k: cute.Tensor,
        ring_v: cute.Tensor,
        full_k: cute.Pointer,
        full_v: cute.Pointer,
        empty_k: cute.Pointer,
        empty_v: cute.Pointer,
        wg: Int32,
        local: Int32,
        index: Int32,
        relative: Int32,
        column: Int32,
        log2_scale: Float32,
        cap_scale: Float32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Scores of one tile, while the probabilities of the tile before multiply its values."""
        stage, phase = index % self.stages, (index // self.stages) & 1
        before = index - self.step
        stage_v, phase_v = before % self.stages, (before // self.stages) & 1
        cute.arch.mbarrier_wait(full_k + stage, phase)
        acc_s = mma_qk.make_fragment_C(mma_qk.partition_shape_C((64, self.tile_n)))
        if const_expr(not self.alternate):
            # Warpgroups take turns at the matrix units, so that one's softmax runs beside the other's products.
            cute.arch.barrier(barrier_id=4 + wg, number_of_threads=CONSUMERS)
        tile = self.expand(ring_k, s_k, stage, empty_k, wg, local)
        multiply(mma_qk, acc_s, f_q, f_k[None, None, None, tile], accumulate=False)
        cute.arch.mbarrier_wait(full_v + stage_v, phase_v)
        tile = self.expand(ring_v, s_v, stage_v, empty_v, wg, local)
        multiply(mma_pv, acc_o, f_p, f_v[None, None, None, tile], accumulate=True)
        if const_expr(not self.alternate):
            cute.arch.barrier_arrive(barrier_id=5 - wg, number_of_threads=CONSUMERS)
        warpgroup.wait_group(1)
        if const_expr(not self.fp8):
            self.release(empty_k + stage)
        self.softmax(
            acc_s, row_max, row_sum, keep, words, limits, relative, column, log2_scale, cap_scale, masked=masked
        )
        warpgroup.wait_group(0)
        if const_expr(not self.fp8):
            self.release(empty_v + stage_v)
        # The maximum seldom rises once a few tiles are in.
        if cute.arch.vote_any_sync(keep[0] < 1.0 or keep[1] < 1.0):
            for b in cutlass.range_constexpr(self.head_dim // 8):
                for i in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        o[a, i, b] = o[a, i, b] * keep[i]
        self.round(acc_s, f_p)

    @cute.jit
    def round(self, acc_s: cute.Tensor, f_p: cute.Tensor) -> None:
        """Probabilities to the input type. The C layout of wgmma is the A layout of the next product, in order."""
        cute.make_tensor(f_p.iterator, acc_s.layout).store(acc_s.load().to(self.product))

    @cute.jit
    def softmax(
        self,
        acc_s: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        keep: cute.Tensor,
        words: cute.Tensor,
        limits: cute.Tensor,
        relative: Int32,
        column: Int32,
        log2_scale: Float32,
        cap_scale: Float32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Scores to probabilities against the running maximum; keep is what earlier results are multiplied by.

        relative: the tile's first key as an index among the new tokens (negative in the context).
        """
        n = self.tile_n // 8
        scores = cute.make_tensor(acc_s.iterator, cute.make_layout((2, 2, n)))  # (column, row, 8 columns)
        if const_expr(self.softcap):
            for j in cutlass.range_constexpr(cute.size(scores)):
                scores[j] = cute.math.tanh(scores[j] * cap_scale, fastmath=True)
        if const_expr(masked):
            for i in cutlass.range_constexpr(2):
                if const_expr(self.mask == "tree"):
                    for half in cutlass.range_constexpr(self.tile_n // 64):
                        word = window(words[i], relative + 64 * half) >> column.to(Uint64)
                        for b in cutlass.range_constexpr(8):
                            for a in cutlass.range_constexpr(2):
                                visible = (word & Uint64(1 << 8 * b + a)) != 0
                                score = scores[a, i, 8 * half + b]
                                scores[a, i, 8 * half + b] = score if visible else -Float32.inf
                else:
                    limit = limits[i] - relative - column
                    for b in cutlass.range_constexpr(n):
                        for a in cutlass.range_constexpr(2):
                            scores[a, i, b] = scores[a, i, b] if 8 * b + a < limit else -Float32.inf
        # Four chains each for the maximum and the sum: two warps on a scheduler do not hide one chain's latency.
        chains = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(n):
                pair = cute.arch.fmax(scores[0, i, b], scores[1, i, b])
                chains[b % 4] = pair if const_expr(b < 4) else cute.arch.fmax(chains[b % 4], pair)
            top = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
            top = cute.arch.fmax(top, row_max[i])
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 2))
            base = top * log2_scale
            if const_expr(masked):
                if top == -Float32.inf:
                    base = Float32(0.0)
            keep[i] = cute.math.exp2(row_max[i] * log2_scale - base, fastmath=True)
            row_max[i] = top
            for b in cutlass.range_constexpr(n):
                for a in cutlass.range_constexpr(2):
                    scores[a, i, b] = cute.math.exp2(scores[a, i, b] * log2_scale - base, fastmath=True)
                pair = scores[0, i, b] + scores[1, i, b]
                chains[b % 4] = pair if const_expr(b < 4) else chains[b % 4] + pair
            row_sum[i] = row_sum[i] * keep[i] + ((chains[0] + chains[1]) + (chains[2] + chains[3]))

    @cute.jit
    def clear_tail(self, s_v: cute.Tensor, stage: Int32, valid: Int32, local: Int32) -> None:
        chunks = self.head_dim // 8
        rows = cute.tiled_divide(s_v, (1, 8))  # ((1, 8), tile_n, D/8, stages)
        zeros = cute.make_rmem_tensor(8, self.product)
        zeros.fill(0.0)
        for r in cutlass.range(valid + local // chunks, self.tile_n, WARPGROUP // chunks, unroll=1):
            cute.autovec_copy(zeros, rows[(0, None), r, local % chunks, stage])

    @cute.jit
    def merge(
        self,
        exchange: cute.Tensor,
        acc_o: cute.Tensor,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        wg: Int32,
        local: Int32,
    ) -> None:
        """Both warpgroups hold the same rows over different tiles: the second hands its results to the first.

        row_max is in log2 units from here on.
        """
        size = self.head_dim // 2
        flat = cute.make_tensor(acc_o.iterator, cute.make_layout(size))
        if wg == 1:
            for j in cutlass.range_constexpr(size):
                exchange[local, j] = flat[j]
            for i in cutlass.range_constexpr(2):
                exchange[local, size + i] = row_max[i]
                exchange[local, size + 2 + i] = row_sum[i]
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
        if wg == 0:
            for i in cutlass.range_constexpr(2):
                other_max = exchange[local, size + i]
                top = cute.arch.fmax(row_max[i], other_max)
                base = top
                if top == -Float32.inf:
                    base = Float32(0.0)
                mine = cute.math.exp2(row_max[i] - base, fastmath=True)
                theirs = cute.math.exp2(other_max - base, fastmath=True)
                row_max[i] = top
                row_sum[i] = row_sum[i] * mine + exchange[local, size + 2 + i] * theirs
                for b in cutlass.range_constexpr(self.head_dim // 8):
                    for a in cutlass.range_constexpr(2):
                        o[a, i, b] = o[a, i, b] * mine + exchange[local, a + 2 * i + 4 * b] * theirs

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        head: Int32,
        row0: Int32,
        q_start: Int32,
        query_rows: Int32,
        slot: Int32,
        rank: Int32,
        row: Int32,
        column: Int32,
    ) -> None:
        """This thread's two rows: normalised to out, or as they are to the partial results."""
        for i in cutlass.range_constexpr(2):
            r = row + 8 * i
            if row0 + r < query_rows:
                if slot < 0:
                    token = q_start + (row0 + r) // self.group
                    target = cute.tiled_divide(out[token, head * self.group + (row0 + r) % self.group, None], (2,))
                    inverse = Float32(0.0)
                    if row_sum[i] > 0.0:
                        inverse = 1.0 / row_sum[i]
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for b in cutlass.range_constexpr(self.head_dim // 8):
                        for a in cutlass.range_constexpr(2):
                            pair[a] = (o[a, i, b] * inverse).to(self.dtype)
                        cute.autovec_copy(pair, target[None, 4 * b + column // 2])
                else:
                    index = slot * self.blocks + rank
                    part = cute.tiled_divide(partial[index, r, None], (2,))
                    pair = cute.make_rmem_tensor(2, Float32)
                    for b in cutlass.range_constexpr(self.head_dim // 8):
                        for a in cutlass.range_constexpr(2):
                            pair[a] = o[a, i, b]
                        cute.autovec_copy(pair, part[None, 4 * b + column // 2])
                    if column == 0:
                        stats[index, r, 0] = row_max[i]
                        stats[index, r, 1] = row_sum[i]

    @cute.kernel
    def combine(self, segments: cute.Tensor, out: cute.Tensor, partial: cute.Tensor, stats: cute.Tensor) -> None:
        """Sums the partial results of each work that several units share.

        Every unit whose first segment continues a work takes an equal share of the work's rows; a warp holds a row. Few
        parts: four rows at once; many parts: one row, many parts at once. So that every read is in flight together.
        """
        thread, _, _ = cute.arch.thread_idx()
        unit, chunk, _ = cute.arch.block_idx()
        record = self.read_segment(segments, unit)
        row0, query_rows, first, last = record[2], record[4] * self.group, record[9], record[10]
        parts = last - first + 1
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if record[11] > 0 and record[6] > 0:
            chunks = self.blocks * self.rows // COMBINE_ROWS
            warps = COMBINE_THREADS // 32
            # Warps of this work, and rows: warp w takes rows w, w + all, w + 2 all, …
            every = (parts - 1) * chunks * warps
            start = ((unit - first - 1) * chunks + chunk) * warps + cute.arch.make_warp_uniform(thread // 32)
            rows = cutlass.min(query_rows - row0, self.blocks * self.rows)
            if parts <= 4:
                for r in cutlass.range(start, rows, every * 4, unroll=1):
                    self.combine_few(record, out, partial, stats, r, every, rows, parts)
            else:
                for r in cutlass.range(start, rows, every, unroll=1):
                    self.combine_many(record, out, partial, stats, r, parts)

    @cute.jit
    def part_index(self, record: cute.Tensor, part: Int32, row: Int32) -> Int32:
        """Partial result of a work's part: part 0 began it (odd slot), the others continue it (even slots)."""
        odd = Int32(1) if part == 0 else Int32(0)
        return (2 * (record[9] + part) + odd) * self.blocks + row // self.rows

    @cute.jit
    def write_row(self, record: cute.Tensor, out: cute.Tensor, row: Int32, total: cute.Tensor, weights: Float32) -> None:
        width = self.head_dim // 32
        inverse = Float32(0.0)
        if weights > 0.0:
            inverse = 1.0 / weights
        result = cute.make_rmem_tensor(width, self.dtype)
        for i in cutlass.range_constexpr(width):
            result[i] = (total[i] * inverse).to(self.dtype)
        packed = record[2] + row
        target = out[record[3] + packed // self.group, record[1] * self.group + packed % self.group, None]
        cute.autovec_copy(result, cute.tiled_divide(target, (width,))[None, cute.arch.lane_idx()])

    @cute.jit
    def combine_few(
        self,
        record: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        start: Int32,
        stride: Int32,
        rows: Int32,
        parts: Int32,
    ) -> None:
        """Rows start, start + stride, start + 2 stride, start + 3 stride of a work of at most 4 parts."""
        lane = cute.arch.lane_idx()
        width = self.head_dim // 32
        values = cute.make_rmem_tensor(cute.make_layout((width, 4, 4)), Float32)
        stat = cute.make_rmem_tensor(cute.make_layout((2, 4, 4)), Float32)
        total = cute.make_rmem_tensor(width, Float32)
        for k in cutlass.range_constexpr(4):
            r = cutlass.min(start + k * stride, rows - 1)
            for p in cutlass.range_constexpr(4):
                index = self.part_index(record, cutlass.min(Int32(p), parts - 1), r)
                cute.autovec_copy(stats[index, r % self.rows, None], stat[None, p, k])
                part = cute.tiled_divide(partial[index, r % self.rows, None], (width,))
                cute.autovec_copy(part[None, lane], values[None, p, k])
        for k in cutlass.range_constexpr(4):
            top = -Float32.inf
            for p in cutlass.range_constexpr(4):
                stat[0, p, k] = stat[0, p, k] if p < parts else -Float32.inf
                top = cute.arch.fmax(top, stat[0, p, k])
            top = top if top != -Float32.inf else Float32(0.0)
            weights = Float32(0.0)
            total.fill(0.0)
            for p in cutlass.range_constexpr(4):
                weight = cute.math.exp2(stat[0, p, k] - top, fastmath=True)
                weights += weight * stat[1, p, k]
                for i in cutlass.range_constexpr(width):
                    total[i] = total[i] + weight * values[i, p, k]
            if start + k * stride < rows:
                self.write_row(record, out, start + k * stride, total, weights)

    @cute.jit
    def combine_many(
        self,
        record: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        row: Int32,
        parts: Int32,
    ) -> None:
        """One row of a work, 20 parts at once; lane p reads the maximum and the sum of part p."""
        at_once = 20
        lane = cute.arch.lane_idx()
        width = self.head_dim // 32
        values = cute.make_rmem_tensor(cute.make_layout((width, at_once)), Float32)
        stat = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(width, Float32)
        total.fill(0.0)
        top, weights = -Float32.inf, Float32(0.0)
        for begin in cutlass.range(0, parts, at_once, unroll=1):
            own = cutlass.min(begin + lane, parts - 1)
            cute.autovec_copy(stats[self.part_index(record, own, row), row % self.rows, None], stat)
            for j in cutlass.range_constexpr(at_once):
                index = self.part_index(record, cutlass.min(begin + j, parts - 1), row)
                part = cute.tiled_divide(partial[index, row % self.rows, None], (width,))
                cute.autovec_copy(part[None, lane], values[None, j])
            maximum = stat[0] if lane < at_once and begin + lane < parts else -Float32.inf
            before = top
            top = cute.arch.fmax(top, cute.arch.warp_reduction_max(maximum))
            base = top if top != -Float32.inf else Float32(0.0)
            keep = cute.math.exp2(before - base, fastmath=True)
            weight = cute.math.exp2(maximum - base, fastmath=True)
            weights = weights * keep + cute.arch.warp_reduction_sum(weight * stat[1])
            for i in cutlass.range_constexpr(width):
                total[i] = total[i] * keep
            for j in cutlass.range_constexpr(at_once):
                share = cute.arch.shuffle_sync(weight, j)
                for i in cutlass.range_constexpr(width):
                    total[i] = total[i] + share * values[i, j]
        self.write_row(record, out, row, total, weights)
