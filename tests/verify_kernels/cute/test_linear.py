"""The small-T linear without a GPU: its split of the work by enumeration, and its code as the compiler leaves it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import bench_linear
from tests.verify_kernels.compiled import compile_remarks
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.linear.pack import BYTES, PackedLinear, pack, pack_linear
from verify_kernels.cute.linear.run import choose, linear
from verify_kernels.cute.linear.schedule import (
    SHARED_MEMORY,
    SLACK,
    contributors,
    most_contributors,
    plan,
    segments,
    stages,
    tile,
)
from verify_kernels.cute.variants import LinearVariant
from verify_kernels.errors import KernelError
from verify_kernels.quantized import quantize_fp8
from verify_kernels.reference import linear as reference

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")

REGISTERS = 64 * 1024  # of an SM

COMPILED = [
    choose(torch.bfloat16, 8),
    choose(torch.bfloat16, 64, bias=True, residual=True),
    choose(torch.bfloat16, 16, swiglu=True),
    choose(torch.bfloat16, 8, swiglu=True, rms_in=True),
    choose(torch.bfloat16, 64, residual=True, rms_out=True),
    choose(torch.bfloat16, 32, (4096, 12288), residual=True, rms_out=True),
    choose(torch.float16, 64, (24576, 4096), swiglu=True, rms_in=True),
    bench_linear.variant("m48 half", 32, rms_in=True),
    bench_linear.variant("fp8 m64", 64, swiglu=True, rms_in=True),
    bench_linear.variant("fp8 m32 k512", 16, residual=True, rms_out=True),
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


@pytest.mark.parametrize("matrix", bench_linear.LAYER)
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_every_unit_of_a_qwen3_8b_layer_has_whole_row_tiles(matrix, tokens):
    rows, k = bench_linear.LAYER[matrix]
    height, tile_k = tile(rows, tokens, 132)
    turns = 3 if matrix == "gate_up" and tokens < 64 else 1
    assert plan(rows, k, height, tile_k, 132) == (128, turns * -(-k // tile_k)) and height * turns == rows // 128


@given(
    rows=st.integers(1, 200_000),
    tokens=st.sampled_from([8, 16, 32, 64]),
    multiprocessors=st.sampled_from([78, 114, 132]),
    step=st.sampled_from([8, 16]),
)
def test_low_tiles_leave_no_row_tile_shared(rows, tokens, multiprocessors, step):
    height, tile_k = tile(rows, tokens, multiprocessors, step)
    groups = -(-height // 64)
    assert height % (step * groups) == 0 and 16 <= height <= 192
    if height not in (64, 128, 192):
        units, share = plan(rows, 4096, height, tile_k, multiprocessors)
        assert most_contributors(-(-rows // height), 4096 // tile_k, share) == 1
        assert units * (1 + SLACK) >= multiprocessors


@needs_dsl
@pytest.mark.parametrize("variant", COMPILED, ids=lambda v: v.name)
def test_compiles_without_spills_or_serialised_products(variant, tmp_path):
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert spills and all(int(n) == 0 for n in spills), remarks
    assert "wgmma.mma_async instructions are serialized" not in remarks
    resident = 2 if variant.stages == ring(variant, 2) else 1
    packed = variant.kind != "plain"
    sides = variant.tile_k // 128 if packed else 1
    groups = -(-variant.rows // 64) * sides
    (registers,) = map(int, re.findall(r"Used (\d+) registers", remarks))
    assert resident * registers * (groups * 128 + (96 if variant.rms_in else 64)) <= REGISTERS
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    assert (
        len(re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{variant.tokens}k16\.f32\.b?f16", text))
        == variant.tile_k // sides // 16
    )
    assert "griddepcontrol.launch_dependents" in text

    # A warp that asks for weights waits for no kernel before; x is asked for after that wait only.
    boxes = variant.tile_k // 64
    warps = text.split("griddepcontrol.launch_dependents")
    assert len(warps) == 2 and "griddepcontrol.wait" not in warps[0]
    of_w = 0 if packed else boxes
    assert warps[0].count("cp.async.bulk.shared::cluster.global") == packed * variant.rows // 16
    assert text.count("cp.async.bulk.tensor") == of_w + boxes
    assert text.partition("griddepcontrol.wait")[0].count("cp.async.bulk.tensor") == of_w


@pytest.mark.parametrize("variant", bench_linear.variants(), ids=lambda v: v.name)
def test_rings_fit_into_shared_memory(variant):
    sums = 4 * variant.tokens * (1 + 4 * -(-variant.rows // 64))  # 1 / rms, and squares by warp
    barriers = 8 * (2 * variant.stages + 1) + 64
    head = -(-(barriers + sums) // 1024) * 1024
    stage = (variant.rows + variant.tokens) * variant.tile_k * 2
    if variant.kind == "fp8":
        stage = variant.rows * variant.tile_k * BYTES // 2048 + variant.tokens * variant.tile_k * 2
        head += 512 * 4 * variant.tokens // 8 * (variant.tile_k // 128 - 1)  # sums of the warpgroups beside the first
    assert head + variant.stages * stage <= SHARED_MEMORY
    assert variant.stages == ring(variant, 1) or 2 * (head + variant.stages * stage + 1024) <= SHARED_MEMORY + 1024
    # wgmma reads 64 rows of a low tile: at the ring's end those of x.
    part = variant.rows // -(-variant.rows // 64)
    assert (64 - part) * 128 <= variant.stages * variant.tokens * variant.tile_k * 2


def ring(variant, resident):
    return stages(variant.rows, variant.tile_k, variant.tokens, resident, variant.kind)


@needs_dsl
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", 24, "tokens is 24, allowed: 8, 16, 32, 64"),
        ("rows", 72, "rows is 72, allowed: multiples of 16 up to 256"),
        ("rows", 264, "rows is 264, allowed: multiples of 40 up to 256"),
        ("tile_k", 32, "tile_k is 32, allowed: 64, 128, 256, 512"),
        ("kind", "int3", "kind is 'int3', allowed: plain, fp8"),
    ],
)
def test_unsupported_variants(field, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        kernels.compile_variant(dataclasses.replace(COMPILED[0], **{field: value}))


MEASURED = json.loads((Path(bench_linear.__file__).parent / "results/h200/linear.json").read_text())["results"]


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("tokens", bench_linear.TOKENS)
@pytest.mark.parametrize("matrix", bench_linear.BY_MATRIX)
def test_the_choice_was_measured_best(matrix, tokens, kind):
    # But for 1 %, which the rule gives away to be simple.
    shape = bench_linear.HEAD if matrix == "head" else bench_linear.LAYER[matrix]
    rates = {
        bench_linear.variant(r["config"], tokens): r["tbps"]
        for r in MEASURED
        if r["job"] == "matrix" and r["matrix"] == matrix and r["tokens"] == tokens and "slack" not in r
        if r["config"] in bench_linear.CONFIGS and bench_linear.kind_of(r["config"]) == kind
    }
    assert rates[choose(torch.bfloat16, tokens, shape, kind=kind)] >= 0.99 * max(rates.values())


def test_choice_and_errors():
    assert [choose(torch.bfloat16, t).tokens for t in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    assert choose(torch.bfloat16, 8) == bench_linear.variant("m64", 8)
    assert choose(torch.bfloat16, 8, (4096, 4096)) == bench_linear.variant("m32", 8)
    assert [choose(torch.bfloat16, t, (2048, 2048)).tile_k for t in (8, 16, 32)] == [256, 256, 128]
    assert choose(torch.bfloat16, 33, (6144, 4096), bias=True) == bench_linear.variant("m48", 64, bias=True)
    assert choose(torch.bfloat16, 9, bench_linear.HEAD) == bench_linear.variant("m128", 16)
    assert [choose(torch.bfloat16, 8, (5280, 64), swiglu=on).rows for on in (False, True)] == [40, 64]
    assert [choose(torch.bfloat16, t, (12288, 2048)).rows for t in (8, 16, 32, 64)] == [48, 48, 48, 96]
    with pytest.raises(KernelError, match=r"dtype is torch.float32, allowed"):
        choose(torch.float32, 8)
    with pytest.raises(KernelError, match=r"found 65 tokens, allowed: 1 to 64"):
        choose(torch.bfloat16, 65)
    fp8 = choose(torch.bfloat16, 8, (4096, 4096), kind="fp8", rms_in=True)
    assert fp8 == bench_linear.variant("fp8 m32 k512", 8, rms_in=True)
    assert choose(torch.bfloat16, 8, (24576, 4096), kind="fp8", swiglu=True).rows == 64
    with pytest.raises(KernelError, match=r"dtype is torch.float16 with fp8 weights, allowed: torch.bfloat16"):
        choose(torch.float16, 8, kind="fp8")
    x, w = torch.zeros(9, 64), torch.zeros(24, 64)
    with pytest.raises(ValueError, match="found 9 tokens, allowed by .*: 8"):
        linear(None, choose(torch.bfloat16, 8), x, w, x)
    with pytest.raises(ValueError, match="found 24 rows of gate and up, allowed: multiples of 16"):
        linear(None, choose(torch.bfloat16, 16, swiglu=True), x, w, torch.zeros(9, 12))
    with pytest.raises(ValueError, match=r"found packed weights of \(2, 4, 2064\), allowed: \(3, 4, 2064\)"):
        linear(None, choose(torch.bfloat16, 16, kind="fp8"), x, pack(quantize_fp8(w)), torch.zeros(9, 40))


@pytest.mark.parametrize(("n", "k", "gate_up"), [(16, 128, False), (200, 520, False), (272, 640, True), (8, 8, False)])
def test_packed_e4m3_is_what_a_thread_of_wgmma_multiplies(n, k, gate_up):
    torch.manual_seed(n)
    whole = quantize_fp8(torch.randn(n, k) * torch.rand(n, 1))
    codes = whole.values.view(torch.uint8)
    packed = pack(whole, gate_up)
    assert packed.shape == (-(-n // 16), -(-k // 512) * 4, BYTES) and packed.dtype == torch.uint8
    words = packed[:, :, :2048].reshape(*packed.shape[:2], 4, 32, 16)
    scales = packed[:, :, 2048:].contiguous().view(torch.float32)
    seen = torch.zeros(n, k)
    for lane in range(32):
        for step in range(8):
            quad = words[:, :, step // 2, lane].long().view(*packed.shape[:2], 4, 4)  # 4 words of 4 bytes
            for register in range(4):  # as wgmma has A: (r, 2c), (r + 8, 2c), (r, 2c + 8), (r + 8, 2c + 8)
                down, right = register % 2, register // 2
                for e in range(2):  # low half of the word first
                    byte = quad[:, :, step % 2 * 2 + right, 2 * e + (0 if down else 1)]
                    for block in range(packed.shape[0]):
                        row = 16 * block + lane // 4 + 8 * down
                        source = row // 16 * 8 + row % 8 + (n // 2 if down else 0) if gate_up else row
                        for b in range(packed.shape[1]):
                            column = 128 * b + 16 * step + 8 * right + lane % 4 * 2 + e
                            if row >= n or column >= k:
                                assert byte[block, b] == 0
                            else:
                                assert byte[block, b] == codes[source, column]
                                assert scales[block, b, down] == whole.scales[source // 128, column // 128]
                                seen[source, column] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(("n", "k", "gate_up"), [(48, 128, False), (200, 392, False), (512, 640, True), (17, 30, False)])
def test_packed_weights_dequantise_to_the_same_numbers(n, k, gate_up):
    stored = quantize_fp8(torch.randn(n, k, generator=torch.Generator().manual_seed(n)))
    packed = pack_linear(stored, torch.bfloat16, gate_up)
    assert isinstance(packed, PackedLinear) and packed.nbytes == stored.nbytes and packed.shape == (n, k)
    assert torch.equal(packed.dequantize(torch.bfloat16), reference.pack_linear(stored, torch.bfloat16, gate_up))
    x = torch.randn(3, k, dtype=torch.bfloat16)
    assert torch.equal(reference.linear(x, packed), x @ packed.dequantize(torch.bfloat16).T)


def test_what_is_not_packed_is_dequantised():
    stored = quantize_fp8(torch.randn(384, 128))
    for weight, dtype, gate_up in (
        (stored, torch.float16, False), (stored, torch.bfloat16, True), (torch.randn(32, 16), torch.bfloat16, True),
    ):  # fmt: skip
        assert torch.equal(pack_linear(weight, dtype, gate_up), reference.pack_linear(weight, dtype, gate_up))


def test_packing_wants_whole_rows_of_gate_and_up():
    with pytest.raises(ValueError, match="found 24 rows of gate and up, allowed: multiples of 16"):
        pack(quantize_fp8(torch.randn(24, 128)), gate_up=True)


def test_variant_names_differ():
    names = [v.name for v in bench_linear.variants()]
    assert len(set(names)) == len(names)


def test_the_summary_says_what_matters():
    results = [
        {"job": "check", "config": "m48", "tokens": 8, "cases": 4, "worst": 1e-3, "bad": []},
        {"job": "check", "config": "m64", "tokens": 8, "failed": "took too long"},
        {"job": "chain", "mix": "m64", "tokens": 8, "skipped": "its kernel failed before"},
        *({"job": "chain", "mix": m, "tokens": 8, "us": 1.0, "tbps": 4.0, "bits": 1} for m in ("torch", "whole")),
        {"job": "chain", "mix": "whole low", "tokens": 8, "us": 0.8, "tbps": 5.0, "bits": 2},
    ]
    text = bench_linear.summary(results)
    assert text.startswith("4 random cases, 0 bad, largest relative error 1.00e-03; jobs failed 1, skipped 1")
    assert re.search(r"whole +- +4\.00\(1\.00\)", text) and re.search(r"whole low +- +5\.00\(1\.25\)", text)
    assert "T=8: chains of the same sums differ bit by bit" in text


def test_the_bench_builds_and_checks_what_it_times():
    built = set(bench_linear.variants())
    checked: set[LinearVariant] = set()
    for job in bench_linear.jobs(240):
        used = set(bench_linear.uses(job))
        assert used <= built
        if job["job"] in ("chain", "layer", "matrix"):
            assert used <= checked
            assert bool(used) == ("torch" not in (job.get("mix"), job.get("config")))
        if job["job"] == "check":
            checked |= used
    assert checked == built
    assert sum(len(job["seeds"]) for job in bench_linear.jobs(240) if job["job"] == "check") >= 200
