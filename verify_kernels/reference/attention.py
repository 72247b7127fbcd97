"""Tree attention over a paged KV cache, and the cache's write side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.batch import SCRATCH_PAGE, KVCache, PassBatch, slots_of
from verify_kernels.reference.elementwise import rms_norm, rope


@dataclass
class AttentionPlan:
    """What every layer of one pass shares: which pages to gather, which query may see which key."""

    pages: Tensor  # [R, P] int64, the used width of the page table
    visible: Tensor  # [R, Q, L] bool
    unseen: Tensor  # [R, L, 1, 1] bool: keys that no query sees; whatever lies there, NaN included, has no effect
    row_of: Tensor | None  # [R, Q] int64 row in the flat batch of padded query (r, j); None when the batch is uniform
    padded_of: Tensor | None  # [N] int64 index of flat row n in the padded [R * Q] layout


def plan_attention(batch: PassBatch, page_size: int, *, mask: str = "tree", window: int = 0) -> AttentionPlan:
    """Index work that is the same for all layers. See `paged_tree_attention` for the meaning of mask and window."""
    if window and batch.first_query:
        raise ValueError(f"window: found {window} with first_query {batch.first_query}, allowed: one of the two")
    device = batch.context_lens.device
    n, r, q = batch.num_tokens, batch.num_requests, batch.max_query_len
    width = min(-(-batch.max_kv_len // page_size), batch.page_table.shape[1])
    pages = batch.page_table[:, :width].long()
    keys = torch.arange(width * page_size, device=device)
    local = torch.arange(q, device=device)
    own = batch.first_query + local  # index among the request's new tokens

    row_of = padded_of = None
    if n != r * q:
        offsets = batch.request_offsets.long()
        rows = torch.arange(n, device=device)
        request = torch.searchsorted(offsets[1:], rows, right=True)
        padded_of = request * q + rows - offsets[request]
        row_of = (offsets[:-1, None] + local).clamp(max=n - 1)

    context = batch.context_lens.long()[:, None, None]
    relative = keys - context  # [R, 1, L]: index among the request's new tokens, negative for the context
    counts = (batch.request_offsets[1:] - batch.request_offsets[:-1]).long()[:, None, None]
    fresh = (relative >= 0) & (relative < batch.first_query + counts)
    if mask == "tree" and batch.ancestor_masks is not None:
        words = batch.ancestor_masks if row_of is None else batch.ancestor_masks[row_of.flatten()]
        bits = (words.view(r, q, 1) >> relative.clamp(0, 63)) & 1
        visible = (relative < 0) | (fresh & (bits == 1))
    elif mask == "full":
        visible = ((relative < 0) | fresh).expand(r, q, -1)
    else:
        visible = (relative < 0) | (fresh & (relative <= own[:, None]))
    if window:
        positions = batch.positions if row_of is None else batch.positions[row_of.flatten()]
        # A new token's own position decides, so that siblings of a tree see the same span of context.
        key_positions = torch.where(relative < 0, keys.expand_as(relative), 0)
        if n == r * q:
            fresh_positions = batch.positions.view(r, 1, q)
        else:
            fresh_positions = batch.positions[row_of.flatten()].view(r, 1, q)
        fresh_positions = fresh_positions.gather(2, relative.clamp(0, q - 1))
        key_positions = torch.where(relative < 0, key_positions, fresh_positions)
        visible = visible & (positions.view(r, q, 1) - key_positions < window)
    return AttentionPlan(pages, visible, ~visible.any(1)[:, :, None, None], row_of, padded_of)


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
    """Attention of every request's new tokens over its committed context and the new tokens it may see.

    q [N, Hq, D], k_pages and v_pages [P, page, Hkv, D] of one layer, which already hold the new tokens' keys and values
    -> [N, Hq, D]. Query head h reads KV head h // (Hq / Hkv).

    mask "tree" uses batch.ancestor_masks (causal where that is None); "causal" orders new tokens as a chain; "full"
    lets every new token see every new token of its request (a block drafter's own mask). scale multiplies q.k; softcap
    c > 0 replaces a score s by c tanh(s / c); window w > 0 hides keys whose position is w or more behind the query's.
    k_scale, v_scale [Hkv] float32, with float8_e4m3fn pages: a stored value times its head's scale is meant.
    """
    n, heads, dim = q.shape
    kv_heads, page_size = k_pages.shape[2], k_pages.shape[1]
    plan = batch.plan if batch.plan is not None else plan_attention(batch, page_size, mask=mask, window=window)
    requests, queries, length = plan.visible.shape
    group = heads // kv_heads

    k, v = (
        _values(pages, plan.pages, scales, q.dtype).view(requests, length, kv_heads, dim)
        .masked_fill(plan.unseen, 0).transpose(1, 2)
        for pages, scales in ((k_pages, k_scale), (v_pages, v_scale))
    )  # fmt: skip
    padded = q if plan.row_of is None else q[plan.row_of.flatten()]
    # GQA: the heads that share a KV head become rows of one product.
    rows = padded.view(requests, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(requests, kv_heads, group * queries, dim)
    visible = plan.visible.unsqueeze(1).repeat(1, 1, group, 1)
    if softcap:
        scores = softcap * torch.tanh((rows.float() @ k.float().transpose(-1, -2)) * (scale / softcap))
        out = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale)
    out = out.view(requests, kv_heads, group, queries, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    return out if plan.padded_of is None else out[plan.padded_of]


def _values(pages: Tensor, index: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The pages of an index, [..., page, Hkv, D]; e4m3 ones times their head's scale."""
    if scales is None:
        return pages[index]
    stored = pages.view(torch.uint8)[index].view(pages.dtype)  # not every device indexes 8-bit floats
    return (stored.float() * scales[:, None]).to(dtype)


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PassBatch,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Optional per-head norms, rotary embedding, and the paged write. Returns the rotated q.

    q [N, Hq, D], k and v [N, Hkv, D], k_pages and v_pages [P, page, Hkv, D] (written at batch.slot_mapping).
    k_scale, v_scale [Hkv] float32, with float8_e4m3fn pages: values are divided by them, and limited to +-448.
    """
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rope(q, batch.positions, cos_sin), rope(k, batch.positions, cos_sin)
    for pages, new, scales in ((k_pages, k, k_scale), (v_pages, v, v_scale)):
        if scales is not None:
            new = (new.float() / scales[:, None]).clamp(-448, 448).to(pages.dtype).view(torch.uint8)
            pages = pages.view(torch.uint8)
        pages.view(-1, *pages.shape[2:])[batch.slot_mapping] = new.to(pages.dtype)
    return q


def commit_path(cache: KVCache, page_table: Tensor, context_lens: Tensor, path: Tensor) -> None:
    """Compact the accepted path in place, all layers at once.

    path [R, n] int64: node index of the i-th kept new token (path[:, 0] is the root, 0), ascending, -1 beyond the end.
    The keys and values at logical index context + path[i] move to context + i. Everything is read before it is written.
    """
    keep = path >= 0
    base = context_lens.long()[:, None]
    steps = torch.arange(path.shape[1], device=path.device)
    size = cache.page_size
    last = page_table.shape[1] * size - 1
    scratch = SCRATCH_PAGE * size
    source = torch.where(keep, slots_of(page_table, (base + path.clamp(min=0)).clamp(max=last), size), scratch).flatten()
    target = torch.where(keep, slots_of(page_table, (base + steps).clamp(max=last), size), scratch).flatten()
    for pages in (cache.k, cache.v):
        pages = pages.view(torch.uint8) if pages.element_size() == 1 else pages
        flat = pages.flatten(1, 2)  # a view
        flat[:, target] = flat[:, source]
