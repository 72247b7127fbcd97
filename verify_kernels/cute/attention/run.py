"""Host side of verify attention: which variant runs, the plan of a pass, and the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import KVCache
from verify_kernels.cute.attention.schedule import MAX_ENTRIES, RECORD, schedule
from verify_kernels.cute.device import multiprocessors
from verify_kernels.cute.variants import AnyVariant, AppendVariant, CommitVariant, PlanVariant, Variant
from verify_kernels.errors import INSTEAD, KernelError

Kernel = Callable[..., None]


def choose(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, page_size: int, mask: str, max_query_len: int,
    softcap: bool = False, fp8: bool = False,
) -> Variant:
    """The variant for a shape. One tree of at most 64 rows (token * group) takes 64-row tiles: both warpgroups then
    split the keys. Larger ones take 128 rows a CTA, and as many CTAs abreast as the rows need, up to 4. fp8 (e4m3 keys
    and values) takes 64 rows a CTA, up to 8 abreast.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"verify attention: dtype is {dtype}, allowed: torch.bfloat16, torch.float16, {INSTEAD}")
    if head_dim not in (64, 128):
        raise KernelError(f"verify attention: head_dim is {head_dim}, allowed: 64, 128, {INSTEAD}")
    if heads // kv_heads > 16:
        raise KernelError(f"verify attention: {heads} heads share {kv_heads} KV heads, allowed: at most 16 each, {INSTEAD}")
    if page_size not in (16, 32, 64, 128):
        raise KernelError(f"verify attention: page_size is {page_size}, allowed: 16, 32, 64, 128, {INSTEAD}")
    rows = max_query_len * heads // kv_heads
    constants = (str(dtype).removeprefix("torch."), head_dim, heads, kv_heads, page_size, mask)
    if fp8:
        blocks = min(1 << max(-(-rows // 64) - 1, 0).bit_length(), 8)
        tiles = {"rows": 64, "blocks": blocks, "tile_n": 64, "stages": 6}
    elif rows <= 64:
        tiles = {"rows": 64, "tile_n": 64, "stages": 4 if head_dim == 128 else 8}
    else:
        blocks = min(-(-rows // 128), 4)
        blocks = 4 if blocks == 3 else blocks
        tiles = {"rows": 128, "blocks": blocks, "tile_n": 128, "stages": 3 if head_dim == 128 else 5}
    return Variant(*constants, **tiles, softcap=softcap, fp8=fp8)


def variants_of(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, page_size: int, norm: bool
) -> list[AnyVariant]:
    """Every kernel that an engine may ask for with a model of this attention: prompts, chains and trees of any size,
    their schedules, the write side (norm: with norms of q and k) and the compaction of 16-bit keys and values."""
    group = heads // kv_heads
    lengths = [max(rows // group, 1) for rows in (64, 128, 256, 512)]
    found: list[AnyVariant] = []
    for mask in ("causal", "tree"):
        for length in lengths:
            variant = choose(dtype, head_dim, heads, kv_heads, page_size, mask, length)
            found += [variant, plan_variant(variant)]
    found.append(AppendVariant(str(dtype).removeprefix("torch."), head_dim, heads, kv_heads, norm))
    found.append(CommitVariant(kv_heads * head_dim // 2))
    return list(dict.fromkeys(found))


def block_variants_of(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, page_size: int, block_size: int, norm: bool
) -> list[AnyVariant]:
    """Every kernel of a block drafter's attention: its block, in which all see all, and the write sides of block and
    context."""
    block = choose(dtype, head_dim, heads, kv_heads, page_size, "full", block_size)
    name = str(dtype).removeprefix("torch.")
    writes = (AppendVariant(name, head_dim, h, kv_heads, norm) for h in (heads, kv_heads))
    return list(dict.fromkeys((block, plan_variant(block), *writes)))


@dataclass
class Plan:
    """What all layers of one pass share. A CUDA graph may hold its making and its use; lengths may then change."""

    variant: Variant
    segments: Tensor
    page_table: Tensor
    ancestors: Tensor
    partial: Tensor
    stats: Tensor
    fresh: bool = True  # the next call may follow the plan's own kernels, so it reads nothing ahead of them


@functools.cache
def _workspace(device: torch.device, slots: int, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Partial results; passes on one stream share it."""
    partial = torch.empty(slots, rows, head_dim, dtype=torch.float32, device=device)
    return partial, torch.empty(slots, rows, 2, dtype=torch.float32, device=device)


def plan_variant(variant: Variant, setup: int | None = None) -> PlanVariant:
    """The schedule kernel that belongs to a variant. setup: see `schedule`; by default as measured on one H200."""
    return PlanVariant(
        group=variant.heads // variant.kv_heads,
        kv_heads=variant.kv_heads,
        block_rows=variant.rows * variant.blocks,
        tile_n=variant.tile_n,
        causal=variant.mask == "causal",
        setup=(4 if variant.blocks == 1 else 1) if setup is None else setup,
    )


def plan(
    variant: Variant,
    page_table: Tensor,
    context_lens: Tensor,
    request_offsets: Tensor,
    ancestor_masks: Tensor | None,
    num_tokens: int,
    *,
    kernel: Kernel | None = None,
    setup: int | None = None,
    first_query: int = 0,
) -> Plan:
    """page_table [R, P] int32, context_lens [R] int32, request_offsets [R + 1] int32, ancestor_masks [N] int64.

    Requests with a tree have at most 64 new tokens, first_query included. No host read. kernel: the compiled `plan_variant(variant, setup)`;
    without it the schedule is made by torch operations.
    """
    device = context_lens.device
    if (variant.mask == "tree") != (ancestor_masks is not None):
        found = "none" if ancestor_masks is None else "some"
        raise ValueError(f"verify attention: ancestor_masks are {found}, allowed: some with mask 'tree', none without")
    units = multiprocessors(device) // variant.blocks
    constants = plan_variant(variant, setup)
    entries = context_lens.shape[0] + num_tokens * constants.group // constants.block_rows
    if kernel is None:
        segments = schedule(context_lens, request_offsets, num_tokens, units=units, first_query=first_query, **dataclasses.asdict(constants))
    else:
        if entries > MAX_ENTRIES or context_lens.shape[0] > MAX_ENTRIES:
            raise ValueError(f"verify attention: blocks of query rows are up to {entries}, allowed: {MAX_ENTRIES}")
        segments = torch.empty(units + entries * variant.kv_heads, RECORD, dtype=torch.int32, device=device)
        kernel(context_lens.contiguous(), request_offsets, segments, units, first_query)
    if ancestor_masks is None:
        ancestor_masks = torch.empty(num_tokens, dtype=torch.int64, device=device)
    page_table, ancestor_masks = page_table.contiguous(), ancestor_masks.contiguous()
    partial, stats = _workspace(device, 2 * units * variant.blocks, variant.rows, variant.head_dim)
    return Plan(variant, segments, page_table, ancestor_masks, partial, stats)


def run(
    kernel: Kernel, plan: Plan, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, scale: float, softcap: float = 0.0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:
    """q [N, Hq, D], k_pages and v_pages [P, page, Hkv, D] of one layer -> out [N, Hq, D]. Capturable.

    k_scale, v_scale [Hkv] float32: with float8_e4m3fn pages.
    """
    if plan.variant.fp8:
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    kernel(
        q, k_pages, v_pages, plan.page_table, plan.ancestors, plan.segments, out, plan.partial, plan.stats, scale, softcap,
        int(plan.fresh), k_scale, v_scale,
    )
    plan.fresh = False
    return out


def append_kv(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The reference's `append_kv` by the compiled `AppendVariant`. q, k and v may be slices of one product. Capturable."""
    if k_scale is not None:
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel(q, k, v, k_pages, v_pages, slot_mapping, positions, cos_sin, q_norm, k_norm, out, eps, k_scale, v_scale)
    return out


def commit_path(kernel: Kernel, cache: KVCache, page_table: Tensor, context_lens: Tensor, path: Tensor) -> None:
    """The reference's `commit_path` by the compiled `commit_variant`. Capturable."""
    k, v = (x.view(*x.shape[:3], -1).view(torch.int32) if x.numel() else None for x in (cache.k, cache.v))
    kernel(k, v, page_table, context_lens.long(), path.contiguous())


def commit_variant(cache: KVCache) -> CommitVariant:
    size = cache.k.shape[3] * cache.k.shape[4] * cache.k.element_size()
    if size % 16:
        raise KernelError(f"commit_path: a slot has {size} bytes, allowed: multiples of 16, {INSTEAD}")
    return CommitVariant(size // 4, cache.v.shape[4] > 0)
