"""The small-T linear without a GPU: its split of the work by enumeration, and its code as the compiler leaves it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import bench_linear
from tests.verify_kernels.compiled import compile_remarks
from verify_kernels.cute import UNMEASURED, compile as kernels
from verify_kernels.cute.linear.run import choose, interleave, linear
from verify_kernels.cute.linear.schedule import SLACK, contributors, most_contributors, plan, segments
from verify_kernels.errors import KernelError

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")

SHARED_MEMORY = 227 * 1024  # of a CTA on sm_90
REGISTERS = 64 * 1024  # of an SM

COMPILED = [
    choose(torch.bfloat16, 8),
    choose(torch.bfloat16, 64, bias=True, residual=True),
    choose(torch.bfloat16, 16, swiglu=True),
    choose(torch.bfloat16, 8, swiglu=True, rms_in=True),
    choose(torch.bfloat16, 64, residual=True, rms_out=True),
    bench_linear.variant("m64 half early", 32),
    bench_linear.variant("m256", 64),
]


@settings(max_examples=300, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 400), st.sampled_from([4096, 6144, 24576])),
    k=st.one_of(st.integers(1, 700), st.sampled_from([4096, 12288])),
    tile_rows=st.sampled_from([64, 128, 256]),
    tile_k=st.sampled_from([64, 128]),
    multiprocessors=st.sampled_from([1, 7, 114, 132]),
    slack=st.sampled_from([0.0, SLACK, 0.5]),
)
def test_every_tile_once(rows, k, tile_rows, tile_k, multiprocessors, slack):
    units, share = plan(rows, k, tile_rows, tile_k, multiprocessors, slack)
    row_tiles, k_tiles = -(-rows // tile_rows), -(-k // tile_k)
    assert 1 <= units <= multiprocessors
    assert share <= (-(-row_tiles * k_tiles // multiprocessors)) * (1 + slack)

    parts: dict[int, list[tuple[int, int, int, int]]] = {n: [] for n in range(row_tiles)}
    slots = set()
    for unit in range(units):
        found = segments(unit, row_tiles, k_tiles, share)
        assert found and sum(last - first for _, first, last, _ in found) <= share
        for n, first, last, slot in found:
            assert first < last
            parts[n].append((first, last, unit, slot))
            if slot >= 0:
                assert slot < 2 * units and slot not in slots
                slots.add(slot)
    for n, found in parts.items():
        # In the order of the units, the parts are in the order of k and leave nothing out.
        assert [p[0] for p in found] == [0, *(p[1] for p in found[:-1])] and found[-1][1] == k_tiles
        first, last = contributors(n, k_tiles, share)
        assert [p[2] for p in found] == list(range(first, last + 1))
        assert (len(found) == 1) == (found[0][3] == -1)
        if len(found) > 1:  # where the last to arrive looks for them
            assert [p[3] for p in found] == [2 * u + (u == first) for u in range(first, last + 1)]
    assert max(len(p) for p in parts.values()) == most_contributors(row_tiles, k_tiles, share)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_a_unit_begins_at_most_one_shared_row_tile(row_tiles, k_tiles, share):
    # One counter for each unit and warpgroup is enough.
    begun = [contributors(n, k_tiles, share) for n in range(row_tiles)]
    shared = [first for first, last in begun if first != last]
    assert len(shared) == len(set(shared))


@pytest.mark.parametrize(
    ("matrix", "tile", "units", "most"),
    [("qkv", (128, 64), 128, 4), ("o", (128, 64), 128, 4), ("down", (128, 64), 128, 4), ("o", (64, 128), 128, 2)],
)
def test_qwen3_8b_splits_evenly(matrix, tile, units, most):
    rows, k = bench_linear.LAYER[matrix]
    found, share = plan(rows, k, *tile, 132)
    assert found == units
    assert most_contributors(-(-rows // tile[0]), -(-k // tile[1]), share) <= most


@needs_dsl
@pytest.mark.parametrize("variant", COMPILED, ids=lambda v: v.name)
def test_compiles_without_spills_or_serialised_products(variant, tmp_path):
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert spills and all(int(n) == 0 for n in spills), remarks
    assert "wgmma.mma_async instructions are serialized" not in remarks
    resident = 2 if variant.stages * (variant.rows + variant.tokens) * variant.tile_k * 2 <= 112 * 1024 else 1
    (registers,) = map(int, re.findall(r"Used (\d+) registers", remarks))
    assert resident * registers * (variant.rows * 2 + (64 if variant.rms_in else 32)) <= REGISTERS
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    assert (
        len(re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{variant.tokens}k16\.f32\.bf16", text))
        == variant.tile_k // 16
    )
    assert "griddepcontrol.launch_dependents" in text

    # Weights are asked for before the kernel waits for the one before it, x only after.
    start, waits, rest = text.partition("griddepcontrol.wait")
    boxes = variant.tile_k // 64
    assert waits and start.count("cp.async.bulk.tensor") == boxes
    assert rest.count("cp.async.bulk.tensor") == 3 * boxes


@pytest.mark.parametrize("variant", bench_linear.variants(), ids=lambda v: v.name)
def test_rings_fit_into_shared_memory(variant):
    sums = 4 * variant.tokens * (1 + variant.rows // 16)  # 1 / rms, and squares by warp
    barriers = 8 * (2 * variant.stages + 1) + 64
    head = -(-(barriers + sums) // 1024) * 1024
    assert head + variant.stages * (variant.rows + variant.tokens) * variant.tile_k * 2 <= SHARED_MEMORY


@needs_dsl
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", 24, "tokens is 24, allowed: 8, 16, 32, 64"),
        ("rows", 96, "rows is 96, allowed: 64, 128, 256"),
        ("tile_k", 32, "tile_k is 32, allowed: 64, 128"),
    ],
)
def test_unsupported_variants(field, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        kernels.compile_variant(dataclasses.replace(COMPILED[0], **{field: value}))


def test_choice_and_errors():
    assert [choose(torch.bfloat16, t).tokens for t in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    assert choose(torch.bfloat16, 8) == bench_linear.variant("m128", 8)
    with pytest.raises(KernelError, match=r"dtype is torch.float32, allowed"):
        choose(torch.float32, 8)
    with pytest.raises(KernelError, match=r"found 65 tokens, allowed: 1 to 64"):
        choose(torch.bfloat16, 65)
    x, w = torch.zeros(9, 64), torch.zeros(24, 64)
    with pytest.raises(ValueError, match="found 9 tokens, allowed by .*: 8"):
        linear(None, choose(torch.bfloat16, 8), x, w, x)
    with pytest.raises(ValueError, match="found 24 rows of gate and up, allowed: multiples of 16"):
        linear(None, choose(torch.bfloat16, 16, swiglu=True), x, w, x)


def test_variant_names_differ():
    names = [v.name for v in bench_linear.variants()]
    assert len(set(names)) == len(names)


def test_interleave_puts_both_of_a_channel_eight_rows_apart():
    gate, up = torch.randn(24, 5), torch.randn(24, 5)
    both = interleave(gate, up)
    for c in range(24):
        row = c // 8 * 16 + c % 8
        assert torch.equal(both[row], gate[c]) and torch.equal(both[row + 8], up[c])


def test_not_served_before_it_was_measured():
    assert "linear" in UNMEASURED


def test_the_summary_says_what_matters():
    results = [
        {"job": "check", "config": "m128", "tokens": 8, "cases": 4, "worst": 1e-3, "bad": []},
        {"job": "check", "config": "m64", "tokens": 8, "failed": "took too long"},
        {"job": "chain", "config": "m64", "tokens": 8, "skipped": "its kernel failed before"},
        *({"job": "chain", "config": c, "tokens": 8, "us": 1.0, "tbps": 4.0, "bits": 1} for c in ("torch", "m128")),
    ]
    text = bench_linear.summary(results)
    assert text.startswith("4 random cases, 0 bad, largest relative error 1.00e-03; jobs failed 1, skipped 1")
    assert re.search(r"m128 +- +4\.00\(1\.00\)", text)


def test_the_bench_builds_what_it_runs():
    built = set(bench_linear.variants())
    for job in bench_linear.jobs(240):
        if job.get("config", "torch") != "torch":
            assert bench_linear.variant(job["config"], job["tokens"], **job.get("epilogue", {})) in built
            if job["job"] == "layer":
                each = bench_linear.FUSED.values()
                assert {bench_linear.variant(job["config"], job["tokens"], **e) for e in each} <= built
