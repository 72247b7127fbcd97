"""Each token's experts from its router logits: scores, the choice among groups and experts, the weights, in one launch.

A warp takes a token, a lane every 32nd expert. The k best come one after the other by `redux`: the largest choice of all
lanes, then the lowest id among those that have it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

NONE = -(1 << 31)  # below every key


@cute.jit
def ordered(bits: Int32) -> Int32:
    """Of a float: orders as the float does."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@cute.jit
def key(value: Float32) -> Int32:
    return ordered(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))


@cute.jit
def largest(value: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value]
    )


@cute.jit
def smallest(value: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "redux.sync.min.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value]
    )


class Route:
    """One compiled variant; see `variants.RouteVariant` for the constants."""

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        experts: int,
        top_k: int,
        *,
        scores: str,
        bias: bool,
        groups: int,
        top_groups: int,
        renormalize: bool,
    ) -> None:
        if not 1 <= top_k <= min(experts, 32) or experts > 1024:
            raise ValueError(f"route: found {top_k} of {experts}, allowed: 1 to 32 of up to 1024")
        if not 1 <= groups <= 32 or experts % groups or not 1 <= top_groups <= groups:
            raise ValueError(f"route: found {top_groups} of {groups} groups, allowed: of up to 32 equal ones")
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"route: scores are {scores!r}, allowed: softmax, sigmoid")
        self.dtype, self.experts, self.top_k, self.scores, self.bias = dtype, experts, top_k, scores, bias
        self.groups, self.top_groups, self.renormalize = groups, top_groups, renormalize
        self.each = -(-experts // 32)  # experts of a lane

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # [T, E], rows may be strided
        bias: cute.Tensor | None,  # [E] float32
        weights: cute.Tensor,  # [T, k] float32
        ids: cute.Tensor,  # [T, k] int64
        scale: Float32,
        stream: Any,
    ) -> None:
        self.kernel(logits, bias, weights, ids, scale).launch(
            grid=[logits.shape[0], 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, logits: cute.Tensor, bias: cute.Tensor | None, weights: cute.Tensor, ids: cute.Tensor, scale: Float32
    ) -> None:
        token, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        s_scores = smem.allocate_tensor(Float32, cute.make_layout(self.experts), 16)
        s_choice = smem.allocate_tensor(Float32, cute.make_layout(self.experts), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        values = cute.make_rmem_tensor(cute.make_layout(self.each), Float32)
        keys = cute.make_rmem_tensor(cute.make_layout(self.each), Int32)
        for i in cutlass.range_constexpr(self.each):
            values[i] = -Float32.inf
            if 32 * i + lane < self.experts:
                values[i] = logits[token, 32 * i + lane].to(Float32)
        if const_expr(self.scores == "softmax"):
            most, total = values[0], Float32(0.0)
            for i in cutlass.range_constexpr(1, self.each):
                most = cutlass.max(most, values[i])
            most = cute.arch.warp_reduction(most, cutlass.max)
            for i in cutlass.range_constexpr(self.each):
                values[i] = cute.math.exp(values[i] - most)
                total += values[i]
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
            for i in cutlass.range_constexpr(self.each):
                values[i] = values[i] / total
        else:
            for i in cutlass.range_constexpr(self.each):
                values[i] = 1.0 / (1.0 + cute.math.exp(-values[i]))
        for i in cutlass.range_constexpr(self.each):
            e = 32 * i + lane
            keys[i] = NONE
            if e < self.experts:
                s_scores[e] = values[i]
                choice = values[i]
                if const_expr(self.bias):
                    choice += bias[e]
                s_choice[e] = choice
                keys[i] = key(choice)
        cute.arch.sync_warp()
        if const_expr(self.groups > 1):
            chosen = self.choose_groups(s_choice, lane)
            for i in cutlass.range_constexpr(self.each):
                group = (32 * i + lane) // (self.experts // self.groups)
                if (chosen >> group) & 1 == 0:
                    keys[i] = NONE

        own = Int32(0)
        for r in cutlass.range(self.top_k, unroll=1):
            best, at = keys[0], Int32(0)
            for i in cutlass.range_constexpr(1, self.each):
                if keys[i] > best:
                    best, at = keys[i], Int32(i)
            top = largest(best)
            mine = 32 * at + lane if best == top else Int32(0x7FFFFFFF)
            first = smallest(mine)
            for i in cutlass.range_constexpr(self.each):
                if 32 * i + lane == first:
                    keys[i] = NONE
            if lane == r:
                own = first
        weight = s_scores[own]
        if const_expr(self.renormalize):
            total = cute.arch.warp_reduction(weight if lane < self.top_k else Float32(0.0), lambda a, b: a + b)
            weight = weight / total
        if lane < self.top_k:
            weights[token, lane] = weight * scale
            ids[token, lane] = own.to(Int64)

    @cute.jit
    def choose_groups(self, choice: cute.Tensor, lane: Int32) -> Int32:
        """A bit for each of the best groups: by their best choice, or with a bias by their two best."""
        size = self.experts // self.groups
        best, second = -Float32.inf, -Float32.inf
        merit = Int32(NONE)
        if lane < self.groups:
            for j in cutlass.range(size, unroll=4):
                value = choice[lane * size + j]
                second = cutlass.max(second, cutlass.min(best, value))
                best = cutlass.max(best, value)
            merit = key(best + second) if const_expr(self.bias and size > 1) else key(best)
        chosen = Int32(0)
        for _ in cutlass.range(self.top_groups, unroll=1):
            top = largest(merit)
            first = smallest(lane if merit == top else Int32(32))
            chosen |= Int32(1) << first
            if lane == first:
                merit = Int32(NONE)
        return chosen
