"""The schedule of `schedule.py` in one launch of one CTA, so that a pass pays microseconds for it."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from verify_kernels.cute.attention.schedule import MAX_ENTRIES, RECORD

THREADS = 512
MAX_UNITS = 512


@cute.jit
def last_at_most(values: cute.Tensor, n: Int32, x: Int32) -> Int32:
    """Largest i < n with values[i] <= x, for ascending values that start at or below x."""
    low, high = Int32(0), n
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@cute.jit
def scan(values: cute.Tensor, n: Int32) -> None:
    """values[i] becomes the sum of values[0 : i], and values[n] the sum of all. Run by one whole warp."""
    lane = cute.arch.lane_idx()
    carry = Int32(0)
    for chunk in cutlass.range((n + 31) // 32, unroll=1):
        at = chunk * 32 + lane
        own = Int32(0)
        if at < n:
            own = values[at]
        total = own
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                total += before
        if at < n:
            values[at] = carry + total - own
        carry += cute.arch.shuffle_sync(total, 31)
    if lane == 0:
        values[n] = carry


class Plan:
    """See `schedule.schedule`, whose arguments these are."""

    def __init__(self, group: int, kv_heads: int, block_rows: int, tile_n: int, causal: bool, setup: int) -> None:
        self.group, self.kv_heads, self.block_rows = group, kv_heads, block_rows
        self.tile_n, self.causal, self.setup = tile_n, causal, setup

    @cute.jit
    def __call__(
        self,
        context_lens: cute.Tensor,  # [R] int32
        request_offsets: cute.Tensor,  # [R + 1] int32
        table: cute.Tensor,  # [units + entries * kv_heads, RECORD] int32
        units: Int32,
        first_query: Int32,
        stream: Any,
    ) -> None:
        self.kernel(context_lens, request_offsets, table, units, first_query).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        context_lens: cute.Tensor,
        request_offsets: cute.Tensor,
        table: cute.Tensor,
        units: Int32,
        first_query: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        first_entry = smem.allocate_tensor(Int32, cute.make_layout(MAX_ENTRIES + 1), 16)
        request_of = smem.allocate_tensor(Int32, cute.make_layout(MAX_ENTRIES), 16)
        cost_before = smem.allocate_tensor(Int32, cute.make_layout(MAX_ENTRIES + 1), 16)
        cuts = smem.allocate_tensor(Int32, cute.make_layout(MAX_UNITS + 1), 16)
        requests = context_lens.shape[0]

        for r in cutlass.range(thread, requests, THREADS, unroll=1):
            length = request_offsets[r + 1] - request_offsets[r]
            first_entry[r] = (length * self.group + self.block_rows - 1) // self.block_rows
        cute.arch.sync_threads()
        if thread < 32:
            scan(first_entry, requests)
        cute.arch.sync_threads()
        entries = first_entry[requests]
        for r in cutlass.range(thread, requests, THREADS, unroll=1):
            length = request_offsets[r + 1] - request_offsets[r]
            context = context_lens[r] + first_query
            for e in cutlass.range(first_entry[r], first_entry[r + 1], unroll=1):
                seen = length
                if const_expr(self.causal):
                    row0 = (e - first_entry[r]) * self.block_rows
                    seen = cutlass.min(length, (row0 + self.block_rows + self.group - 1) // self.group)
                request_of[e] = r
                cost_before[e] = (context + seen + self.tile_n - 1) // self.tile_n + self.setup
        cute.arch.sync_threads()
        if thread < 32:
            scan(cost_before, entries)
        cute.arch.sync_threads()

        total = cost_before[entries] * self.kv_heads
        share = (total + units - 1) // units
        for u in cutlass.range(thread, units + 1, THREADS, unroll=1):
            cut = cutlass.min(u * share, total)
            if cut < total:
                begin, cost = self.work_at(cost_before, entries, cut)[1:]
                if cut <= begin + self.setup:
                    cut = begin
            cuts[u] = cut
        cute.arch.sync_threads()

        for row in cutlass.range(thread, table.shape[0], THREADS, unroll=1):
            start = total
            if row < units:
                if cuts[row] < cuts[row + 1]:
                    start = cuts[row]
            else:
                w = row - units
                if w < entries * self.kv_heads:
                    e, h = w // self.kv_heads, w % self.kv_heads
                    start = cost_before[e] * self.kv_heads + h * (cost_before[e + 1] - cost_before[e])
            record = cute.make_rmem_tensor(RECORD, Int32)
            record.fill(0)
            if start < total:
                work, begin, cost = self.work_at(cost_before, entries, start)
                unit = last_at_most(cuts, units, start)
                first = last_at_most(cuts, units, begin)
                last = last_at_most(cuts, units, begin + cost - 1)
                stop = cutlass.min(begin + cost, cuts[unit + 1])
                e = work // self.kv_heads
                r = request_of[e]
                record[0] = r
                record[1] = work % self.kv_heads
                record[2] = (e - first_entry[r]) * self.block_rows
                record[3] = request_offsets[r]
                record[4] = request_offsets[r + 1] - request_offsets[r]
                record[5] = context_lens[r]
                record[6] = cutlass.max(start - begin - self.setup, 0)
                record[7] = stop - begin - self.setup
                slot = 2 * unit
                if start == begin:
                    slot += 1
                if first == last:
                    slot = Int32(-1)
                record[8] = slot
                record[9] = first
                record[10] = last
                record[11] = self.work_at(cost_before, entries, cuts[unit + 1] - 1)[0] - work + 1
                record[12] = units + work + 1
                record[13] = first_query
            cute.autovec_copy(record, table[row, None])

    @cute.jit
    def work_at(self, cost_before: cute.Tensor, entries: Int32, x: Int32) -> tuple[Int32, Int32, Int32]:
        """The work at position x of the line: its number, where it begins, its cost. Heads of an entry follow each other."""
        low, high = Int32(0), entries
        while high - low > 1:
            middle = (low + high) // 2
            if cost_before[middle] * self.kv_heads <= x:
                low = middle
            else:
                high = middle
        entry = low
        cost = cost_before[entry + 1] - cost_before[entry]
        head = (x - cost_before[entry] * self.kv_heads) // cost
        return entry * self.kv_heads + head, cost_before[entry] * self.kv_heads + head * cost, cost
