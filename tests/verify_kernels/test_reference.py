"""The torch references, which specify every other backend, against loops in float64 written from their docstrings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from verify_kernels.batch import KVCache, PassBatch
from verify_kernels.reference import attention, elementwise, linear, moe


def make_batch(seed: int, page: int, counts: list[int], contexts: list[int], tree: bool) -> tuple[PassBatch, int]:
    """Requests over shuffled pages; a random tree (or a chain) of new tokens each. Returns the batch and the pages."""
    g = torch.Generator().manual_seed(seed)
    need = [-(-(c + q) // page) for c, q in zip(contexts, counts)]
    ids = (torch.randperm(sum(need), generator=g) + 1).split(need)
    table = torch.zeros(len(counts), max(need) + seed % 2, dtype=torch.int32)
    slots, positions, words = [], [], []
    for r, (count, context) in enumerate(zip(counts, contexts)):
        table[r, : need[r]] = ids[r]
        masks: list[int] = []
        for j in range(count):
            parent = int(torch.randint(0, j, (), generator=g)) if j else None
            masks.append((0 if parent is None else masks[parent]) | 1 << j)
            positions.append(context + (masks[j].bit_count() - 1 if tree else j))
            slots.append(int(ids[r][(context + j) // page]) * page + (context + j) % page)
        words += [m - (1 << 64) if m >> 63 else m for m in masks]
    batch = PassBatch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.tensor(positions),
        request_offsets=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        page_table=table,
        slot_mapping=torch.tensor(slots),
        ancestor_masks=torch.tensor(words) if tree else None,
        max_query_len=max(counts),
        max_kv_len=max(c + q for c, q in zip(contexts, counts)),
    )
    return batch, sum(need) + 1


def loop_attention(q, k_pages, v_pages, batch, scale, mask="tree", softcap=0.0, window=0) -> Tensor:
    heads, page = q.shape[1], k_pages.shape[1]
    group = heads // k_pages.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    offsets = batch.request_offsets.tolist()
    for r, context in enumerate(batch.context_lens.tolist()):
        for row in range(offsets[r], offsets[r + 1]):
            for h in range(heads):
                scores, values = [], []
                for j in range(context + offsets[r + 1] - offsets[r]):
                    new = j - context
                    position = j
                    if new >= 0:
                        position = int(batch.positions[offsets[r] + new])
                        word = None if batch.ancestor_masks is None else int(batch.ancestor_masks[row]) % (1 << 64)
                        if mask == "tree" and word is not None:
                            seen = bool(word >> new & 1)
                        else:
                            seen = mask == "full" or new <= row - offsets[r]
                        if not seen:
                            continue
                    if window and int(batch.positions[row]) - position >= window:
                        continue
                    where = int(batch.page_table[r, j // page]), j % page, h // group
                    score = float(q[row, h].double() @ k_pages[where].double()) * scale
                    scores.append(softcap * math.tanh(score / softcap) if softcap else score)
                    values.append(v_pages[where].double())
                if scores:
                    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                    out[row, h] = (weights[:, None] * torch.stack(values)).sum(0)
    return out


def tensors(batch: PassBatch, pages: int, page: int, heads: int, kv_heads: int, dim: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch.num_tokens, heads, dim, generator=g)
    k, v = (torch.randn(pages, page, kv_heads, dim, generator=g) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("mask", ["tree", "causal", "full"])
@pytest.mark.parametrize("tree", [False, True])
@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 11)), min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 4]),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([0, 1, 3, 20]),
    planned=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention(mask, tree, requests, page, softcap, window, planned, seed):
    counts, contexts = [a for a, _ in requests], [b for _, b in requests]
    batch, pages = make_batch(seed, page, counts, contexts, tree)
    q, k, v = tensors(batch, pages, page, 4, 2, 8, seed)
    if planned:
        batch.plan = attention.plan_attention(batch, page, mask=mask, window=window)
    found = attention.paged_tree_attention(
        q, k, v, batch, scale=0.35, mask=mask, softcap=softcap, window=window
    )
    want = loop_attention(q, k, v, batch, 0.35, mask, softcap, window)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("uniform", [False, True])
def test_attention_of_a_full_tree_of_64_nodes(uniform):
    counts = [64, 64] if uniform else [64, 2]
    batch, pages = make_batch(5, 16, counts, [3, 17], True)
    # The last node descends from node 62, so that bit 63 and its neighbours are all read as an unsigned word.
    batch.ancestor_masks[63] = batch.ancestor_masks[62] | (-1 << 63)
    batch.positions[63] = batch.positions[62] + 1
    q, k, v = tensors(batch, pages, 16, 2, 1, 4, 1)
    found = attention.paged_tree_attention(q, k, v, batch, scale=0.5)
    torch.testing.assert_close(found.double(), loop_attention(q, k, v, batch, 0.5), rtol=1e-5, atol=2e-6)
    # The highest bit of another node makes node 63 visible to it.
    batch.ancestor_masks[4] |= -1 << 63
    found = attention.paged_tree_attention(q, k, v, batch, scale=0.5)
    torch.testing.assert_close(found.double(), loop_attention(q, k, v, batch, 0.5), rtol=1e-5, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(1, 15), max_size=6, unique=True), min_size=1, max_size=3),
    contexts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    page=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
def test_commit_path_moves_the_accepted_nodes(paths, contexts, page, seed):
    rows = [[0, *sorted(p)] for p in paths]
    contexts = contexts[: len(rows)]
    batch, pages = make_batch(seed, page, [16] * len(rows), contexts, True)
    cache = KVCache.allocate(2, pages, page, 1, 3, torch.float32, "cpu")
    for i, t in enumerate((cache.k, cache.v)):
        t.copy_(torch.arange(t.numel()).view(t.shape) + i * 1e6)
    before = [t.clone() for t in (cache.k, cache.v)]
    width = max(map(len, rows))
    path = torch.tensor([r + [-1] * (width - len(r)) for r in rows])
    attention.commit_path(cache, batch.page_table, batch.context_lens, path)

    want = [t.clone() for t in before]
    for r, nodes in enumerate(rows):
        for i, node in enumerate(nodes):
            source, target = contexts[r] + node, contexts[r] + i
            for old, new in zip(before, want):
                new[:, int(batch.page_table[r, target // page]), target % page] = old[
                    :, int(batch.page_table[r, source // page]), source % page
                ]
    for found, expected in zip((cache.k, cache.v), want):
        assert torch.equal(found[:, 1:], expected[:, 1:])  # page 0 is anybody's


@pytest.mark.parametrize("norms", [False, True])
def test_append_kv_rotates_halves_and_writes_slots(norms):
    batch, pages = make_batch(2, 4, [3, 2], [5, 0], True)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, h, 6, generator=g) for h in (4, 2, 2))
    angles = torch.rand(12, 3, generator=g) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    weights = [torch.rand(6, generator=g) for _ in range(2)] if norms else [None, None]
    k_pages, v_pages = (torch.full((pages, 4, 2, 6), -5.0) for _ in range(2))
    rotated = attention.append_kv(q, k, v, k_pages, v_pages, batch, cos_sin, *weights, eps=1e-3)

    def transform(x: Tensor, position: int, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None:
            x = x / math.sqrt(float((x * x).mean()) + 1e-3) * weight.double()
        out = x.clone()
        for i in range(3):
            c, s = math.cos(float(angles[position, i])), math.sin(float(angles[position, i]))
            out[i], out[i + 3] = x[i] * c - x[i + 3] * s, x[i + 3] * c + x[i] * s
        return out

    untouched = torch.ones(pages * 4, dtype=torch.bool)
    for t in range(5):
        position, slot = int(batch.positions[t]), int(batch.slot_mapping[t])
        untouched[slot] = False
        for h in range(4):
            torch.testing.assert_close(
                rotated[t, h].double(), transform(q[t, h], position, weights[0]), rtol=1e-5, atol=1e-6
            )
        for h in range(2):
            found = k_pages.view(-1, 2, 6)[slot, h].double()
            torch.testing.assert_close(found, transform(k[t, h], position, weights[1]), rtol=1e-5, atol=1e-6)
        assert torch.equal(v_pages.view(-1, 2, 6)[slot], v[t])
    for pages_ in (k_pages, v_pages):
        assert bool((pages_.view(-1, 2, 6)[untouched] == -5.0).all())


@pytest.mark.parametrize("renormalize", [False, True])
def test_mixture_of_experts(renormalize):
    g = torch.Generator().manual_seed(0)
    tokens, hidden, inner, experts, top_k = 7, 6, 5, 9, 3
    x, logits = torch.randn(tokens, hidden, generator=g), torch.randn(tokens, experts, generator=g)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=g)
    down = torch.randn(experts, hidden, inner, generator=g)
    weights, ids = moe.moe_route(logits, top_k, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        exact = [math.exp(float(v)) for v in logits[t]]
        share = {e: exact[e] / sum(exact) for e in range(experts)}
        picked = sorted(share, key=lambda e: -share[e])[:top_k]
        assert ids[t].tolist() == picked
        total = sum(share[e] for e in picked) if renormalize else 1.0
        for i, e in enumerate(picked):
            assert float(weights[t, i]) == pytest.approx(share[e] / total, rel=1e-5)
            both = gate_up[e].double() @ x[t].double()
            gate, up = both[:inner], both[inner:]
            want[t] += share[e] / total * (down[e].double() @ (gate / (1 + (-gate).exp()) * up))
    found = moe.moe_experts(x, gate_up, down, weights, ids)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


def test_norms_and_gate():
    g = torch.Generator().manual_seed(0)
    x, y, w = torch.randn(3, 8, generator=g), torch.randn(3, 8, generator=g), torch.rand(8, generator=g)
    total = (x + y).double()
    want = total / (total.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * w.double()
    out, residual = elementwise.add_rms_norm(x, y, w, 0.01)
    assert torch.equal(residual, x + y)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    gate, up = x.double().chunk(2, 1)
    torch.testing.assert_close(
        elementwise.silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6
    )


def test_greedy_takes_the_first_maximum_and_reports_nan():
    weight = torch.tensor([[1.0], [3.0], [3.0], [2.0]])
    ids, best = linear.greedy_logits(torch.tensor([[1.0], [-1.0], [0.0]]), weight)
    assert ids.tolist() == [1, 0, 0] and best.tolist() == [3.0, -1.0, 0.0]
    weight[2] = float("nan")
    ids, best = linear.greedy_logits(torch.ones(1, 1), weight)
    assert ids.tolist() == [2] and bool(best.isnan().all())
    assert linear.logits(torch.ones(1, 1).bfloat16(), weight.bfloat16()).dtype == torch.float32
