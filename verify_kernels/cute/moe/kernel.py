"""Grouped products of a few tokens with their experts for Hopper (sm_90a), at the speed of reading the experts once.

Two launches make a mixture of experts. The first (`down=False`) multiplies gate and up of every expert that any token
picked, takes SwiGLU of them and the token's routing weight into `hidden`, a row for each (token, pick) pair. The second
(`down=True`) multiplies those rows and adds up each token's. The weights are the M side of wgmma and the tokens its N
side. One warp fills a ring in shared memory: tiles of weights by TMA, the rows that go with them by cp.async, gathered
through the tokens of the expert at hand.

Which experts are met is found in shared memory by every CTA for itself: a bit mask of tokens for each expert, from which
the list of experts and every pair's place in it follow, the same in all CTAs. The tiles to multiply form one line
(`schedule.py`), cut into equal stretches, so the same launch serves any routing. The first kernel's line goes expert by
expert, and its columns are an expert's own tokens, closely packed. The second's goes row tile by row tile through all
experts, and its columns are all tokens, zero where one did not pick the expert at hand: sums over experts are sums over
k. Row tiles that several CTAs share are added in float32 through L2 in the order of the line, so results do not change
from run to run.

Quantised weights come packed (`pack.py`), a tile as one stretch of bytes. A thread reads its own values of them, makes bf16 of
them in registers, and wgmma takes them from there. MXFP4 has its scales put in before the product, e4m3 blocks theirs after
each tile of it.

With programmatic dependent launch the second kernel fills its ring with weights while the first still runs: the picks
were complete before the first kernel let it start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from verify_kernels.cute.moe.dequantize import MXFP4_SHIFT, e2m1_pairs, e4m3_factor, e4m3_pairs, multiply, mxfp4_factor
from verify_kernels.cute.moe.pack import BYTES
from verify_kernels.cute.moe.schedule import contributors, expert_of, line

WARPGROUP = 128
ROWS = 128  # of a tile of weights: two warpgroups
GROUPS = ROWS // 64
THREADS = GROUPS * WARPGROUP + 32
BOX = 64  # columns of 16 bits: 128 bytes, one swizzle row
LOG2_E = 1.4426950408889634


class Picks(NamedTuple):
    """What `Experts.sort` leaves in shared memory, all int32."""

    masks: cute.Tensor  # [words, E]: bit t % 32 of word t // 32 is set if token t picked the expert
    first: cute.Tensor  # [E]: where an expert's pairs begin
    active: cute.Tensor  # the picked experts in order; their number at the end
    pairs: cute.Tensor  # [tokens * k]: token * k + pick, by expert, then by token


@cute.jit
def tokens_below(masks: cute.Tensor, e: Int32, t: Int32, words: cutlass.Constexpr[int]) -> Int32:
    """Tokens before t that picked expert e."""
    n = Int32(0)
    for i in cutlass.range_constexpr(words):
        bits = cutlass.min(cutlass.max(t - 32 * i, 0), 32)
        below = ((Int64(1) << bits.to(Int64)) - 1).to(Int32)
        n += cute.arch.popc(masks[i, e] & below)
    return n


class Experts:
    """One compiled variant; see `compile.ExpertsVariant` for the constants."""

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        tokens: int,
        experts: int,
        top_k: int,
        stages: int,
        *,
        down: bool,
        kind: str,
        pdl: bool,
    ) -> None:
        if tokens not in (8, 16, 32, 64):
            raise ValueError(f"experts: tokens is {tokens}, allowed: 8, 16, 32, 64")
        if not 1 <= top_k <= min(experts, 32) or experts > 1024:
            raise ValueError(f"experts: found {top_k} of {experts}, allowed: 1 to 32 of up to 1024")
        if kind not in ("plain", *BYTES):
            raise ValueError(f"experts: kind is {kind!r}, allowed: plain, {', '.join(BYTES)}")
        if kind != "plain" and dtype is not cutlass.BFloat16:
            raise ValueError(f"experts: dtype is {dtype} with {kind}, allowed: bfloat16")
        self.dtype, self.tokens, self.experts, self.top_k, self.stages = dtype, tokens, experts, top_k, stages
        self.down, self.kind, self.pdl = down, kind, pdl
        self.plain = kind == "plain"
        self.tile_k = BOX if self.plain else 2 * BOX
        self.words = -(-tokens // 32)  # of an expert's mask of tokens
        self.pairs = tokens * top_k
        self.weight_bytes = ROWS * BOX * 2 if self.plain else BYTES[kind]
        self.copies = tokens * 8 // 32  # 16-byte pieces of a box's rows for each lane
        # Products of 8 columns where an expert has no more: 64 would take longer than reading 4-bit weights.
        self.narrow = not self.plain and not down and tokens > 8
        # Partial sums in flight: blocks of 8 columns, units. An expert has few tokens and its row tiles two or three
        # units; a row tile of the output has many of each.
        self.blocks_at_once, self.units_at_once = (1, 2)
        if down:
            self.blocks_at_once, self.units_at_once = tokens // 8, {8: 8, 16: 8, 32: 4, 64: 2 if self.plain else 1}[tokens]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, H], rows may be strided; down: hidden [T * k, I]
        w: cute.Tensor,  # [E, 2 I, H]; down: [E, H, I]; packed: [E, row tiles, k tiles, bytes] uint8
        ids: cute.Tensor,  # [T, k] int64, a row's all different; rows may be strided
        weights: cute.Tensor | None,  # [T, k] float32; not for down
        y: cute.Tensor,  # hidden [T * k, I]; down: [T, H]
        partial: cute.Tensor,  # [2 * units, groups, tokens / 8, 128, 4] float32
        counters: cute.Tensor,  # [units * groups] int32, zero before and after
        units: Int32,
        stream: Any,
    ) -> None:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x = self.rows_apart(x)
        w_atom = None
        # A packed tile ends on a line of 128 bytes.
        w_layout = cute.make_layout((4, -(-self.weight_bytes // 128) * 8, self.stages))
        if const_expr(self.plain):
            rows = w.shape[1]
            view = cute.make_layout((rows, w.shape[2], self.experts), stride=(w.stride[1], 1, w.stride[0]))
            if const_expr(not self.down):
                # 8 rows of gate, the 8 of up that belong to them, and so on: one thread of wgmma holds rows r and r + 8.
                view = cute.make_layout(
                    ((8, 2, rows // 16), w.shape[2], self.experts),
                    stride=((w.stride[1], rows // 2 * w.stride[1], 8 * w.stride[1]), 1, w.stride[0]),
                )
            w_layout = cute.tile_to_shape(atom, (ROWS, BOX, self.stages), (0, 1, 2))
            w_atom, w = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                cute.make_tensor(w.iterator, view),
                cute.tile_to_shape(atom, (ROWS, BOX), (0, 1)),
                (ROWS, BOX),
            )
        x_layout = cute.tile_to_shape(atom, (self.tokens, self.tile_k, self.stages), (0, 1, 2))
        self.kernel(w_atom, w, x, ids, weights, y, partial, counters, w_layout, x_layout).launch(
            grid=[units, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=self.pdl,
        )

    @cute.jit
    def rows_apart(self, matrix: cute.Tensor) -> cute.Tensor:
        """The stride of a single row may be anything, and cp.async wants a multiple of 16 bytes."""
        stride = cute.assume(cutlass.max(matrix.stride[0], Int64(matrix.shape[1])), divby=8)
        return cute.make_tensor(matrix.iterator, cute.make_layout(matrix.shape, stride=(stride, 1)))

    def product(self, columns: int) -> cute.TiledMma:
        """64 rows of weights with so many columns; packed weights come from registers."""
        major = warpgroup.OperandMajorMode.K
        source = warpgroup.OperandSource.SMEM if self.plain else warpgroup.OperandSource.RMEM
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (64, columns), source
        )

    @cute.kernel
    def kernel(
        self,
        w_atom: cute.CopyAtom | None,
        w: cute.Tensor,
        x: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor | None,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        w_layout: cute.Layout | cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        unit, _, _ = cute.arch.block_idx()
        units, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, 2 * self.stages)
        empty = full + self.stages
        arrived = smem.allocate_tensor(Int32, cute.make_layout(GROUPS), 16)
        picks = Picks(
            smem.allocate_tensor(Int32, cute.make_layout((self.words, self.experts)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.experts), 16),
            smem.allocate_tensor(Int32, cute.make_layout(min(self.experts, self.pairs) + 1), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.pairs), 16),
        )
        if const_expr(self.plain):
            s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        else:
            s_w = smem.allocate_tensor(Int32, w_layout, 1024)
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, 1024, x_layout.inner)

        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + s, 33)  # the weights, and 32 lanes' rows
                    cute.arch.mbarrier_init(empty + s, 4 * GROUPS)
            if const_expr(self.plain):
                cpasync.prefetch_descriptor(w_atom)
        cute.arch.mbarrier_init_fence()
        if const_expr(not self.down):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.sort(ids, picks, thread, warp)

        active = picks.active[min(self.experts, self.pairs)]
        rows = y.shape[1] * (1 if self.down else 2)
        tiles = (rows + ROWS - 1) // ROWS, (x.shape[1] + self.tile_k - 1) // self.tile_k
        row_tiles, k_tiles, share = line(self.down, tiles[0], tiles[1], active, units)
        begin = unit * share
        end = cutlass.min(begin + share, row_tiles * k_tiles)
        if warp == 4 * GROUPS:
            self.produce(w_atom, w, x, s_w, s_x, full, empty, picks, begin, end, tiles, ids.shape[0], active)
        else:
            self.consume(
                s_w, s_x, full, empty, arrived, picks, ids, weights, y, partial, counters, rows, unit, share,
                begin, end, k_tiles, tiles[0], thread,
            )

    @cute.jit
    def sort(self, ids: cute.Tensor, picks: Picks, thread: Int32, warp: Int32) -> None:
        """Which tokens picked each expert; the experts that were picked, in order; their pairs, in order of tokens."""
        count = ids.shape[0] * self.top_k
        rounds = -(-self.pairs // THREADS)
        found = cute.make_rmem_tensor(cute.make_layout(rounds), Int32)
        for i in cutlass.range_constexpr(rounds):
            pair = i * THREADS + thread
            found[i] = 0
            if pair < count:
                # Not through L1: the kernel that wrote it may have run since this SM read the last picks.
                pick = ids.iterator + (pair // self.top_k * ids.stride[0] + pair % self.top_k)
                found[i] = cute.arch.load(pick, Int64, cop="cg").to(Int32)
        for e in cutlass.range(thread, self.experts * self.words, THREADS, unroll=1):
            picks.masks[e % self.words, e // self.words] = 0
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(rounds):
            pair = i * THREADS + thread
            if pair < count:
                t = pair // self.top_k
                word = picks.masks.iterator + (found[i] * self.words + t // 32)
                cute.arch.atomic_or(word, Int32(1) << (t % 32), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        if warp == 0:
            lane = cute.arch.lane_idx()
            each = -(-self.experts // 32)
            active, pairs = Int32(0), Int32(0)
            for i in cutlass.range(each, unroll=4):
                e = lane * each + i
                if e < self.experts:
                    n = self.tokens_of(picks.masks, e)
                    pairs += n
                    active += 1 if n > 0 else 0
            own_active, own_pairs = active, pairs
            for i in cutlass.range_constexpr(5):
                before_active = cute.arch.shuffle_sync_up(active, 1 << i, mask_and_clamp=0)
                before_pairs = cute.arch.shuffle_sync_up(pairs, 1 << i, mask_and_clamp=0)
                if lane >= 1 << i:
                    active += before_active
                    pairs += before_pairs
            if lane == 31:
                picks.active[min(self.experts, self.pairs)] = active
            active -= own_active
            pairs -= own_pairs
            for i in cutlass.range(each, unroll=4):
                e = lane * each + i
                if e < self.experts:
                    picks.first[e] = pairs
                    n = self.tokens_of(picks.masks, e)
                    if n > 0:
                        picks.active[active] = e
                        active += 1
                    pairs += n
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(rounds):
            pair = i * THREADS + thread
            if pair < count:
                place = tokens_below(picks.masks, found[i], pair // self.top_k, self.words)
                picks.pairs[picks.first[found[i]] + place] = pair
        cute.arch.sync_threads()

    @cute.jit
    def tokens_of(self, masks: cute.Tensor, e: Int32) -> Int32:
        n = cute.arch.popc(masks[0, e])
        for i in cutlass.range_constexpr(1, self.words):
            n += cute.arch.popc(masks[i, e])
        return n

    @cute.jit
    def produce(
        self,
        w_atom: cute.CopyAtom | None,
        w: cute.Tensor,
        x: cute.Tensor,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        picks: Picks,
        begin: Int32,
        end: Int32,
        tiles: tuple[Int32, Int32],
        tokens: Int32,
        active: Int32,
    ) -> None:
        w_s, w_g = s_w, w
        if const_expr(self.plain):
            g_boxes = cute.flat_divide(w, (ROWS, BOX))
            s_boxes = cute.flat_divide(s_w, (ROWS, BOX))
            w_s, w_g = cpasync.tma_partition(
                w_atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
            )
        lane = cute.arch.lane_idx()
        rows = cute.make_rmem_tensor(cute.make_layout(self.copies), Int64)  # bytes from x to this lane's; -1: none
        used = Int32(0)
        count = cutlass.max(end - begin, 0)
        ahead = cutlass.Int32(0)
        if const_expr(self.down):
            ahead = cutlass.min(count, self.stages)
            for i in cutlass.range(ahead, unroll=1):
                self.load_w(w_atom, w_s, w_g, full, picks, begin + i, i, tiles, active)
            cute.arch.griddepcontrol_wait()
        at = Int32(-1)
        for i in cutlass.range(count, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            if i >= ahead:
                if i >= self.stages:
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                self.load_w(w_atom, w_s, w_g, full, picks, begin + i, stage, tiles, active)
            which, _, k_tile = expert_of(self.down, begin + i, tiles[0], tiles[1], active)
            if which != at:
                at = which
                used = self.find_rows(rows, x, picks, picks.active[which], tokens, lane)
            self.load_x(x, s_x, rows, used, full, stage, k_tile, lane)
        if const_expr(self.down):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_w(
        self,
        w_atom: cute.CopyAtom | None,
        w_s: cute.Tensor,
        w_g: cute.Tensor,
        full: cute.Pointer,
        picks: Picks,
        tile: Int32,
        stage: Int32,
        tiles: tuple[Int32, Int32],
        active: Int32,
    ) -> None:
        which, row_tile, k_tile = expert_of(self.down, tile, tiles[0], tiles[1], active)
        expert = picks.active[which]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.weight_bytes)
        if const_expr(self.plain):
            cute.copy(w_atom, w_g[None, row_tile, k_tile, expert], w_s[None, 0, 0, stage], tma_bar_ptr=full + stage)
        else:
            tile_of = w_g[expert, row_tile, k_tile, None].iterator
            with cute.arch.elect_one():
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        w_s[None, 0, stage].iterator.toint(),
                        tile_of.toint(),
                        Int32(self.weight_bytes),
                        (full + stage).toint(),
                    ],
                )

    @cute.jit
    def find_rows(
        self, rows: cute.Tensor, x: cute.Tensor, picks: Picks, expert: Int32, tokens: Int32, lane: Int32
    ) -> Int32:
        """Where the rows of this lane's pieces begin: column c of the product is row c of the stage. Returns the number of
        columns; what lies in the stage past them is nobody's."""
        first = picks.first[expert]
        used = tokens
        if const_expr(not self.down):
            used = self.tokens_of(picks.masks, expert)
        for i in cutlass.range_constexpr(self.copies):
            c = 4 * i + lane // 8
            row = Int32(-1)
            if const_expr(self.down):
                if c < tokens:
                    if (picks.masks[c // 32, expert] >> (c % 32)) & 1 != 0:
                        row = picks.pairs[first + tokens_below(picks.masks, expert, c, self.words)]
            else:
                if c < used:
                    row = picks.pairs[first + c] // self.top_k
            rows[i] = Int64(-1)
            if row >= 0:
                rows[i] = row.to(Int64) * x.stride[0] * 2
        return used

    @cute.jit
    def load_x(
        self,
        x: cute.Tensor,
        s_x: cute.Tensor,
        rows: cute.Tensor,
        used: Int32,
        full: cute.Pointer,
        stage: Int32,
        k_tile: Int32,
        lane: Int32,
    ) -> None:
        """16-byte pieces; a row's 8 pieces lie where the 128-byte swizzle puts them. Zeros where there is no row."""
        start = x.iterator.toint()
        boxes = self.tile_k // BOX
        for box in cutlass.range_constexpr(boxes):
            column = k_tile * self.tile_k + box * BOX + lane % 8 * 8
            inside = column < x.shape[1]
            base = s_x.iterator.toint() + (stage * boxes + box) * (self.tokens * BOX * 2)
            for i in cutlass.range_constexpr(self.copies):
                if 4 * i < used:
                    c = 4 * i + lane // 8
                    to = base + c * 128 + ((lane % 8) ^ (c % 8)) * 16
                    source, size = start, Int32(0)
                    if inside and rows[i] >= 0:
                        source, size = start + rows[i] + 2 * column, Int32(16)
                    cute.arch.inline_ptx(
                        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[to, source, size]
                    )
        cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)

    @cute.jit
    def consume(
        self,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        arrived: cute.Tensor,
        picks: Picks,
        ids: cute.Tensor,
        weights: cute.Tensor | None,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        rows: Int32,
        unit: Int32,
        share: Int32,
        begin: Int32,
        end: Int32,
        k_tiles: Int32,
        row_tiles: Int32,
        thread: Int32,
    ) -> None:
        """k_tiles: of the line; row_tiles: of one expert."""
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        local = thread % WARPGROUP
        mma = self.product(self.tokens)
        acc = mma.make_fragment_C(mma.partition_shape_C((64, self.tokens)))
        if const_expr(self.down):
            cute.arch.griddepcontrol_wait()

        for n in cutlass.range(begin // k_tiles, (end + k_tiles - 1) // k_tiles, unroll=1):
            first = cutlass.max(begin, n * k_tiles)
            last = cutlass.min(end, (n + 1) * k_tiles)
            columns = ids.shape[0]
            expert = Int32(0)
            if const_expr(not self.down):
                expert = picks.active[n // row_tiles]
                columns = self.tokens_of(picks.masks, expert)
            acc.fill(0.0)
            if const_expr(self.plain):
                self.multiply(mma, acc, s_w, s_x, full, empty, first - begin, last - begin, group)
            elif const_expr(self.narrow):
                if columns <= 8:
                    some = cute.make_tensor(acc.iterator, self.product(8).partition_shape_C((64, 8)))
                    self.multiply_packed(8, some, s_w, s_x, full, empty, first - begin, last - begin, group, local)
                else:
                    self.multiply_packed(
                        self.tokens, acc, s_w, s_x, full, empty, first - begin, last - begin, group, local
                    )
            else:
                self.multiply_packed(self.tokens, acc, s_w, s_x, full, empty, first - begin, last - begin, group, local)
            if const_expr(self.kind == "mxfp4"):
                for j in cutlass.range_constexpr(cute.size(acc)):
                    acc[j] = acc[j] * Float32(2.0**MXFP4_SHIFT)
            finish = True
            if last - first < k_tiles:
                finish = self.share_sums(
                    acc, arrived, partial, counters, unit, share, n, first, k_tiles, columns, group, local
                )
            if finish:
                if const_expr(self.down):
                    self.store(acc, y, rows, n, columns, group, local)
                else:
                    self.store_hidden(
                        acc, y, weights, picks, picks.first[expert], rows, n % row_tiles, columns, group, local
                    )

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
        own = cute.flat_divide(s_w, (64, BOX))[None, None, group, 0, None]  # (64, BOX, stages)
        f_w = mma.make_fragment_A(lanes.partition_A(own))
        f_x = mma.make_fragment_B(lanes.partition_B(s_x))
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range(first, last, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            cute.arch.mbarrier_wait(full + stage, phase)
            cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what cp.async wrote
            warpgroup.fence()
            for k in cutlass.range_constexpr(BOX // 16):
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
        columns: cutlass.Constexpr[int],
        acc: cute.Tensor,
        s_w: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """As `multiply`, of packed weights. Half of a tile is made into bf16 while the other half is multiplied."""
        mma = self.product(columns)
        lanes = mma.get_slice(0)
        some = cute.flat_divide(s_x, (columns, self.tile_k))[None, None, 0, 0, None]
        f_x = mma.make_fragment_B(lanes.partition_B(some))
        steps = self.tile_k // 16
        words = cute.make_rmem_tensor(cute.make_layout((4, steps)), Int32)
        f_w = mma.make_fragment_A(mma.partition_shape_A((64, self.tile_k)))
        f_w = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), f_w.layout)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        total = acc
        if const_expr(self.kind == "fp8"):
            total = mma.make_fragment_C(mma.partition_shape_C((64, columns)))
        for i in cutlass.range(first, last, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            cute.arch.mbarrier_wait(full + stage, phase)
            cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what cp.async wrote
            tile = s_w[None, None, stage]
            if const_expr(self.kind == "fp8"):
                total.fill(0.0)
            for half in cutlass.range_constexpr(2):
                if const_expr(self.kind == "fp8"):
                    self.unpack_fp8(words, tile, half, group, local)
                else:
                    self.unpack_mxfp4(words, tile, half, group, local)
                warpgroup.fence()
                for k in cutlass.range_constexpr(half * steps // 2, (half + 1) * steps // 2):
                    cute.gemm(atom, total, f_w[None, None, k], f_x[None, None, k, stage], total)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(self.kind == "fp8"):
                scales = cute.make_tensor(cute.recast_ptr(tile.iterator, dtype=Float32), cute.make_layout(4100))
                both = scales[4096 + 2 * group], scales[4097 + 2 * group]  # of rows r and r + 8
                sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // 8)))
                more = cute.make_tensor(total.iterator, cute.make_layout((2, 2, columns // 8)))
                for b in cutlass.range_constexpr(columns // 8):
                    for r in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            sums[a, r, b] = sums[a, r, b] + both[r] * more[a, r, b]
            self.release(empty + stage)

    @cute.jit
    def unpack_mxfp4(
        self, words: cute.Tensor, tile: cute.Tensor, half: cutlass.Constexpr[int], group: Int32, local: Int32
    ) -> None:
        """Steps 4 half to 4 half + 4 of this thread's A. A warpgroup's part of a tile is 272 quads of words."""
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        cute.autovec_copy(tile[None, group * 272 + half * 128 + local], raw)
        place = local // 32 * 8 + local % 32 // 4  # two words of scales for each pair of rows
        scales = tile[place % 2 * 2 + half, group * 272 + 256 + place // 2]
        for s in cutlass.range_constexpr(4):
            pairs = e2m1_pairs(raw[s])
            for j in cutlass.range_constexpr(4):  # rows r and r + 8 take turns
                words[j, 4 * half + s] = multiply(pairs[j], mxfp4_factor(scales, s // 2 * 2 + j % 2))

    @cute.jit
    def unpack_fp8(
        self, words: cute.Tensor, tile: cute.Tensor, half: cutlass.Constexpr[int], group: Int32, local: Int32
    ) -> None:
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        factor = e4m3_factor()
        for q in cutlass.range_constexpr(2 * half, 2 * half + 2):
            cute.autovec_copy(tile[None, group * 512 + q * 128 + local], raw)
            for s in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    pairs = e4m3_pairs(raw[2 * s + j])
                    for r in cutlass.range_constexpr(2):
                        words[2 * j + r, 2 * q + s] = multiply(pairs[r], factor)

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

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
        columns: Int32,
        group: Int32,
        local: Int32,
    ) -> cutlass.Boolean:
        """Leaves this unit's sums of a row tile in L2. The last unit to arrive gets the whole sum in acc and is told so."""
        blocks = self.tokens // 8
        sums = cute.make_tensor(acc.iterator, cute.make_layout((4, blocks)))
        first_unit, last_unit = contributors(n, k_tiles, share)
        slot = 2 * unit
        if first == n * k_tiles:
            slot += 1
        for b in cutlass.range_constexpr(blocks):
            if 8 * (b // self.blocks_at_once * self.blocks_at_once) < columns:
                cute.autovec_copy(sums[None, b], partial[slot, group, b, local, None])
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
        if local == 0:
            counter = counters.iterator + (first_unit * GROUPS + group)
            cute.arch.fence_acq_rel_gpu()
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if before == last_unit - first_unit:
                counters[first_unit * GROUPS + group] = 0
            arrived[group] = before
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)
        finish = arrived[group] == last_unit - first_unit
        if finish:
            acc.fill(0.0)
            width, depth = self.blocks_at_once, self.units_at_once
            parts = cute.make_rmem_tensor(cute.make_layout((4, width, depth)), Float32)
            for b in cutlass.range_constexpr(0, blocks, width):
                if 8 * b < columns:
                    for u in cutlass.range(first_unit, last_unit + 1, depth, unroll=1):
                        for j in cutlass.range_constexpr(depth):
                            part = cutlass.min(u + j, last_unit)
                            at = 2 * part + (1 if part == first_unit else 0)
                            for i in cutlass.range_constexpr(width):
                                cute.autovec_copy(partial[at, group, b + i, local, None], parts[None, i, j])
                        for j in cutlass.range_constexpr(depth):
                            for i in cutlass.range_constexpr(width):
                                for e in cutlass.range_constexpr(4):
                                    more = parts[e, i, j] if u + j <= last_unit else Float32(0.0)
                                    sums[e, b + i] = sums[e, b + i] + more
        return finish

    @cute.jit
    def store_hidden(
        self,
        acc: cute.Tensor,
        y: cute.Tensor,
        weights: cute.Tensor,
        picks: Picks,
        first: Int32,
        rows: Int32,
        row_tile: Int32,
        columns: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """weight * SwiGLU of this thread's sums: row r of the warp's 16 is a channel's gate, row r + 8 its up."""
        lane = cute.arch.lane_idx()
        sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.tokens // 8)))  # (column, gate or up, block)
        channel = (row_tile * ROWS + group * 64 + local // 32 * 16) // 2 + lane // 4
        for b in cutlass.range_constexpr(self.tokens // 8):
            for a in cutlass.range_constexpr(2):
                c = 8 * b + lane % 4 * 2 + a
                if c < columns and channel < rows // 2:
                    pair = picks.pairs[first + c]
                    gate, up = sums[a, 0, b], sums[a, 1, b]
                    value = gate * up / (1.0 + cute.math.exp2(-gate * LOG2_E, fastmath=True))
                    y[pair, channel] = (value * weights[pair // self.top_k, pair % self.top_k]).to(self.dtype)

    @cute.jit
    def store(
        self, acc: cute.Tensor, y: cute.Tensor, rows: Int32, n: Int32, columns: Int32, group: Int32, local: Int32
    ) -> None:
        lane = cute.arch.lane_idx()
        sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.tokens // 8)))  # (token, row, 8 tokens)
        row = n * ROWS + group * 64 + local // 32 * 16 + lane // 4
        for b in cutlass.range_constexpr(self.tokens // 8):
            for a in cutlass.range_constexpr(2):
                t = 8 * b + lane % 4 * 2 + a
                for i in cutlass.range_constexpr(2):
                    if t < columns and row + 8 * i < rows:
                        y[t, row + 8 * i] = sums[a, i, b].to(self.dtype)
