"""The write side of the cache: per-head norms, rotary embedding and the paged write, in one launch.

One warp a head of a token. A lane holds the same D/64 neighbours of both halves of the head, so the half rotation needs
no exchange.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

THREADS = 256


class AppendKV:
    """See `verify_kernels.reference.attention.append_kv`."""

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, heads: int, kv_heads: int, norm: bool, fp8: bool) -> None:
        if head_dim not in (64, 128):
            raise ValueError(f"append_kv: head_dim is {head_dim}, allowed: 64, 128")
        self.dtype, self.head_dim, self.heads, self.kv_heads = dtype, head_dim, heads, kv_heads
        self.norm, self.fp8 = norm, fp8

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [N, Hq, D], any stride between tokens
        k: cute.Tensor,  # [N, Hkv, D], likewise
        v: cute.Tensor,  # [N, Hkv, D], likewise
        k_pages: cute.Tensor,  # [P, page, Hkv, D], bytes with fp8
        v_pages: cute.Tensor,  # [P, page, Hkv, D], likewise
        slots: cute.Tensor,  # [N] int64
        positions: cute.Tensor,  # [N] int64
        cos_sin: cute.Tensor,  # [max_positions, D] float32
        q_norm: cute.Tensor | None,  # [D]
        k_norm: cute.Tensor | None,  # [D]
        out: cute.Tensor,  # [N, Hq, D]
        eps: Float32,
        k_scale: cute.Tensor | None,  # [Hkv] float32, with fp8
        v_scale: cute.Tensor | None,  # [Hkv] float32, with fp8
        stream: Any,
    ) -> None:
        all_heads = q.shape[0] * (self.heads + 2 * self.kv_heads)
        self.kernel(q, k, v, k_pages, v_pages, slots, positions, cos_sin, q_norm, k_norm, out, eps, k_scale, v_scale).launch(
            grid=[cute.ceil_div(all_heads, THREADS // 32), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        k_pages: cute.Tensor,
        v_pages: cute.Tensor,
        slots: cute.Tensor,
        positions: cute.Tensor,
        cos_sin: cute.Tensor,
        q_norm: cute.Tensor | None,
        k_norm: cute.Tensor | None,
        out: cute.Tensor,
        eps: Float32,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * (THREADS // 32) + cute.arch.make_warp_uniform(thread // 32)
        heads = self.heads + 2 * self.kv_heads
        token, head = index // heads, index % heads
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if token < q.shape[0]:
            slot = slots[token]
            page, offset = slot // k_pages.shape[1], slot % k_pages.shape[1]
            if head < self.heads:
                self.rotate(q[token, head, None], out[token, head, None], positions[token], cos_sin, q_norm, eps, None)
            elif head < self.heads + self.kv_heads:
                h = head - self.heads
                scale = k_scale[h] if const_expr(self.fp8) else None
                self.rotate(
                    k[token, h, None], k_pages[page, offset, h, None], positions[token], cos_sin, k_norm, eps, scale
                )
            else:
                h = head - self.heads - self.kv_heads
                width = self.head_dim // 32
                lane = cute.arch.lane_idx()
                values = cute.make_rmem_tensor(width, self.dtype)
                cute.autovec_copy(cute.tiled_divide(v[token, h, None], (width,))[None, lane], values)
                target = v_pages[page, offset, h, None]
                scale = v_scale[h] if const_expr(self.fp8) else None
                self.write(values, cute.tiled_divide(target, (width,))[None, lane], scale)

    @cute.jit
    def rotate(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        position: cutlass.Int64,
        cos_sin: cute.Tensor,
        norm: cute.Tensor | None,
        eps: Float32,
        scale: Float32 | None,
    ) -> None:
        lane = cute.arch.lane_idx()
        width = self.head_dim // 64
        parts = self.halves(source)
        a = cute.make_rmem_tensor(width, self.dtype)
        b = cute.make_rmem_tensor(width, self.dtype)
        cos = cute.make_rmem_tensor(width, Float32)
        sin = cute.make_rmem_tensor(width, Float32)
        cute.autovec_copy(parts[None, lane], a)
        cute.autovec_copy(parts[None, 32 + lane], b)
        table = self.halves(cos_sin[position, None])
        cute.autovec_copy(table[None, lane], cos)
        cute.autovec_copy(table[None, 32 + lane], sin)
        if const_expr(self.norm):
            square = Float32(0.0)
            for i in cutlass.range_constexpr(width):
                square += a[i].to(Float32) * a[i].to(Float32) + b[i].to(Float32) * b[i].to(Float32)
            square = cute.arch.warp_reduction_sum(square)
            factor = cute.math.rsqrt(square / self.head_dim + eps)
            weight = self.halves(norm)
            w_a = cute.make_rmem_tensor(width, self.dtype)
            w_b = cute.make_rmem_tensor(width, self.dtype)
            cute.autovec_copy(weight[None, lane], w_a)
            cute.autovec_copy(weight[None, 32 + lane], w_b)
            for i in cutlass.range_constexpr(width):
                a[i] = (a[i].to(Float32) * factor * w_a[i].to(Float32)).to(self.dtype)
                b[i] = (b[i].to(Float32) * factor * w_b[i].to(Float32)).to(self.dtype)
        for i in cutlass.range_constexpr(width):
            x, y = a[i].to(Float32), b[i].to(Float32)
            a[i] = (x * cos[i] - y * sin[i]).to(self.dtype)
            b[i] = (y * cos[i] + x * sin[i]).to(self.dtype)
        result = self.halves(target)
        self.write(a, result[None, lane], scale)
        self.write(b, result[None, 32 + lane], scale)

    @cute.jit
    def write(self, values: cute.Tensor, target: cute.Tensor, scale: Float32 | None) -> None:
        """As they are, or, with a scale, divided by it to e4m3 bytes (what is too large becomes the largest)."""
        if const_expr(scale is None):
            cute.autovec_copy(values, target)
        else:
            wide = cute.make_rmem_tensor(4, Float32)  # conversions come in fours
            wide.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(values)):
                wide[i] = values[i].to(Float32) / scale
            narrow = cute.make_rmem_tensor(4, cutlass.Float8E4M3FN)
            narrow.store(wide.load().to(cutlass.Float8E4M3FN))
            all_bytes = cute.recast_tensor(narrow, cutlass.Uint8)
            cute.autovec_copy(cute.make_tensor(all_bytes.iterator, cute.make_layout(cute.size(values))), target)

    def halves(self, head: cute.Tensor) -> cute.Tensor:
        """(D/64, 64): column j of the first half's lanes is j, of the second half's 32 + j."""
        return cute.tiled_divide(head, (self.head_dim // 64,))
