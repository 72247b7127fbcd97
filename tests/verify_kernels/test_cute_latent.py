"""Latent attention for Hopper: what the compiler says, and its tile schedule, masks and merge in float64.

There is no GPU here and no emulator of warpgroups: `transcribed` walks the very table of `attention.schedule` as the
kernel does (tiles, masks, clearing, partial results, merge) in NumPy, against the reference.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from eval.bench_latent import all_variants, floor_us, predicted_us
from tests.verify_kernels.compiled import compile_remarks
from tests.verify_kernels.test_reference import make_batch
from verify_kernels import ops
from verify_kernels.cute import UNMEASURED, compile as kernels
from verify_kernels.cute.attention.run import plan_variant
from verify_kernels.cute.attention.schedule import schedule
from verify_kernels.cute.latent.run import SETUP, choose
from verify_kernels.cute.variants import LATENT_RANK, LATENT_WIDTH, LatentVariant
from verify_kernels.errors import KernelError

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")
TILE = 64
SHIPPED = [choose(torch.bfloat16, 6, 576, 512, 64, "tree", 8), choose(torch.bfloat16, 12, 576, 512, 16, "causal", 16)]


@needs_dsl
@pytest.mark.parametrize("variant", SHIPPED, ids=lambda v: v.name)
def test_compiles_without_spills_or_serialised_products(variant, tmp_path):
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert len(spills) == 4 and all(int(n) == 0 for n in spills), remarks
    registers = sorted(int(n) for n in re.findall(r"Used (\d+) registers", remarks))
    # 384 threads leave 168 a thread; the warpgroups share them out anew. 256 threads of the merge have up to 255.
    assert registers[0] <= 168 and registers[1] <= 255, remarks
    assert "wgmma.mma_async instructions are serialized" not in remarks
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    # Unmasked and masked tiles: scores over 576 channels, values over 64 keys; one read of a tile, whatever it is for.
    assert len(re.findall(r"wgmma\.mma_async", text)) == 2 * (LATENT_WIDTH // 16 + TILE // 16)
    boxes = TILE // min(variant.page_size, TILE)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.", text)) == (boxes + 1) * LATENT_WIDTH // 64


def transcribed(
    variant: LatentVariant, batch, q: np.ndarray, pages: np.ndarray, scale: float, units: int
) -> np.ndarray:
    """q [N, H, W], pages [P, page, 1, W] -> [N, H, rank], as the kernel's units do it. NaN where nothing is stored."""
    constants = vars(plan_variant(variant, SETUP))
    table = schedule(
        batch.context_lens, batch.request_offsets, batch.num_tokens,
        units=units, first_query=batch.first_query, **constants,
    ).tolist()
    page_table, heads, rank, width = batch.page_table.numpy(), variant.heads, q.shape[2] - 64, q.shape[2]
    flat_q, out = q.reshape(-1, width), np.full((len(q) * heads, rank), np.nan)
    cells = pages.reshape(-1, width)
    slots = 2 * units * variant.blocks
    partial, stats = np.full((slots, TILE, rank), np.nan), np.full((slots, TILE, 2), np.nan)
    log2_scale = scale * math.log2(math.e)
    for unit in range(units):
        for cta in range(variant.blocks):
            segments = [table[unit], *table[table[unit][12] : table[unit][12] + table[unit][11] - 1]]
            for s in segments if table[unit][11] else []:
                request, _, row0, q_start, q_len, context, t0, t1, slot = s[:9]
                before, row0 = s[13], row0 + cta * TILE
                end, rows = context + before + q_len, q_len * heads
                first, last = t0 * variant.run, min(t1 * variant.run, -(-end // TILE))
                if row0 >= rows:
                    continue
                assert first < last
                at = q_start * heads + row0
                queries = np.zeros((TILE, width))
                queries[: len(flat_q[at : at + TILE])] = flat_q[at : at + TILE]
                top, total, o = np.full(TILE, -np.inf), np.zeros(TILE), np.zeros((TILE, rank))
                for t in range(first, last):
                    keys = np.zeros((TILE, width))
                    for j in range(TILE):  # whole boxes come: what lies past the end in the last page too
                        token = t * TILE + j
                        box = min(variant.page_size, TILE)
                        if token // box * box < end:
                            page = page_table[request, token // variant.page_size]
                            keys[j] = cells[page * variant.page_size + token % variant.page_size]
                    with np.errstate(invalid="ignore"):
                        scores = queries @ keys.T
                    if t >= context // TILE:
                        for r in range(TILE):
                            token = (row0 + r) // heads
                            for j in range(TILE):
                                new = t * TILE + j - context
                                if variant.mask == "tree":
                                    word = 0
                                    if token < q_len:
                                        word = int(batch.ancestor_masks[q_start + token])
                                        word &= (2 << before + q_len - 1) - 1
                                    seen = new < 0 or (new < 64 and word >> new & 1)
                                else:
                                    seen = new < before + min(token + 1, q_len)
                                if not seen:
                                    scores[r, j] = -np.inf
                    values = keys[:, :rank].copy()
                    values[max(end - t * TILE, 0) :] = 0
                    new_top = np.maximum(top, scores.max(1))
                    base = np.where(np.isinf(new_top), 0, new_top * log2_scale)
                    keep, p = np.exp2(top * log2_scale - base), np.exp2(scores * log2_scale - base[:, None])
                    o, total, top = o * keep[:, None] + p @ values, total * keep + p.sum(1), new_top
                own = min(TILE, rows - row0)
                if slot < 0:
                    assert np.isnan(out[at : at + own]).all()
                    out[at : at + own] = o[:own] / total[:own, None]
                else:
                    index = slot * variant.blocks + cta
                    partial[index, :own] = o[:own]
                    stats[index, :own] = np.stack((top[:own] * log2_scale, total[:own]), 1)
    for unit in range(units):  # the merge: whoever continues a work takes rows of it
        s = table[unit]
        if s[11] == 0 or s[6] == 0:
            continue
        row0, q_start, rows, first_unit, last_unit = s[2], s[3], s[4] * heads, s[9], s[10]
        parts = last_unit - first_unit + 1
        for r in range(unit - first_unit - 1, min(rows - row0, variant.blocks * TILE), parts - 1):
            index = [(2 * (first_unit + p) + (p == 0)) * variant.blocks + r // TILE for p in range(parts)]
            tops, sums = stats[index, r % TILE].T
            weights = np.exp2(tops - tops.max())
            at = q_start * heads + row0 + r
            assert np.isnan(out[at]).all()
            out[at] = weights @ partial[index, r % TILE] / (weights @ sums)
    return out.reshape(len(q), heads, rank)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    contexts=st.lists(st.sampled_from([0, 1, 15, 63, 64, 65, 127, 128, 300, 700]), min_size=3, max_size=3),
    page=st.sampled_from([16, 64, 128]),
    heads=st.sampled_from([1, 6, 16]),
    tree=st.booleans(),
    run=st.sampled_from([1, 2, 3]),
    units=st.sampled_from([1, 3, 22]),
    seed=st.integers(0, 1000),
)
def test_tiles_masks_and_merge(counts, contexts, page, heads, tree, run, units, seed):
    contexts = contexts[: len(counts)]
    batch, pages = make_batch(seed, page, counts, contexts, tree)
    rank, scale = 5, 0.3
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch.num_tokens, heads, rank + 64, generator=g, dtype=torch.float64)
    cache = torch.full((pages, page, 1, rank + 64), float("nan"), dtype=torch.float64)
    for r, (context, count) in enumerate(zip(contexts, counts)):
        for at in range(context + count):
            cell = torch.randn(rank + 64, generator=g, dtype=torch.float64)
            cache[int(batch.page_table[r, at // page]), at % page, 0] = cell
    blocks = choose(torch.bfloat16, heads, 576, 512, page, "tree", max(counts)).blocks
    variant = LatentVariant("bfloat16", heads, page, "tree" if tree else "causal", blocks, run)
    want = ops.latent_attention(q, cache, ops.plan_latent_attention(batch, page), rank, scale).numpy()
    found = transcribed(variant, batch, q.numpy(), cache.numpy(), scale, units)
    assert np.abs(found - want).max() < 1e-12 * max(1.0, np.abs(want).max())


@needs_dsl
@pytest.mark.parametrize(("heads", "blocks", "run"), [(6, 1, 2), (6, 3, 1), (16, 6, 4)])
def test_tiles_of_a_segment_as_compiled(heads, blocks, run):
    """The kernel's own function, compiled for the CPU, over a real table."""
    from tests.verify_kernels.cute.latent_on_cpu import tiles_of

    contexts, counts = [0, 63, 64, 1000, 129], [1, 30, 10, 64, 3]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    constants = vars(plan_variant(LatentVariant("bfloat16", heads, 64, "tree", blocks, run), SETUP))
    lengths = torch.tensor(contexts, dtype=torch.int32)
    table = schedule(lengths, offsets, sum(counts), units=7, first_query=0, **constants).numpy()
    table = table[table[:, 7] > table[:, 6]]
    for found, s in zip(tiles_of(heads, blocks, run, table), table.tolist(), strict=True):
        for cta, (first, last) in enumerate(found.tolist()):
            assert first == s[6] * run
            rows = s[2] + cta * TILE < s[4] * heads
            assert last == (min(s[7] * run, -(-(s[5] + s[4]) // TILE)) if rows else first)


def test_blocks_follow_the_rows():
    blocks = {q: choose(torch.bfloat16, 6, 576, 512, 64, "tree", q).blocks for q in (1, 8, 10, 11, 16, 32, 64, 300)}
    assert blocks == {1: 1, 8: 1, 10: 1, 11: 2, 16: 2, 32: 3, 64: 6, 300: 6}
    assert (LATENT_RANK, LATENT_WIDTH) == (512, 576)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "dtype: found torch.float32, allowed"),
        ({"heads": 96}, "heads: found 96, allowed: 1 to 16"),
        ({"rank": 256}, "rank and width: found (256, 576), allowed: (512, 576)"),
        ({"page_size": 48}, "page_size: found 48, allowed: 16, 32, 64, 128"),
        ({"mask": "full"}, "mask: found full, allowed: tree, causal"),
    ],
)
def test_errors_name_the_field(change, words):
    good = dict(dtype=torch.bfloat16, heads=6, width=576, rank=512, page_size=64, mask="tree", max_query_len=8)
    with pytest.raises(KernelError, match=re.escape(words)):
        choose(**(good | change))


def test_not_served_until_measured():
    assert {"plan_latent_attention", "latent_attention"} <= set(UNMEASURED)


def test_key_holds_the_attention_it_is_made_from(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    first = kernels.library(SHIPPED[0], tmp_path)
    monkeypatch.setattr(kernels, "BUILDS_ON", {})
    kernels.fingerprint.cache_clear()
    assert kernels.library(SHIPPED[0], tmp_path) != first
    kernels.fingerprint.cache_clear()


def test_bench_builds_what_it_runs_and_predicts_above_the_floor():
    names = [v.name for v in all_variants()]
    assert len(names) == len(set(names))
    for shape in ((1152, 1, 8), (8192, 1, 8), (131072, 32, 32)):
        assert predicted_us(*shape) > floor_us(*shape)[0]
