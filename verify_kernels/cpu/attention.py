"""Tree attention that reads the paged cache in place, for bfloat16 and float32.

Each key and value is widened once for the up to 96 query rows (heads and new tokens) that share it. A token's output
depends on its query and on the keys it sees, in order, and on nothing else: it is bit for bit the same in plain
decoding and in a tree, alone and in a batch, for any number of threads. Long causal passes (prefill) run here too:
that is faster than torch's own attention on processors without bfloat16 instructions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify_kernels.batch import PassBatch
from verify_kernels.cpu.build import library
from verify_kernels.reference import attention as reference

_HALF = {torch.bfloat16: 1, torch.float32: 0}
_MASKS = ("tree", "causal", "full")


class _Batch(ctypes.Structure):  # `struct Batch` of attention.cpp
    _fields_ = [(name, ctypes.c_void_p) for name in ("offsets", "context", "table", "positions", "masks")] + [
        (name, ctypes.c_int64)
        for name in ("requests", "tokens", "table_width", "table_stride", "full", "window", "first_query")
    ]  # fmt: skip


@dataclass
class AttentionPlan:
    """Addresses of a batch's index tensors, which are kept alive and read by every layer's call."""

    address: int
    struct: _Batch
    tensors: tuple[Tensor | None, ...]
    mask: str
    window: int


def plan_attention(batch: PassBatch, page_size: int, *, mask: str = "tree", window: int = 0) -> AttentionPlan:
    """See `verify_kernels.reference.attention.plan_attention`. The kernel reads the batch's own tensors."""
    if mask not in _MASKS:
        raise ValueError(f"mask: found {mask!r}, allowed: {', '.join(_MASKS)}")
    if window and batch.first_query:
        raise ValueError(f"window: found {window} with first_query {batch.first_query}, allowed: one of the two")
    masks = batch.ancestor_masks if mask == "tree" else None
    if masks is not None and batch.max_query_len > 64:
        raise ValueError(f"max_query_len: found {batch.max_query_len} with ancestor masks, allowed: at most 64")
    offsets, context = batch.request_offsets.int().contiguous(), batch.context_lens.int().contiguous()
    table, positions = batch.page_table.int().contiguous(), batch.positions.long().contiguous()
    masks = None if masks is None else masks.long().contiguous()
    if offsets.numel() != context.numel() + 1 or table.shape[0] != context.numel():
        raise ValueError(
            f"batch: found {context.numel()} context lengths, {offsets.numel()} offsets and {table.shape[0]} rows of "
            "the page table, allowed: R, R + 1 and R"
        )
    width = min(-(-batch.max_kv_len // page_size), table.shape[1])
    struct = _Batch(
        offsets.data_ptr(), context.data_ptr(), table.data_ptr(), positions.data_ptr(),
        None if masks is None else masks.data_ptr(), context.numel(), batch.num_tokens, width, table.shape[1],
        mask == "full", window, batch.first_query,
    )  # fmt: skip
    return AttentionPlan(ctypes.addressof(struct), struct, (offsets, context, table, positions, masks), mask, window)


def paged_tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PassBatch,
    *,
    scale: float,
    mask: str = "tree",
    softcap: float = 0.0,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See `verify_kernels.reference.attention.paged_tree_attention`. Raises IndexError on a page outside the cache."""
    plan = batch.plan
    if (
        q.dtype not in _HALF
        or k_pages.dtype != q.dtype
        or v_pages.dtype != q.dtype
        or (torch.is_grad_enabled() and q.requires_grad)
    ):
        if isinstance(plan, AttentionPlan):
            batch, mask, window = replace(batch, plan=None), plan.mask, plan.window
        return reference.paged_tree_attention(
            q, k_pages, v_pages, batch, scale=scale, mask=mask, softcap=softcap, window=window,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    (n, heads, dim), (pages, page_size, kv_heads, _) = q.shape, k_pages.shape
    if plan is None:
        plan = plan_attention(batch, page_size, mask=mask, window=window)
    if heads % kv_heads or k_pages.shape[3] != dim or v_pages.shape != k_pages.shape or n != plan.struct.tokens:
        raise ValueError(
            f"q: found {tuple(q.shape)} for keys {tuple(k_pages.shape)} and values {tuple(v_pages.shape)}, allowed: "
            f"[{plan.struct.tokens}, a multiple of {kv_heads}, {k_pages.shape[3]}] and values shaped as keys"
        )
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    failed = library().dspark_attention(
        _HALF[q.dtype], plan.address, q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
        q.stride(0), heads, kv_heads, dim, pages, page_size, scale, softcap, torch.get_num_threads(),
    )  # fmt: skip
    if failed == 1:
        raise ValueError("request_offsets, context_lens: found a decreasing, negative or too large entry")
    if failed:
        raise IndexError(f"page_table: found a page outside the cache, allowed: 0 to {pages - 1}")
    return out
