"""Verify attention over latents (MLA, absorbed form) for Hopper (sm_90a): trees of new tokens over a paged cache.

One latent head serves all query heads, so row r of a request is token * heads + head, and its query rows lie together
in memory. A CTA holds 64 of them and walks its stretch of the schedule (`attention.schedule`): one producer warp
streams tiles of 64 latents (512 + 64 channels) through TMA, another the queries. Keys are a tile's 576 columns, values
the first 512 of the same bytes. The results of 64 rows x 512 float32 do not fit one warpgroup: each of two holds 256
columns. The first makes the scores and the softmax, and hands probabilities (16 bits) and rescaling factors over in
shared memory. Partial results are merged in order by the inherited `combine_few` and `combine_many`, half of the
columns a CTA.

**Budget.** Shared memory: queries 72 KiB, two tiles 144 KiB, probabilities 8 KiB, factors, sums and barriers under 1
KiB: 225 KiB of 227. Registers of a consumer thread: 128 of results and, in the first warpgroup, 32 of scores, of 240; a
producer's: 24. Matrix units: 36 products m64n64k16 of 32 cycles and 8 m64n256k16 of 128, 2176 cycles a tile; at 4.5
TB/s over 132 multiprocessors of 1.755 GHz a tile of 73,728 B takes 3800. So 64 rows are bound by memory, and the
products need no overlap with the softmax (about 600 cycles).

**Floors and predictions, before any measurement**, 6 heads (a TP16 rank of Kimi-K3), one layer, us, for Q = 1, 8, 16,
32 new tokens (6, 48, 96, 192 rows). Floor: the larger of latents' bytes / 4.5 TB/s and flops of the rows / 790 TFLOP/s.
Predicted, by `eval.bench_latent.predicted_us`: 3 us of latencies and launches; tiles at 2800 cycles, at 4.0 TB/s of
memory or at 5.5 TB/s of L2, whichever is slowest; partial results of shared requests written and read at 4 TB/s.

| context | R=1: floor | predicted | R=8: floor | predicted | R=32: floor | predicted |
|---|---|---|---|---|---|---|
| 1152 | 0.3, 0.3, 0.3, 0.6 | 6.3, 6.7, 7.2, 8.2 | 2.4, 2.4, 2.5, 5.0 | 6.7, 10, 13, 17 | 9.5, 9.5, 9.9, 20 | 16, 20, 26, 37 |
| 8192 | 2.1, 2.1, 2.2, 4.4 | 6.6, 9.4, 13, 16 | 17, 17, 17, 35 | 23, 29, 37, 54 | 67, 67, 70, 139 | 81, 86, 121, 182 |
| 131072 | 34, 34, 35, 69 | 42, 47, 65, 95 | 268, 268, 277, 555 | 308, 314, 452, 673 | 1070, 1070, 1110, 2220 | 1220, 1220, 1770, 2650 |

From 96 rows on the loss is in the design, not in memory: scores, softmax and values follow each other (2800 cycles for
2176 of products), and a second CTA's tiles come through L2.

Requests of more than 64 rows take `blocks` CTAs abreast, whose second read of a tile is to hit L2: memory is read once,
but L2 gives each multiprocessor up to 26 B a cycle here, which no measurement has confirmed.

Launched with programmatic dependent launch; what is read ahead of the predecessor is as in `attention.verify`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, Uint64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from verify_kernels.cute.attention.verify import (
    COMBINE_ROWS,
    COMBINE_THREADS,
    CONSUMERS,
    LOG2_E,
    THREADS,
    WARPGROUP,
    VerifyAttention,
    multiply,
)
from verify_kernels.cute.variants import LATENT_RANK as RANK, LATENT_WIDTH as WIDTH

TILE = 64  # keys of a tile, rows of a CTA, columns of a box
STAGES = 2
READY, FREE, TURN = 4, 5, 6  # named barriers: probabilities written, probabilities read, a segment's maxima and sums


class LatentAttention(VerifyAttention):
    """One compiled variant. heads: 1 to 16 query heads; page_size 16 to 128; mask "tree" or "causal"; blocks: CTAs
    abreast, each with its own 64 rows; run: tiles that the schedule keeps together, so that short contexts have fewer
    parts."""

    def __init__(
        self, dtype: type[cutlass.Numeric], heads: int, page_size: int, mask: str, *, blocks: int, run: int
    ) -> None:
        super().__init__(
            dtype, 128, heads, 1, page_size, mask,
            rows=TILE, blocks=blocks, tile_n=TILE, stages=STAGES, softcap=False, fp8=False,
        )  # fmt: skip
        self.run = run
        self.head_dim = RANK // 2  # value columns of a warpgroup, which what is inherited works on

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [N, H, 576]
        pages: cute.Tensor,  # [P, page, 1, 576]
        page_table: cute.Tensor,  # [R, maxP] int32
        ancestors: cute.Tensor,  # [N] int64, read by mask "tree" only
        segments: cute.Tensor,  # [S, RECORD] int32
        out: cute.Tensor,  # [N, H, 512]
        partial: cute.Tensor,  # [2 * units * blocks, 64, 512] float32
        stats: cute.Tensor,  # [2 * units * blocks, 64, 2] float32: max (log2 units), sum
        scale: Float32,
        fresh: Int32,  # 1: the schedule may just have been made
        stream: Any,
    ) -> None:
        units = partial.shape[0] // (2 * self.blocks)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        tile_layout = cute.tile_to_shape(atom, (TILE, WIDTH, STAGES), (0, 1, 2))
        q_layout = cute.tile_to_shape(atom, (TILE, WIDTH), (0, 1))
        p_layout = cute.tile_to_shape(atom, (TILE, TILE), (0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        cache = cute.make_layout((pages.shape[0] * self.page_size, WIDTH), stride=(WIDTH, 1))
        box_layout = cute.tile_to_shape(atom, (self.box, TILE), (0, 1))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(
            load, cute.make_tensor(pages.iterator, cache), box_layout, (self.box, TILE)
        )
        rows = cute.make_layout((q.shape[0] * self.heads, WIDTH), stride=(WIDTH, 1))
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, cute.make_tensor(q.iterator, rows), p_layout, (TILE, TILE))
        major = warpgroup.OperandMajorMode
        mma_qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, (1, 1, 1), (TILE, TILE)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.MN, Float32, (1, 1, 1), (TILE, self.head_dim)
        )
        self.kernel(
            k_atom, k_tma, q_atom, q_tma, page_table, ancestors, segments, out, partial, stats, scale * LOG2_E, fresh,
            q_layout, tile_layout, p_layout, mma_qk, mma_pv,
        ).launch(
            grid=[units * self.blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip
        self.combine(segments, out, partial, stats).launch(
            grid=[units, self.blocks * TILE // COMBINE_ROWS, 2],
            block=[COMBINE_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        page_table: cute.Tensor,
        ancestors: cute.Tensor,
        segments: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        log2_scale: Float32,
        fresh: Int32,
        q_layout: cute.ComposedLayout,
        tile_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        unit, rank = block // self.blocks, block % self.blocks

        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, 2 * STAGES + 2)
        empty, full_q, empty_q = full + STAGES, full + 2 * STAGES, full + 2 * STAGES + 1
        s_q = smem.allocate_tensor(self.dtype, q_layout.outer, 1024, q_layout.inner)
        s_k = smem.allocate_tensor(self.dtype, tile_layout.outer, 1024, tile_layout.inner)
        s_p = smem.allocate_tensor(self.dtype, p_layout.outer, 1024, p_layout.inner)
        s_keep = smem.allocate_tensor(Float32, cute.make_layout(TILE), 16)
        s_stats = smem.allocate_tensor(Float32, cute.make_layout((TILE, 2)), 16)

        if fresh != 0:
            cute.arch.griddepcontrol_wait()
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, 8)
                cute.arch.mbarrier_init(full_q, 1)
                cute.arch.mbarrier_init(empty_q, 4)
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(q_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self.produce_tiles(k_atom, k_tma, s_k, full, empty, page_table, segments, unit, rank)
            if warp == 1:
                self.produce_queries(q_atom, q_tma, s_q, full_q, empty_q, segments, unit, rank)
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                mma_qk, mma_pv, s_q, s_k, s_p, s_keep, s_stats, full, empty, full_q, empty_q, ancestors, segments, out,
                partial, stats, log2_scale, unit, rank, thread - WARPGROUP,
            )  # fmt: skip

    @cute.jit
    def tiles_of(self, segments: cute.Tensor, at: Int32, rank: Int32) -> tuple[Int32, Int32]:
        """[first, last) tiles of a segment; none where this CTA's rows lie past the request's end."""
        end = segments[at, 5] + segments[at, 13] + segments[at, 4]
        first = segments[at, 6] * self.run
        last = cutlass.min(segments[at, 7] * self.run, (end + TILE - 1) // TILE)
        if const_expr(self.blocks > 1):
            if segments[at, 2] + rank * TILE >= segments[at, 4] * self.group:
                last = first
        return first, last

    @cute.jit
    def produce_tiles(
        self,
        atom: cute.CopyAtom,
        tma: cute.Tensor,
        s_k: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        page_table: cute.Tensor,
        segments: cute.Tensor,
        unit: Int32,
        rank: Int32,
    ) -> None:
        g_boxes = cute.flat_divide(tma, (self.box, TILE))  # (box, 64, boxes, 9)
        s_boxes = cute.flat_divide(s_k, (self.box, TILE))  # (box, 64, 64/box, 9, stages)
        t_s, t_g = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
        )
        total = cute.size(g_boxes, mode=[2])
        segment_count = segments[unit, 11]
        count = Int32(0)
        for n in cutlass.range(segment_count, unroll=1):
            at = unit
            if n > 0:
                at = segments[unit, 12] + n - 1
            request, context = segments[at, 0], segments[at, 5]
            end = context + segments[at, 13] + segments[at, 4]
            first, last = self.tiles_of(segments, at, rank)
            following = self.box_index(page_table, request, first, end, total)
            for t in cutlass.range(first, last, unroll=1):
                boxes = following
                if t + 1 < last:
                    following = self.box_index(page_table, request, t + 1, end, total)
                stage, phase = count % STAGES, (count // STAGES) & 1
                count += 1
                if (t + 1) * TILE > context:
                    cute.arch.griddepcontrol_wait()
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE * WIDTH * 2)
                for i in cutlass.range_constexpr(self.boxes):
                    box = cute.arch.shuffle_sync(boxes, i)
                    for c in cutlass.range_constexpr(WIDTH // TILE):
                        cute.copy(atom, t_g[None, box, c], t_s[None, i, c, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def produce_queries(
        self,
        atom: cute.CopyAtom,
        tma: cute.Tensor,
        s_q: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        segments: cute.Tensor,
        unit: Int32,
        rank: Int32,
    ) -> None:
        """64 rows from a segment's first on. Past the request's end: another's rows, or zeros, which nothing stores."""
        cute.arch.griddepcontrol_wait()
        segment_count = segments[unit, 11]
        count = Int32(0)
        for n in cutlass.range(segment_count, unroll=1):
            at = unit
            if n > 0:
                at = segments[unit, 12] + n - 1
            first, last = self.tiles_of(segments, at, rank)
            if first < last:
                row = segments[at, 3] * self.group + segments[at, 2] + rank * TILE
                g_boxes = cute.flat_divide(cute.domain_offset((row, 0), tma), (TILE, TILE))  # (64, 64, N, 9)
                s_boxes = cute.flat_divide(s_q, (TILE, TILE))  # (64, 64, 1, 9)
                t_s, t_g = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
                )
                cute.arch.mbarrier_wait(empty, (count & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * WIDTH * 2)
                for c in cutlass.range_constexpr(WIDTH // TILE):
                    cute.copy(atom, t_g[None, 0, c], t_s[None, 0, c], tma_bar_ptr=full)
                count += 1

    @cute.jit
    def consume(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        s_p: cute.Tensor,
        s_keep: cute.Tensor,
        s_stats: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        full_q: cute.Pointer,
        empty_q: cute.Pointer,
        ancestors: cute.Tensor,
        segments: cute.Tensor,
        out: cute.Tensor,
        partial: cute.Tensor,
        stats: cute.Tensor,
        log2_scale: Float32,
        unit: Int32,
        rank: Int32,
        thread: Int32,
    ) -> None:
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = cute.arch.lane_idx()
        local = thread % WARPGROUP
        row = (local // 32) * 16 + lane // 4  # this thread holds rows `row` and `row + 8`
        column = (lane % 4) * 2

        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        f_q = mma_qk.make_fragment_A(qk.partition_A(s_q))
        f_k = mma_qk.make_fragment_B(qk.partition_B(s_k))
        f_p = mma_pv.make_fragment_A(pv.partition_A(s_p))
        # This warpgroup's 256 columns of every tile, as (keys, columns, stages) and with columns first.
        block, atoms = TILE * TILE, TILE // 8
        halves = cute.make_layout(
            ((8, atoms), (TILE, 4), 2, STAGES), stride=((TILE, 8 * TILE), (1, block), 4 * block, TILE * WIDTH)
        )
        s_v = cute.make_tensor(s_k.iterator, halves)[None, None, wg, None]
        s_vt = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
        f_v = mma_pv.make_fragment_B(pv.partition_B(s_vt))
        acc_o = mma_pv.make_fragment_C(mma_pv.partition_shape_C((TILE, self.head_dim)))
        o = cute.make_tensor(acc_o.iterator, cute.make_layout((2, 2, self.head_dim // 8)))
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        keep = cute.make_rmem_tensor(2, Float32)
        words = cute.make_rmem_tensor(2, Uint64)
        limits = cute.make_rmem_tensor(2, Int32)
        out_halves = cute.logical_divide(out, (None, None, self.head_dim))
        partial_halves = cute.logical_divide(partial, (None, None, self.head_dim))
        own_out, own_partial = out_halves[None, None, (None, wg)], partial_halves[None, None, (None, wg)]

        segment_count, rest = segments[unit, 11], segments[unit, 12]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if wg == 1:
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=CONSUMERS)
        count, with_rows = Int32(0), Int32(0)
        for n in cutlass.range(segment_count, unroll=1):
            at = unit
            if n > 0:
                at = rest + n - 1
            record = self.read_segment(segments, at)
            row0, q_start, q_len, context = record[2] + rank * TILE, record[3], record[4], record[5]
            slot, before = record[8], record[13]
            end = context + before + q_len
            first, last = self.tiles_of(segments, at, rank)
            for i in cutlass.range_constexpr(2):
                token = (row0 + row + 8 * i) // self.group
                words[i] = Uint64(0)
                limits[i] = before + q_len
                if const_expr(self.mask == "tree"):
                    if token < q_len:
                        own_bits = (Uint64(2) << (before + q_len - 1).to(Uint64)) - Uint64(1)
                        words[i] = ancestors[q_start + token].to(Uint64) & own_bits
                if const_expr(self.mask == "causal"):
                    limits[i] = before + cutlass.min(token + 1, q_len)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            acc_o.fill(0.0)
            if first < last:
                if wg == 0:
                    cute.arch.mbarrier_wait(full_q, with_rows & 1)
                with_rows += 1
                # Tiles that lie in the committed context whole need no mask.
                clear = cutlass.max(cutlass.min(context // TILE, last), first)
                for t in cutlass.range(first, clear, unroll=1):
                    self.tile(
                        mma_qk, mma_pv, f_q, f_k, f_v, f_p, s_p, s_v, s_keep, acc_o, o, row_max, row_sum, keep, words,
                        limits, full, empty, wg, local, row, column, count + t - first, t * TILE - context, Int32(TILE),
                        log2_scale, masked=False,
                    )  # fmt: skip
                for t in cutlass.range(clear, last, unroll=1):
                    self.tile(
                        mma_qk, mma_pv, f_q, f_k, f_v, f_p, s_p, s_v, s_keep, acc_o, o, row_max, row_sum, keep, words,
                        limits, full, empty, wg, local, row, column, count + t - first, t * TILE - context,
                        end - t * TILE, log2_scale, masked=True,
                    )  # fmt: skip
                count += last - first
                if wg == 0:
                    self.release(empty_q)
                    for i in cutlass.range_constexpr(2):
                        total = row_sum[i]
                        total += cute.arch.shuffle_sync_bfly(total, 1)
                        total += cute.arch.shuffle_sync_bfly(total, 2)
                        if column == 0:
                            s_stats[row + 8 * i, 0] = row_max[i] * log2_scale
                            s_stats[row + 8 * i, 1] = total
                # The next segment's are written after its first tile, where both have met again.
                cute.arch.barrier(barrier_id=TURN, number_of_threads=CONSUMERS)
                for i in cutlass.range_constexpr(2):
                    row_max[i], row_sum[i] = s_stats[row + 8 * i, 0], s_stats[row + 8 * i, 1]
                self.store(
                    o, row_max, row_sum, own_out, own_partial, stats, Int32(0), row0, q_start, q_len * self.group, slot,
                    rank, row, column,
                )  # fmt: skip

    @cute.jit
    def tile(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        f_q: cute.Tensor,
        f_k: cute.Tensor,
        f_v: cute.Tensor,
        f_p: cute.Tensor,
        s_p: cute.Tensor,
        s_v: cute.Tensor,
        s_keep: cute.Tensor,
        acc_o: cute.Tensor,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        keep: cute.Tensor,
        words: cute.Tensor,
        limits: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        wg: Int32,
        local: Int32,
        row: Int32,
        column: Int32,
        index: Int32,
        relative: Int32,
        valid: Int32,
        log2_scale: Float32,
        masked: cutlass.Constexpr[bool],
    ) -> None:
        """Scores and softmax of one tile by the first warpgroup, then both multiply its values. valid: live keys."""
        stage, phase = index % STAGES, (index // STAGES) & 1
        cute.arch.mbarrier_wait(full + stage, phase)
        if wg == 0:
            acc_s = mma_qk.make_fragment_C(mma_qk.partition_shape_C((TILE, TILE)))
            multiply(mma_qk, acc_s, f_q, f_k[None, None, None, stage], accumulate=False)
            warpgroup.wait_group(0)
            self.softmax(
                acc_s, row_max, row_sum, keep, words, limits, relative, column, log2_scale, Float32(0.0), masked=masked
            )
            cute.arch.barrier(barrier_id=FREE, number_of_threads=CONSUMERS)
            scores = cute.make_tensor(acc_s.iterator, cute.make_layout((2, 2, TILE // 8)))
            pairs = cute.tiled_divide(s_p, (1, 2))  # ((1, 2), 64, 32)
            pair = cute.make_rmem_tensor(2, self.dtype)
            for i in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(TILE // 8):
                    for a in cutlass.range_constexpr(2):
                        pair[a] = scores[a, i, b].to(self.dtype)
                    cute.autovec_copy(pair, pairs[(0, None), row + 8 * i, 4 * b + column // 2])
                if column == 0:
                    s_keep[row + 8 * i] = keep[i]
            cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(masked):
            if valid < TILE:
                # The last page's unused slots may hold anything, and 0 * NaN is NaN. Their scores are masked.
                self.clear_tail(s_v, stage, valid, local)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=2 + wg, number_of_threads=WARPGROUP)
        cute.arch.barrier(barrier_id=READY, number_of_threads=CONSUMERS)
        for i in cutlass.range_constexpr(2):
            keep[i] = s_keep[row + 8 * i]
        # The maximum seldom rises once a few tiles are in.
        if cute.arch.vote_any_sync(keep[0] < 1.0 or keep[1] < 1.0):
            for b in cutlass.range_constexpr(self.head_dim // 8):
                for i in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        o[a, i, b] = o[a, i, b] * keep[i]
        multiply(mma_pv, acc_o, f_p, f_v[None, None, None, stage], accumulate=True)
        warpgroup.wait_group(0)
        self.release(empty + stage)
        if wg == 1:
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=CONSUMERS)

    @cute.kernel
    def combine(self, segments: cute.Tensor, out: cute.Tensor, partial: cute.Tensor, stats: cute.Tensor) -> None:
        """As in attention, for one half of the columns."""
        thread, _, _ = cute.arch.thread_idx()
        unit, chunk, half = cute.arch.block_idx()
        record = self.read_segment(segments, unit)
        row0, query_rows, first, last = record[2], record[4] * self.group, record[9], record[10]
        parts = last - first + 1
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if record[11] > 0 and record[6] > 0:
            own_out = cute.logical_divide(out, (None, None, self.head_dim))[None, None, (None, half)]
            own_partial = cute.logical_divide(partial, (None, None, self.head_dim))[None, None, (None, half)]
            chunks = self.blocks * self.rows // COMBINE_ROWS
            warps = COMBINE_THREADS // 32
            every = (parts - 1) * chunks * warps
            start = ((unit - first - 1) * chunks + chunk) * warps + cute.arch.make_warp_uniform(thread // 32)
            rows = cutlass.min(query_rows - row0, self.blocks * self.rows)
            if parts <= 4:
                for r in cutlass.range(start, rows, every * 4, unroll=1):
                    self.combine_few(record, own_out, own_partial, stats, r, every, rows, parts)
            else:
                for r in cutlass.range(start, rows, every, unroll=1):
                    self.combine_many(record, own_out, own_partial, stats, r, parts)
