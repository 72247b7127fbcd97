"""Compaction of the accepted path: the keys and values of all layers, in place, in one launch.

A thread owns 16 bytes of a slot in one layer, for keys or for values, and walks the path in order. Nodes ascend along a
path, so node i of it moves down to slot i and never onto a slot that is still to be read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

THREADS = 128
AHEAD = 8  # reads in flight before the first write


class CommitPath:
    """See `verify_kernels.reference.attention.commit_path`. words: int32 words of a slot in one layer."""

    def __init__(self, words: int) -> None:
        if words % 4:
            raise ValueError(f"commit_path: a slot has {words} words, allowed: multiples of 4")
        self.words = words

    @cute.jit
    def __call__(
        self,
        k_cache: cute.Tensor,  # [layers, pages, page, words] int32
        v_cache: cute.Tensor | None,  # [layers, pages, page, words] int32
        page_table: cute.Tensor,  # [R, P] int32
        context_lens: cute.Tensor,  # [R] int64
        path: cute.Tensor,  # [R, n] int64
        stream: Any,
    ) -> None:
        self.kernel(k_cache, v_cache, page_table, context_lens, path).launch(
            grid=[
                cute.ceil_div(self.words // 4, THREADS),
                (1 if v_cache is None else 2) * k_cache.shape[0],
                path.shape[0],
            ],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor | None,
        page_table: cute.Tensor,
        context_lens: cute.Tensor,
        path: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        part, layer, request = cute.arch.block_idx()
        chunk = part * THREADS + thread
        if chunk < self.words // 4:
            if const_expr(v_cache is None):
                self.move(k_cache, layer, page_table, context_lens, path, request, chunk)
            elif layer < k_cache.shape[0]:
                self.move(k_cache, layer, page_table, context_lens, path, request, chunk)
            else:
                self.move(v_cache, layer - k_cache.shape[0], page_table, context_lens, path, request, chunk)

    @cute.jit
    def move(
        self,
        cache: cute.Tensor,
        layer: Int32,
        page_table: cute.Tensor,
        context_lens: cute.Tensor,
        path: cute.Tensor,
        request: Int32,
        chunk: Int32,
    ) -> None:
        context = context_lens[request]
        nodes = path.shape[1]
        values = cute.make_rmem_tensor(cute.make_layout((4, AHEAD)), Int32)
        for start in cutlass.range(0, nodes, AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                if self.moves(path, request, start + i):
                    source = self.slot(cache, layer, page_table, request, context + path[request, start + i], chunk)
                    cute.autovec_copy(source, values[None, i])
            for i in cutlass.range_constexpr(AHEAD):
                if self.moves(path, request, start + i):
                    target = self.slot(cache, layer, page_table, request, context + start + i, chunk)
                    cute.autovec_copy(values[None, i], target)

    @cute.jit
    def moves(self, path: cute.Tensor, request: Int32, i: Int32) -> cutlass.Boolean:
        """Whether node i of the path exists and is not in its place already."""
        result = cutlass.Boolean(False)
        if i < path.shape[1]:
            result = path[request, i] > i.to(Int64)
        return result

    @cute.jit
    def slot(
        self, cache: cute.Tensor, layer: Int32, page_table: cute.Tensor, request: Int32, token: Int64, chunk: Int32
    ) -> cute.Tensor:
        size = cache.shape[2]
        page = page_table[request, token // size]
        return cute.tiled_divide(cache[layer, page, token % size, None], (4,))[None, chunk]
