"""Keys and values in e4m3 with a scale for each head: the reference against enumeration, and what the kernels refuse."""

from __future__ import annotations

import random

import pytest
import torch

from eval.bench_attention import make_batch, poison, quantised
from verify_kernels.batch import KVCache
from verify_kernels.cute import check_kv
from verify_kernels.errors import KernelError
from verify_kernels.reference import attention

FP8 = torch.float8_e4m3fn
KV_HEADS, DIM, PAGE = 3, 8, 4


def e4m3_values() -> torch.Tensor:
    """Every finite value, in ascending order: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    positive = [(m / 8) * 2.0**-6 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([-x for x in positive[:0:-1]] + positive, dtype=torch.float64)


@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
def test_attention_multiplies_by_the_scales(mask: str) -> None:
    torch.manual_seed(0)
    batch, pages = make_batch([0, 5, 11], [3, 1, 6], mask, PAGE, random.Random(0), "cpu")
    q = torch.randn(batch.num_tokens, 2 * KV_HEADS, DIM)
    (k, k_scale), (v, v_scale) = (quantised(torch.randn(pages, PAGE, KV_HEADS, DIM)) for _ in range(2))
    wide = [x.float() * s.view(1, 1, KV_HEADS, 1) for x, s in ((k, k_scale), (v, v_scale))]
    want = attention.paged_tree_attention(q, *wide, batch, scale=0.3, mask=mask)
    got = attention.paged_tree_attention(
        q, poison(k, batch), poison(v, batch), batch, scale=0.3, mask=mask, k_scale=k_scale, v_scale=v_scale
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_append_stores_the_nearest_value() -> None:
    torch.manual_seed(1)
    batch, pages = make_batch([0], [7], "causal", PAGE, random.Random(0), "cpu")
    batch.slot_mapping = torch.tensor([9, 4, 5, 6, 7, 8, 11])
    rows = torch.randn(7, KV_HEADS, DIM) * torch.logspace(-3, 3, 7)[:, None, None]
    scales = torch.tensor([0.5, 0.01, 3.0])
    cos_sin = torch.cat([torch.ones(16, DIM // 2), torch.zeros(16, DIM // 2)], dim=1)  # no rotation
    k, v = (torch.full((pages, PAGE, KV_HEADS, DIM), 1.0).to(FP8) for _ in range(2))
    before = k.clone()
    attention.append_kv(rows, rows, -rows, k, v, batch, cos_sin, k_scale=scales, v_scale=2 * scales)

    values = e4m3_values()
    for cache, new, scale in ((k, rows, scales), (v, -rows, 2 * scales)):
        exact = (new / scale[:, None]).double()
        nearest = values[(exact[..., None] - values).abs().argmin(-1)]
        flat = cache.view(-1, KV_HEADS, DIM).double()
        assert torch.equal(flat[batch.slot_mapping], nearest)
        others = [i for i in range(len(flat)) if i not in batch.slot_mapping.tolist()]
        assert torch.equal(flat[others], before.view(-1, KV_HEADS, DIM).double()[others])
    assert flat.abs().max() == 448


def test_commit_moves_bytes() -> None:
    batch, pages = make_batch([5], [6], "causal", PAGE, random.Random(0), "cpu")
    stored = torch.randn(2, pages, PAGE, KV_HEADS, DIM).to(FP8)
    cache = KVCache(stored.clone(), stored.clone())
    attention.commit_path(cache, batch.page_table, batch.context_lens, torch.tensor([[0, 2, 5, -1]]))
    slot = [int(batch.page_table[0, t // PAGE]) * PAGE + t % PAGE for t in range(11)]
    for got in (cache.k, cache.v):
        got, was = (x.view(torch.uint8).view(2, -1, KV_HEADS * DIM) for x in (got, stored))
        assert torch.equal(got[:, slot[6:8]], was[:, [slot[7], slot[10]]])
        assert torch.equal(got[:, slot[:6]], was[:, slot[:6]])


def test_kernels_refuse_what_has_not_run() -> None:
    q, pages = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 16, 2, 64)
    with pytest.raises(KernelError, match=r"k_pages: dtype is torch.float8_e4m3fn, allowed: torch.bfloat16.*reference"):
        check_kv(q, pages.to(FP8), torch.ones(2))
    with pytest.raises(KernelError, match=r"k_pages: dtype is torch.float32"):
        check_kv(q, pages, None)
    check_kv(q, pages.bfloat16(), None)
