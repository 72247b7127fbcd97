"""Grouped products of a few tokens with their experts for Hopper (sm_90a), at the speed of reading the experts once.

Two launches make a mixture of experts. The first (`down=False`) multiplies gate and up of every expert that any token
picked, takes SwiGLU (or Kimi-K3's SiTU-GLU) of them and the token's routing weight into `hidden`, whose rows are the (token, pick) pairs sorted by
expert, then by token. The second (`down=True`) multiplies those rows and adds up each token's. The weights are the M side
of wgmma and an expert's own tokens its N side, 8, 16 or 32 of them: an expert with more comes again, from L2.

Which experts are met is found in shared memory by every CTA for itself: a bit mask of tokens for each expert, from which
the list of experts and every pair's place in it follow, the same in all CTAs. The tiles to multiply form one line
(`schedule.py`), cut into equal stretches, so the same launch serves any routing. The first kernel's line goes expert by
expert; two warpgroups take 64 rows each of a tile. The second's goes row tile by row tile through all experts, so that
sums over experts stay in the CTA, in shared memory; two warpgroups take tiles in turns. Row tiles that several CTAs share
are added in float32 through L2 in the order of the line, so results do not change from run to run.

One warp fills a ring in shared memory with tiles of weights and, as boxes of 8 rows, with what they multiply. Where these
rows lie apart (x of more than 8 tokens) another warp gathers them by cp.async. Two CTAs share an SM: while one waits,
begins or ends, the other one reads.

Quantised weights come packed (`pack.py`), a tile as one stretch of bytes. A thread reads its own values of them, makes bf16
of them in registers, and wgmma takes them from there. MXFP4 has its scales put in before the product, e4m3 blocks theirs
after each tile of it.

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

from verify_kernels.cute.moe.dequantize import (
    MXFP4_SHIFT,
    e2m1_pairs,
    e4m3_factor,
    e4m3_pairs,
    multiply,
    mxfp4_bytes,
    mxfp4_factor,
)
from verify_kernels.cute.moe.pack import PART_BYTES
from verify_kernels.cute.moe.schedule import contributors, expert_of, line

GROUPS = 2  # warpgroups that multiply, each 64 rows
CONSUMERS = 128 * GROUPS
WARPS = 4 * GROUPS
BOX = 64  # columns of 16 bits: 128 bytes, one swizzle row
MOST_COLUMNS = 32  # of a product
LOG2_E = 1.4426950408889634


class Picks(NamedTuple):
    """What `Experts.sort` leaves in shared memory, int32 but for the weights.

    An entry is an expert with up to `columns` of its tokens; one with more has several.
    """

    masks: cute.Tensor  # [words, E]: bit t % 32 of word t // 32 is set if token t picked the expert
    first: cute.Tensor  # [E]: where an expert's pairs begin
    experts: cute.Tensor  # of each entry, in order; the number of entries at the end
    places: cute.Tensor  # of each entry: where its pairs begin, and their number in the upper half
    pairs: cute.Tensor  # [tokens * k]: token * k + pick, by expert, then by token
    weights: cute.Tensor | None  # [tokens * k] float32, in the same order


@cute.jit
def tokens_below(masks: cute.Tensor, e: Int32, t: Int32, words: cutlass.Constexpr[int]) -> Int32:
    """Tokens before t that picked expert e."""
    n = Int32(0)
    for i in cutlass.range_constexpr(words):
        bits = cutlass.min(cutlass.max(t - 32 * i, 0), 32)
        below = ((Int64(1) << bits.to(Int64)) - 1).to(Int32)
        n += cute.arch.popc(masks[i, e] & below)
    return n


@cute.jit
def following(
    down: cutlass.Constexpr[bool], which: Int32, row: Int32, k: Int32, tiles: tuple[Int32, Int32], entries: Int32
) -> tuple[Int32, Int32, Int32]:
    """The tile of the line after (entry, row tile, k tile)."""
    k += 1
    if k == tiles[1]:
        k = Int32(0)
        if const_expr(down):
            which += 1
            if which == entries:
                which = Int32(0)
                row += 1
        else:
            row += 1
            if row == tiles[0]:
                row = Int32(0)
                which += 1
    return which, row, k


class Experts:
    """One compiled variant; see `variants.ExpertsVariant` for the constants."""

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
        situ: tuple[float, float] | None,
        pdl: bool,
    ) -> None:
        if tokens not in (8, 16, 32, 64):
            raise ValueError(f"experts: tokens is {tokens}, allowed: 8, 16, 32, 64")
        if not 1 <= top_k <= 32 or not 1 <= experts <= 1024:
            raise ValueError(f"experts: found {top_k} of {experts}, allowed: 1 to 32 of up to 1024")
        if kind not in ("plain", *PART_BYTES):
            raise ValueError(f"experts: kind is {kind!r}, allowed: plain, {', '.join(PART_BYTES)}")
        if kind != "plain" and dtype is not cutlass.BFloat16:
            raise ValueError(f"experts: dtype is {dtype} with {kind}, allowed: bfloat16")
        self.dtype, self.tokens, self.experts, self.top_k, self.stages = dtype, tokens, experts, top_k, stages
        self.down, self.kind, self.situ, self.pdl = down, kind, situ, pdl
        self.plain = kind == "plain"
        self.columns = min(tokens, MOST_COLUMNS)
        self.gather = not down and tokens > 8  # else x comes in boxes: all tokens, or rows that lie together
        self.threads = CONSUMERS + (64 if self.gather else 32)
        self.parts = 1 if down else GROUPS  # of 64 rows
        self.rows = 64 * self.parts
        self.tile_k = BOX if self.plain else 2 * BOX
        self.boxes = self.tile_k // BOX
        self.weight_bytes = self.rows * self.tile_k * 2 if self.plain else self.parts * PART_BYTES[kind]
        self.copies = self.columns * 8 // 32  # 16-byte pieces of a box's rows for each lane
        self.words = -(-tokens // 32)  # of an expert's mask of tokens
        self.pairs = tokens * top_k
        self.most = min(experts, self.pairs) + (self.pairs // self.columns if tokens > self.columns else 0)  # entries
        self.chunks = -(-tokens // (8 * GROUPS))  # of 8 tokens of the output, for each warpgroup

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, H], rows may be strided; down: hidden [T * k, I]
        w: cute.Tensor,  # [E, 2 I, H]; down: [E, H, I]; packed: [E, row tiles, k tiles, bytes] uint8
        ids: cute.Tensor,  # [T, k] int64, a row's all different, those of no expert ignored; rows may be strided
        weights: cute.Tensor | None,  # [T, k] float32; not for down
        y: cute.Tensor,  # hidden [T * k, I]; down: [T, H]
        partial: cute.Tensor,  # [2 * units, groups, tokens / 8, 128, 4] float32
        counters: cute.Tensor,  # [units * warps] int32, zero before and after
        units: Int32,
        stream: Any,
    ) -> None:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x, x_atom = self.rows_apart(x), None
        x_layout = cute.tile_to_shape(atom, (self.columns, self.tile_k, self.stages), (0, 1, 2))
        if const_expr(not self.gather):
            x_atom, x = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), x, cute.tile_to_shape(atom, (8, BOX), (0, 1)), (8, BOX)
            )
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
            w_layout = cute.tile_to_shape(atom, (self.rows, self.tile_k, self.stages), (0, 1, 2))
            w_atom, w = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                cute.make_tensor(w.iterator, view),
                cute.tile_to_shape(atom, (self.rows, BOX), (0, 1)),
                (self.rows, BOX),
            )
        self.kernel(x_atom, x, w_atom, w, ids, weights, y, partial, counters, x_layout, w_layout).launch(
            grid=[units, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
            use_pdl=self.pdl,
        )

    @cute.jit
    def rows_apart(self, matrix: cute.Tensor) -> cute.Tensor:
        """The stride of a single row may be anything, and copies want a multiple of 16 bytes."""
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
        x_atom: cute.CopyAtom | None,
        x: cute.Tensor,
        w_atom: cute.CopyAtom | None,
        w: cute.Tensor,
        ids: cute.Tensor,
        weights: cute.Tensor | None,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        x_layout: cute.ComposedLayout,
        w_layout: cute.Layout | cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        unit, _, _ = cute.arch.block_idx()
        units, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, 2 * self.stages)
        empty = full + self.stages
        picks = Picks(
            smem.allocate_tensor(Int32, cute.make_layout((self.words, self.experts)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.experts), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.most + 1), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.most), 16),
            smem.allocate_tensor(Int32, cute.make_layout(self.pairs), 16),
            None if self.down else smem.allocate_tensor(Float32, cute.make_layout(self.pairs), 16),
        )
        # Each warp's 16 rows of the output's row tile, of every token.
        sums = smem.allocate_tensor(Float32, cute.make_layout((16, self.tokens, 4, GROUPS)), 16) if self.down else None
        if const_expr(self.plain):
            s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        else:
            s_w = smem.allocate_tensor(Int32, w_layout, 1024)
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, 1024, x_layout.inner)

        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + s, 33 if self.gather else 1)
                    cute.arch.mbarrier_init(empty + s, 4 * self.parts)
            if const_expr(self.plain):
                cpasync.prefetch_descriptor(w_atom)
            if const_expr(not self.gather):
                cpasync.prefetch_descriptor(x_atom)
        cute.arch.mbarrier_init_fence()
        for e in cutlass.range(thread, self.experts * self.words, self.threads, unroll=1):
            picks.masks[e % self.words, e // self.words] = 0
        if const_expr(not self.down):
            cute.arch.griddepcontrol_wait()
        # The next kernel's CTAs begin as this one's end, and wait for the last of them before they use what these write.
        cute.arch.griddepcontrol_launch_dependents()
        self.sort(ids, weights, picks, thread, warp)

        entries = picks.experts[self.most]
        height = y.shape[1] * (1 if self.down else 2)
        tiles = (height + self.rows - 1) // self.rows, (x.shape[1] + self.tile_k - 1) // self.tile_k
        rows, depth, share = line(self.down, tiles[0], tiles[1], entries, units)
        begin = unit * share
        end = cutlass.min(begin + share, rows * depth)
        if warp == WARPS:
            self.produce(x_atom, x, w_atom, w, s_x, s_w, full, empty, picks, begin, end, tiles, entries)
        elif warp > WARPS:
            if const_expr(self.gather):
                self.gather_rows(x, s_x, full, empty, picks, begin, end, tiles, entries)
        elif const_expr(self.down):
            self.combine(
                s_x, s_w, full, empty, picks, sums, y, partial, counters, ids.shape[0], unit, share, begin, end,
                tiles[1], depth, thread,
            )
        else:
            self.consume(s_x, s_w, full, empty, picks, y, partial, counters, unit, share, begin, end, tiles, thread)

    @cute.jit
    def sort(self, ids: cute.Tensor, weights: cute.Tensor | None, picks: Picks, thread: Int32, warp: Int32) -> None:
        """Which tokens picked each expert; the entries; the pairs, by expert, then by token."""
        count = ids.shape[0] * self.top_k
        rounds = -(-self.pairs // self.threads)
        found = cute.make_rmem_tensor(cute.make_layout(rounds), Int32)
        weight = cute.make_rmem_tensor(cute.make_layout(rounds), Float32)
        for i in cutlass.range_constexpr(rounds):
            pair = i * self.threads + thread
            found[i], weight[i] = -1, 0.0
            if pair < count:
                # Not through L1: the kernel that wrote it may have run since this SM read the last picks.
                pick = ids.iterator + (pair // self.top_k * ids.stride[0] + pair % self.top_k)
                expert = cute.arch.load(pick, Int64, cop="cg")
                if expert >= 0 and expert < self.experts:  # else it is held elsewhere
                    found[i] = expert.to(Int32)
                if const_expr(not self.down):
                    weight[i] = cute.arch.load(weights.iterator + pair, Float32, cop="cg")
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(rounds):
            pair = i * self.threads + thread
            if found[i] >= 0:
                t = pair // self.top_k
                word = picks.masks.iterator + (found[i] * self.words + t // 32)
                cute.arch.atomic_or(word, Int32(1) << (t % 32), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        if warp == 0:
            lane = cute.arch.lane_idx()
            each = -(-self.experts // 32)
            entries, pairs = Int32(0), Int32(0)
            for i in cutlass.range(each, unroll=4):
                e = lane * each + i
                if e < self.experts:
                    n = self.tokens_of(picks.masks, e)
                    pairs += n
                    entries += (n + self.columns - 1) // self.columns
            own_entries, own_pairs = entries, pairs
            for i in cutlass.range_constexpr(5):
                before_entries = cute.arch.shuffle_sync_up(entries, 1 << i, mask_and_clamp=0)
                before_pairs = cute.arch.shuffle_sync_up(pairs, 1 << i, mask_and_clamp=0)
                if lane >= 1 << i:
                    entries += before_entries
                    pairs += before_pairs
            if lane == 31:
                picks.experts[self.most] = entries
                if const_expr(self.down):
                    # No expert at all: one without tokens, for the sums of nothing are to be written, too.
                    if entries == 0:
                        picks.experts[self.most] = 1
                        picks.experts[0] = 0
                        picks.places[0] = 0
            entries -= own_entries
            pairs -= own_pairs
            for i in cutlass.range(each, unroll=4):
                e = lane * each + i
                if e < self.experts:
                    picks.first[e] = pairs
                    n = self.tokens_of(picks.masks, e)
                    for j in cutlass.range_constexpr(0, self.tokens, self.columns):
                        if n > j:
                            picks.experts[entries] = e
                            picks.places[entries] = (pairs + j) | (cutlass.min(n - j, self.columns) << 16)
                            entries += 1
                    pairs += n
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(rounds):
            pair = i * self.threads + thread
            if found[i] >= 0:
                place = picks.first[found[i]] + tokens_below(picks.masks, found[i], pair // self.top_k, self.words)
                picks.pairs[place] = pair
                if const_expr(not self.down):
                    picks.weights[place] = weight[i]
        cute.arch.sync_threads()

    @cute.jit
    def tokens_of(self, masks: cute.Tensor, e: Int32) -> Int32:
        n = cute.arch.popc(masks[0, e])
        for i in cutlass.range_constexpr(1, self.words):
            n += cute.arch.popc(masks[i, e])
        return n

    @cute.jit
    def columns_of(self, picks: Picks, which: Int32) -> tuple[Int32, Int32]:
        """(where an entry's pairs begin, columns of its products)."""
        place = picks.places[which]
        return place & 0xFFFF, place >> 16

    # --- what fills the ring

    @cute.jit
    def produce(
        self,
        x_atom: cute.CopyAtom | None,
        x: cute.Tensor,
        w_atom: cute.CopyAtom | None,
        w: cute.Tensor,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        picks: Picks,
        begin: Int32,
        end: Int32,
        tiles: tuple[Int32, Int32],
        entries: Int32,
    ) -> None:
        w_s, w_g = s_w, w
        if const_expr(self.plain):
            g_boxes = cute.flat_divide(w, (self.rows, BOX))
            s_boxes = cute.flat_divide(s_w, (self.rows, BOX))
            w_s, w_g = cpasync.tma_partition(
                w_atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
            )
        count = cutlass.max(end - begin, 0)
        which, row, k = expert_of(self.down, begin, tiles[0], tiles[1], entries)
        ahead = Int32(0)
        if const_expr(self.down):
            ahead = cutlass.min(count, self.stages)
            next_which, next_row, next_k = which, row, k
            for i in cutlass.range(ahead, unroll=1):
                self.load_w(w_atom, w_s, w_g, full + i, i, picks, next_which, next_row, next_k)
                next_which, next_row, next_k = following(self.down, next_which, next_row, next_k, tiles, entries)
            cute.arch.griddepcontrol_wait()
        for i in cutlass.range(count, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            if i >= ahead:
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                self.load_w(w_atom, w_s, w_g, full + stage, stage, picks, which, row, k)
            if const_expr(not self.gather):
                self.load_x(x_atom, x, s_x, full + stage, stage, picks, which, k)
            which, row, k = following(self.down, which, row, k, tiles, entries)

    @cute.jit
    def load_w(
        self,
        w_atom: cute.CopyAtom | None,
        w_s: cute.Tensor,
        w_g: cute.Tensor,
        full: cute.Pointer,
        stage: Int32,
        picks: Picks,
        which: Int32,
        row_tile: Int32,
        k_tile: Int32,
    ) -> None:
        """The stage's barrier waits for the bytes of the boxes of x, too."""
        size = Int32(self.weight_bytes)
        if const_expr(not self.gather):
            blocks = 1
            if const_expr(self.down):
                blocks = cutlass.max((self.columns_of(picks, which)[1] + 7) // 8, 1)
            size += blocks * (8 * self.tile_k * 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        expert = picks.experts[which]
        if const_expr(self.plain):
            for box in cutlass.range_constexpr(self.boxes):
                tile = w_g[None, row_tile, k_tile * self.boxes + box, expert]
                cute.copy(w_atom, tile, w_s[None, 0, box, stage], tma_bar_ptr=full)
        else:
            tile = w_g[expert, row_tile, k_tile, None].iterator
            with cute.arch.elect_one():
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        w_s[None, 0, stage].iterator.toint(),
                        tile.toint(),
                        Int32(self.weight_bytes),
                        full.toint(),
                    ],
                )

    @cute.jit
    def load_x(
        self,
        x_atom: cute.CopyAtom,
        x: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        stage: Int32,
        picks: Picks,
        which: Int32,
        k_tile: Int32,
    ) -> None:
        """Boxes of 8 rows: all tokens, or an entry's own and what follows them, whose products are nobody's."""
        columns = Int32(1)
        if const_expr(self.down):
            place, columns = self.columns_of(picks, which)
            x = cute.domain_offset((place, 0), x)
        g_boxes = cute.flat_divide(x, (8, BOX))
        s_boxes = cute.flat_divide(s_x, (8, BOX))
        x_s, x_g = cpasync.tma_partition(
            x_atom, 0, cute.make_layout(1), cute.group_modes(s_boxes, 0, 2), cute.group_modes(g_boxes, 0, 2)
        )
        for b in cutlass.range_constexpr(self.columns // 8 if self.down else 1):
            if b == 0 or 8 * b < columns:
                for box in cutlass.range_constexpr(self.boxes):
                    tile = x_g[None, b, k_tile * self.boxes + box]
                    cute.copy(x_atom, tile, x_s[None, b, box, stage], tma_bar_ptr=full)

    @cute.jit
    def gather_rows(
        self,
        x: cute.Tensor,
        s_x: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        picks: Picks,
        begin: Int32,
        end: Int32,
        tiles: tuple[Int32, Int32],
        entries: Int32,
    ) -> None:
        """16-byte pieces of an entry's rows of x; a row's 8 pieces lie where the 128-byte swizzle puts them."""
        lane = cute.arch.lane_idx()
        rows = cute.make_rmem_tensor(cute.make_layout(self.copies), Int64)  # addresses of this lane's, one of each four
        rows.fill(0)
        places = cute.make_rmem_tensor(cute.make_layout(2), Int32)  # of its pieces in the first and second four rows
        for i in cutlass.range_constexpr(2):
            places[i] = s_x.iterator.toint() + (4 * i + lane // 8) * 128 + ((lane % 8) ^ (4 * i + lane // 8)) * 16
        columns, at = Int32(0), Int32(-1)
        which, row, k = expert_of(self.down, begin, tiles[0], tiles[1], entries)
        for i in cutlass.range(cutlass.max(end - begin, 0), unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            if which != at:
                at = which
                place, columns = self.columns_of(picks, which)
                for j in cutlass.range_constexpr(self.copies):
                    c = 4 * j + lane // 8
                    if c < columns:
                        t = picks.pairs[place + c] // self.top_k
                        rows[j] = x.iterator.toint() + 2 * (t.to(Int64) * x.stride[0])
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            for w in cutlass.range_constexpr((self.columns // 8).bit_length()):
                width = 8 << w
                if (width == 8 or columns > width // 2) and (width == self.columns or columns <= width):
                    for box in cutlass.range_constexpr(self.boxes):
                        column = k * self.tile_k + box * BOX + lane % 8 * 8
                        there = column < x.shape[1]  # zeros past the end
                        size, offset = Int32(16) if there else Int32(0), 2 * column if there else Int32(0)
                        for j in cutlass.range_constexpr(width // 4):
                            if 4 * j + lane // 8 < columns:
                                past = (box * self.columns + j // 2 * 8) * 128
                                to = places[j % 2] + stage * (self.boxes * self.columns * 128) + past
                                cute.arch.inline_ptx(
                                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                                    read_only_args=[to, rows[j] + offset, size],
                                )
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            which, row, k = following(self.down, which, row, k, tiles, entries)

    # --- what empties it

    @cute.jit
    def consume(
        self,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        picks: Picks,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        unit: Int32,
        share: Int32,
        begin: Int32,
        end: Int32,
        tiles: tuple[Int32, Int32],
        thread: Int32,
    ) -> None:
        """Gate and up."""
        group = cute.arch.make_warp_uniform(thread // 128)
        local = thread % 128
        acc = cute.make_rmem_tensor(cute.make_layout(self.columns // 2), Float32)
        k_tiles = tiles[1]
        for n in cutlass.range(begin // k_tiles, (end + k_tiles - 1) // k_tiles, unroll=1):
            first = cutlass.max(begin, n * k_tiles)
            last = cutlass.min(end, (n + 1) * k_tiles)
            place, columns = self.columns_of(picks, n // tiles[0])
            # All tokens are columns of an expert that x is not gathered for.
            width = columns if self.gather else Int32(8)
            acc.fill(0.0)
            self.multiply(acc, width, s_x, s_w, full, empty, first - begin, last - begin, group, local)
            finish = True
            if last - first < k_tiles:
                finish = self.share_sums(
                    acc, partial, counters, unit, share, n, first, k_tiles, width, group, local
                )
            if finish:
                self.store_hidden(acc, y, picks, n // tiles[0], n % tiles[0], group, local)

    @cute.jit
    def combine(
        self,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        picks: Picks,
        sums: cute.Tensor,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        tokens: Int32,
        unit: Int32,
        share: Int32,
        begin: Int32,
        end: Int32,
        k_tiles: Int32,
        depth: Int32,
        thread: Int32,
    ) -> None:
        """Down, and each token's sum. k_tiles: of one expert; depth: of all."""
        group = cute.arch.make_warp_uniform(thread // 128)
        local, lane = thread % 128, cute.arch.lane_idx()
        own = sums[None, None, local // 32, group]  # (16, tokens)
        acc = cute.make_rmem_tensor(cute.make_layout(self.columns // 2), Float32)
        blocks = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (column, row, block)
        cute.arch.griddepcontrol_wait()
        for row_tile in cutlass.range(begin // depth, (end + depth - 1) // depth, unroll=1):
            start = row_tile * depth
            first, last = cutlass.max(begin - start, 0), cutlass.min(end - start, depth)  # k tiles of this row tile
            for i in cutlass.range_constexpr(self.tokens // 8):
                for j in cutlass.range_constexpr(4):
                    own[lane % 4 * 4 + j, 8 * i + lane // 4] = Float32(0.0)
            cute.arch.sync_warp()
            for which in cutlass.range(first // k_tiles, (last + k_tiles - 1) // k_tiles, unroll=1):
                place, columns = self.columns_of(picks, which)
                from_tile = cutlass.max(first, which * k_tiles) + start - begin
                to_tile = cutlass.min(last, (which + 1) * k_tiles) + start - begin
                acc.fill(0.0)
                self.multiply(acc, columns, s_x, s_w, full, empty, from_tile, to_tile, group, local)
                for b in cutlass.range_constexpr(self.columns // 8):
                    for a in cutlass.range_constexpr(2):
                        c = 8 * b + lane % 4 * 2 + a
                        if c < columns:
                            t = picks.pairs[place + c] // self.top_k
                            for i in cutlass.range_constexpr(2):
                                own[lane // 4 + 8 * i, t] = own[lane // 4 + 8 * i, t] + blocks[a, i, b]
                cute.arch.sync_warp()  # the next entry's tokens may be other lanes'
            self.store(
                sums, y, partial, counters, tokens, unit, share, row_tile, first, last, depth, group, local
            )

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        columns: Int32,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """Adds this warpgroup's products of tiles first to last, counted from this unit's first, with as few columns as
        hold the entry's."""
        for i in cutlass.range_constexpr((self.columns // 8).bit_length()):
            width = 8 << i
            if (width == 8 or columns > width // 2) and (width == self.columns or columns <= width):
                some = cute.make_tensor(acc.iterator, self.product(width).partition_shape_C((64, width)))
                if const_expr(self.plain):
                    self.multiply_plain(width, some, s_x, s_w, full, empty, first, last, group)
                else:
                    self.multiply_packed(width, some, s_x, s_w, full, empty, first, last, group, local)
        if const_expr(self.kind == "mxfp4"):
            for j in cutlass.range_constexpr(cute.size(acc)):
                acc[j] = acc[j] * Float32(2.0**MXFP4_SHIFT)

    @cute.jit
    def columns_from(self, columns: cutlass.Constexpr[int], mma: cute.TiledMma, s_x: cute.Tensor) -> cute.Tensor:
        some = cute.flat_divide(s_x, (columns, self.tile_k))[None, None, 0, 0, None]
        return mma.make_fragment_B(mma.get_slice(0).partition_B(some))

    @cute.jit
    def multiply_plain(
        self,
        columns: cutlass.Constexpr[int],
        acc: cute.Tensor,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        group: Int32,
    ) -> None:
        mma = self.product(columns)
        part = group if const_expr(self.parts == GROUPS) else 0
        own = cute.flat_divide(s_w, (64, self.tile_k))[None, None, part, 0, None]  # (64, tile_k, stages)
        f_w = mma.make_fragment_A(mma.get_slice(0).partition_A(own))
        f_x = self.columns_from(columns, mma, s_x)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        begin, step = (first, 1) if const_expr(self.parts == GROUPS) else (first + (first + group) % GROUPS, GROUPS)
        for i in cutlass.range(begin, last, step, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            self.wait_for(full + stage, phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(self.tile_k // 16):
                cute.gemm(atom, acc, f_w[None, None, k, stage], f_x[None, None, k, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.release(empty + stage)

    @cute.jit
    def multiply_packed(
        self,
        columns: cutlass.Constexpr[int],
        acc: cute.Tensor,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        last: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """Half of a tile is made into bf16 while the other half is multiplied, as long as registers last."""
        mma = self.product(columns)
        f_x = self.columns_from(columns, mma, s_x)
        steps = self.tile_k // 16
        kept = steps // 2 if self.kind == "fp8" and columns > 16 else steps
        words = cute.make_rmem_tensor(cute.make_layout((4, kept)), Int32)
        f_w = mma.make_fragment_A(mma.partition_shape_A((64, 16 * kept)))
        f_w = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), f_w.layout)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        total = acc
        if const_expr(self.kind == "fp8"):
            total = mma.make_fragment_C(mma.partition_shape_C((64, columns)))
        quads = PART_BYTES[self.kind] // 16
        part = group * quads if const_expr(self.parts == GROUPS) else 0
        begin, step = (first, 1) if const_expr(self.parts == GROUPS) else (first + (first + group) % GROUPS, GROUPS)
        for i in cutlass.range(begin, last, step, unroll=1):
            stage, phase = i % self.stages, (i // self.stages) & 1
            self.wait_for(full + stage, phase)
            tile = cute.domain_offset((0, part), s_w[None, None, stage])
            if const_expr(self.kind == "fp8"):
                total.fill(0.0)
            for half in cutlass.range_constexpr(2):
                if const_expr(half == 1 and kept < steps):
                    warpgroup.wait_group(0)
                if const_expr(self.kind == "fp8"):
                    self.unpack_fp8(words, tile, half, local)
                else:
                    self.unpack_mxfp4(words, tile, half, local)
                warpgroup.fence()
                for k in cutlass.range_constexpr(half * steps // 2, (half + 1) * steps // 2):
                    cute.gemm(atom, total, f_w[None, None, k % kept], f_x[None, None, k, stage], total)
                warpgroup.commit_group()
            if const_expr(self.kind == "fp8"):
                scales = cute.make_rmem_tensor(cute.make_layout(2), Float32)  # of rows r and r + 8
                for r in cutlass.range_constexpr(2):
                    scales[r] = cute.recast_tensor(tile, Float32)[r, quads - 1]
                warpgroup.wait_group(0)
                sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // 8)))
                more = cute.make_tensor(total.iterator, cute.make_layout((2, 2, columns // 8)))
                for b in cutlass.range_constexpr(columns // 8):
                    for r in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            sums[a, r, b] = sums[a, r, b] + scales[r] * more[a, r, b]
            else:
                warpgroup.wait_group(0)
            self.release(empty + stage)

    @cute.jit
    def unpack_mxfp4(self, words: cute.Tensor, tile: cute.Tensor, half: cutlass.Constexpr[int], local: Int32) -> None:
        """Steps 4 half to 4 half + 4 of this thread's A."""
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        cute.autovec_copy(tile[None, half * 128 + local], raw)
        place = local // 32 * 8 + local % 32 // 4  # two words of scales for each pair of rows
        low, high = mxfp4_bytes(tile[place % 2 * 2 + half, 256 + place // 2])
        for s in cutlass.range_constexpr(4):
            pairs = e2m1_pairs(raw[s])
            for j in cutlass.range_constexpr(4):  # rows r and r + 8 take turns
                words[j, 4 * half + s] = multiply(pairs[j], mxfp4_factor(low, high, s // 2 * 2 + j % 2))

    @cute.jit
    def unpack_fp8(self, words: cute.Tensor, tile: cute.Tensor, half: cutlass.Constexpr[int], local: Int32) -> None:
        raw = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        factor = e4m3_factor()
        for q in cutlass.range_constexpr(2 * half, 2 * half + 2):
            cute.autovec_copy(tile[None, q * 128 + local], raw)
            for s in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    pairs = e4m3_pairs(raw[2 * s + j])
                    for r in cutlass.range_constexpr(2):
                        words[2 * j + r, (2 * q + s) % words.shape[1]] = multiply(pairs[r], factor)

    @cute.jit
    def wait_for(self, full: cute.Pointer, phase: Int32) -> None:
        cute.arch.mbarrier_wait(full, phase)
        if const_expr(self.gather):
            cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads what cp.async wrote

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    # --- sums of several CTAs

    @cute.jit
    def last_to_arrive(self, counters: cute.Tensor, at: Int32, others: Int32) -> cutlass.Boolean:
        """Whether the same warps of all other units have left their sums. Each warp has a counter of its own."""
        before = Int32(0)
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(counters.iterator + at, Int32(1), sem="relaxed", scope="gpu")
            if before == others:
                counters[at] = 0
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.fence_acq_rel_gpu()
        return before == others

    @cute.jit
    def share_sums(
        self,
        acc: cute.Tensor,
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
        blocks = self.columns // 8
        sums = cute.make_tensor(acc.iterator, cute.make_layout((4, blocks)))
        first_unit, last_unit = contributors(n, k_tiles, share)
        slot = 2 * unit
        if first == n * k_tiles:
            slot += 1
        for b in cutlass.range_constexpr(blocks):
            if 8 * b < columns:
                cute.autovec_copy(sums[None, b], partial[slot, group, b, local, None])
        finish = self.last_to_arrive(
            counters, first_unit * WARPS + group * 4 + local // 32, last_unit - first_unit
        )
        if finish:
            acc.fill(0.0)
            depth = 4
            parts = cute.make_rmem_tensor(cute.make_layout((4, depth)), Float32)
            for b in cutlass.range_constexpr(blocks):
                if 8 * b < columns:
                    for u in cutlass.range(first_unit, last_unit + 1, depth, unroll=1):
                        for j in cutlass.range_constexpr(depth):
                            part = cutlass.min(u + j, last_unit)
                            at = 2 * part + (1 if part == first_unit else 0)
                            cute.autovec_copy(partial[at, group, b, local, None], parts[None, j])
                        for j in cutlass.range_constexpr(depth):
                            for e in cutlass.range_constexpr(4):
                                sums[e, b] = sums[e, b] + (parts[e, j] if u + j <= last_unit else Float32(0.0))
        return finish

    @cute.jit
    def store_hidden(
        self, acc: cute.Tensor, y: cute.Tensor, picks: Picks, which: Int32, row_tile: Int32, group: Int32, local: Int32
    ) -> None:
        """weight * SwiGLU (or SiTU-GLU) of this thread's sums: row r of the warp's 16 is a channel's gate, row r + 8 its up."""
        lane = cute.arch.lane_idx()
        sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (column, gate or up, block)
        channel = (row_tile * self.rows + group * 64 + local // 32 * 16) // 2 + lane // 4
        expert = picks.experts[which]
        first, columns = self.columns_of(picks, which)
        for b in cutlass.range_constexpr(self.columns // 8):
            for a in cutlass.range_constexpr(2):
                c = 8 * b + lane % 4 * 2 + a
                place, there = first + c, c < columns
                if const_expr(not self.gather):
                    place = first + tokens_below(picks.masks, expert, c, self.words)
                    there = ((picks.masks[0, expert] >> c) & 1) != 0
                if there and channel < y.shape[1]:
                    gate, up = sums[a, 0, b], sums[a, 1, b]
                    if const_expr(self.situ is not None):
                        beta, linear_beta = self.situ
                        sigmoid = 1.0 / (1.0 + cute.math.exp2(-gate * LOG2_E, fastmath=True))
                        gate = beta * cute.math.tanh(gate * (1.0 / beta), fastmath=True) * sigmoid
                        value = gate * linear_beta * cute.math.tanh(up * (1.0 / linear_beta), fastmath=True)
                    else:
                        value = gate * up / (1.0 + cute.math.exp2(-gate * LOG2_E, fastmath=True))
                    y[place, channel] = (value * picks.weights[place]).to(self.dtype)

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,
        y: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        tokens: Int32,
        unit: Int32,
        share: Int32,
        row_tile: Int32,
        first: Int32,
        last: Int32,
        depth: Int32,
        group: Int32,
        local: Int32,
    ) -> None:
        """A row tile's sums to y, through L2 where other units have some of it: a warp takes its 16 rows of every other 8
        tokens, a lane 4 rows of a token."""
        warp, lane = local // 32, cute.arch.lane_idx()
        quad, token = lane % 4, 8 * group + lane // 4
        total = cute.make_rmem_tensor(cute.make_layout((4, self.chunks)), Float32)
        more = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        halves = cute.zipped_divide(sums, (4, 1, 1, 1))  # ((4, 1, 1, 1), (4, tokens, 4, groups))
        total.fill(0.0)
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
        for i in cutlass.range_constexpr(self.chunks):
            t = token + 8 * GROUPS * i
            if t < tokens:
                for g in cutlass.range_constexpr(GROUPS):
                    cute.autovec_copy(cute.group_modes(halves[None, (quad, t, warp, g)], 0, 1), more)
                    for e in cutlass.range_constexpr(4):
                        total[e, i] = total[e, i] + more[e]
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
        finish = True
        if last - first < depth:
            spread = cute.make_layout((4, 4, self.tokens, 4, 2 * cute.arch.grid_dim()[0]))  # (row, quad, token, warp, slot)
            left = cute.make_tensor(partial.iterator, spread)
            first_unit, last_unit = contributors(row_tile, depth, share)
            slot = 2 * unit
            if first == 0:
                slot += 1
            for i in cutlass.range_constexpr(self.chunks):
                t = token + 8 * GROUPS * i
                if t < tokens:
                    cute.autovec_copy(total[None, i], left[None, quad, t, warp, slot])
            finish = self.last_to_arrive(
                counters, first_unit * WARPS + group * 4 + warp, last_unit - first_unit
            )
            if finish:
                total.fill(0.0)
                deep = max(2, 8 // self.chunks)
                parts = cute.make_rmem_tensor(cute.make_layout((4, self.chunks, deep)), Float32)
                for u in cutlass.range(first_unit, last_unit + 1, deep, unroll=1):
                    for j in cutlass.range_constexpr(deep):
                        part = cutlass.min(u + j, last_unit)
                        at = 2 * part + (1 if part == first_unit else 0)
                        for i in cutlass.range_constexpr(self.chunks):
                            t = cutlass.min(token + 8 * GROUPS * i, tokens - 1)
                            cute.autovec_copy(left[None, quad, t, warp, at], parts[None, i, j])
                    for j in cutlass.range_constexpr(deep):
                        for i in cutlass.range_constexpr(self.chunks):
                            for e in cutlass.range_constexpr(4):
                                total[e, i] = total[e, i] + (parts[e, i, j] if u + j <= last_unit else Float32(0.0))
        if finish:
            row = row_tile * self.rows + warp * 16 + quad * 4
            for i in cutlass.range_constexpr(self.chunks):
                t = token + 8 * GROUPS * i
                for e in cutlass.range_constexpr(4):
                    if t < tokens and row + e < y.shape[1]:
                        y[t, row + e] = total[e, i].to(self.dtype)
