"""The grouped products of experts without a GPU: their plan by enumeration and in a float64 run of all CTAs, and their code
as the compiler leaves it."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify_kernels.compiled import compile_remarks
from verify_kernels import ops
from verify_kernels.cute import UNMEASURED, compile as kernels
from verify_kernels.cute.moe.pack import PART_BYTES, pack, pack_experts, packed_shape, rows_of, unpack
from verify_kernels.cute.moe.run import HALF, MOST_COLUMNS, choose, choose_route, experts, other_bytes, stage_bytes, stages
from verify_kernels.cute.moe.schedule import contributors, expert_of, line
from verify_kernels.errors import KernelError
from verify_kernels.quantized import Fp8Blocks, Mxfp4, quantize_fp8, quantize_mxfp4
from verify_kernels.reference.moe import moe_experts, moe_route

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")

REGISTERS = 64 * 1024  # of an SM


# ------------------------------------------------------------------------------------------------------- the plan


@settings(max_examples=200, deadline=None)
@given(
    down=st.booleans(),
    row_tiles=st.integers(1, 20),
    k_tiles=st.integers(1, 40),
    entries=st.integers(1, 30),
    units=st.sampled_from([1, 2, 7, 132, 264]),
)
def test_every_tile_of_every_entry_once(down, row_tiles, k_tiles, entries, units) -> None:
    rows, depth, share = line(down, row_tiles, k_tiles, entries, units)
    assert rows * depth == row_tiles * k_tiles * entries and share * units >= rows * depth
    seen, begun, slots = [], set(), set()
    for unit in range(units):
        begin, end = unit * share, min((unit + 1) * share, rows * depth)
        for n in range(begin // depth, -(-end // depth)):
            first, last = max(begin, n * depth), min(end, (n + 1) * depth)
            assert first < last
            seen += [expert_of(down, tile, row_tiles, k_tiles, entries) for tile in range(first, last)]
            among = contributors(n, depth, share)
            assert among[0] <= unit <= among[1] < units
            if last - first < depth:
                slot = 2 * unit + (first == n * depth)
                assert slot not in slots and slot == 2 * unit + (unit == among[0])  # where the last to arrive looks
                slots.add(slot)
                if unit == among[0]:
                    assert unit not in begun  # one counter for each unit is enough
                    begun.add(unit)
            else:
                assert among == (unit, unit)
    assert len(seen) == len(set(seen)) == rows * depth
    assert {which for which, _, _ in seen} == set(range(entries))
    order = [(r, a, k) if down else (a, r, k) for a, r, k in seen]
    assert order == sorted(order)


def sorted_picks(
    ids: np.ndarray, held: int, columns: int, down: bool
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """(entries: an expert and up to `columns` of its pairs, in order; all pairs by expert, then by token), as `Experts.sort`
    leaves them: without experts held elsewhere, and for down at least one entry."""
    pairs: dict[int, list[int]] = {}
    for pair, e in enumerate(ids.ravel().tolist()):
        if 0 <= e < held:
            pairs.setdefault(e, []).append(pair)
    if down and not pairs:
        return [(0, [])], []
    entries = [(e, pairs[e][i : i + columns]) for e in sorted(pairs) for i in range(0, len(pairs[e]), columns)]
    return entries, [pair for _, some in entries for pair in some]


def run_all_units(
    down: bool, x, w, ids, weights, units: int, rows: int, tile_k: int, most_columns: int
) -> np.ndarray:
    """What all CTAs of one launch do, in float64: tiles of `rows` x `tile_k`, sums over units in their order."""
    held, height, depth = w.shape
    tokens, top_k = ids.shape
    entries, order = sorted_picks(ids, held, most_columns, down)
    places = {pair: place for place, pair in enumerate(order)}
    tiles = -(-height // rows), -(-depth // tile_k)
    row_tiles, k_tiles, share = line(down, *tiles, len(entries), units)
    out = np.full((tokens, height) if down else (tokens * top_k, height // 2), np.nan)
    parts: dict[int, list[np.ndarray]] = {}
    for unit in range(units):
        begin, end = unit * share, min((unit + 1) * share, row_tiles * k_tiles)
        for n in range(begin // k_tiles, -(-end // k_tiles)):
            total = 0.0
            for tile in range(max(begin, n * k_tiles), min(end, (n + 1) * k_tiles)):
                which, r, k = expert_of(down, tile, *tiles, len(entries))
                e, pairs = entries[which]
                matrix = w[e][r * rows : (r + 1) * rows]
                if not down:  # 8 rows of gate, 8 of up
                    turns = np.stack([half.reshape(-1, 8) for half in np.arange(height).reshape(2, -1)], 1).ravel()
                    matrix = w[e][turns[r * rows : (r + 1) * rows]]
                inside = slice(k * tile_k, (k + 1) * tile_k)
                columns = x[[places[p] if down else p // top_k for p in pairs]]
                product = columns[:, inside] @ matrix[:, inside].T
                if down:  # to the tokens' sums
                    product, own = np.zeros((tokens, product.shape[1])), product
                    product[[p // top_k for p in pairs]] = own
                total = total + product
            parts.setdefault(n, []).append(total)
    for n, found in parts.items():
        sums = sum(found)  # [columns, rows]
        if down:
            out[:, n * rows : n * rows + sums.shape[1]] = sums
            continue
        (_, pairs), r = entries[n // tiles[0]], n % tiles[0]
        gate, up = sums.reshape(len(pairs), -1, 2, 8).transpose(2, 0, 1, 3).reshape(2, len(pairs), -1)
        value = gate / (1 + np.exp(-gate)) * up
        for column, pair in enumerate(pairs):
            channel = r * rows // 2
            out[places[pair], channel : channel + value.shape[1]] = value[column] * weights.ravel()[pair]
    return out


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    top_k=st.integers(1, 4),
    num_experts=st.sampled_from([4, 7, 16]),
    inner=st.sampled_from([8, 24, 40]),
    hidden=st.sampled_from([16, 40]),
    units=st.sampled_from([1, 3, 20, 132]),
    kind=st.sampled_from(["random", "all to the same", "ties", "most elsewhere", "all elsewhere"]),
    columns=st.sampled_from([2, 4, 32]),
    seed=st.integers(0, 1000),
)
def test_both_launches_give_the_reference(
    tokens, top_k, num_experts, inner, hidden, units, kind, columns, seed
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, num_experts, generator=g, dtype=torch.float64)
    if kind == "all to the same":
        logits = logits[:1].expand(tokens, -1)
    if kind == "ties":
        logits = logits.round()
    weights, ids = moe_route(logits, top_k, True)
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=g, dtype=torch.float64)
    down = torch.randn(num_experts, hidden, inner, generator=g, dtype=torch.float64)
    want = moe_experts(x, gate_up, down, weights, ids)
    if kind == "most elsewhere":  # the others are zeros where all are at hand
        weights, ids = moe_route(torch.randn(tokens, 3 * num_experts, generator=g, dtype=torch.float64), top_k, True)
        all_of_them = (torch.cat((torch.zeros_like(w), w, torch.zeros_like(w))) for w in (gate_up, down))
        want = moe_experts(x, *all_of_them, weights, ids)
        ids = ids - num_experts
    if kind == "all elsewhere":
        want, ids = torch.zeros_like(want), torch.where(ids % 2 == 0, ids + num_experts, ids - num_experts)
    arrays = [t.numpy() for t in (x, gate_up, down, weights, ids)]
    between = run_all_units(False, arrays[0], arrays[1], arrays[4], arrays[3], units, 32, 16, columns)
    found = run_all_units(True, between, arrays[2], arrays[4], None, units, 16, 32, columns)
    torch.testing.assert_close(torch.from_numpy(found), want, rtol=1e-10, atol=1e-10)


@needs_dsl
@pytest.mark.parametrize("down", [False, True])
def test_the_warps_that_fill_the_ring_walk_the_line(down) -> None:
    """The kernel's own function, on the CPU."""
    from tests.verify_kernels.cute.moe_on_cpu import walk

    for row_tiles, k_tiles, entries in ((3, 4, 5), (1, 1, 1), (2, 1, 3), (1, 6, 2)):
        count = row_tiles * k_tiles * entries
        want = [expert_of(down, tile, row_tiles, k_tiles, entries) for tile in range(count)]
        assert walk(down, row_tiles, k_tiles, entries, count).tolist() == [list(place) for place in want]


@needs_dsl
def test_places_among_tokens_are_counted_from_the_masks() -> None:
    """The kernel's own function, on the CPU."""
    from tests.verify_kernels.cute.moe_on_cpu import tokens_before_each

    for words in (1, 2):
        bits = np.random.default_rng(words).random((6, 32 * words)) < 0.5
        bits[0], bits[1] = False, True
        packed = (bits.reshape(6, words, 32) * (1 << np.arange(32, dtype=np.int64))).sum(-1).T
        found = tokens_before_each(np.ascontiguousarray(packed.astype(np.uint32).view(np.int32)))
        assert (found == bits.cumsum(1) - bits).all()


# ------------------------------------------------------------------------------------------------------- packed weights


def bf16(pairs: np.ndarray) -> np.ndarray:
    """int32 [...] of two bf16 each -> float64 [..., 2], the low half first."""
    halves = np.ascontiguousarray(pairs)[..., None].view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def words(packed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(packed).view(np.int32)


@needs_dsl
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize(("gate_up", "n", "k"), [(True, 256, 160), (True, 512, 128), (False, 200, 96), (False, 128, 256)])
def test_threads_find_their_values_in_packed_tiles(kind: str, gate_up: bool, n: int, k: int) -> None:
    """Every thread reads a tile where the kernel reads it, with the kernel's own shifts; where its values belong in the
    matrix is wgmma's definition of A."""
    from tests.verify_kernels.cute.moe_on_cpu import factors_of_words, pairs_of_words

    torch.manual_seed(0)
    weight = torch.randn(2, n, k) * torch.logspace(-3, 1, n)[:, None]
    quantized = quantize_mxfp4(weight) if kind == "mxfp4" else quantize_fp8(weight)
    want = quantized.dequantize(torch.float64).numpy()
    if gate_up:
        want = np.stack([half.reshape(2, -1, 8, k) for half in np.split(want, 2, axis=1)], 2).reshape(2, n, k)
    packed, rows = pack(quantized, gate_up), rows_of(gate_up)
    size = PART_BYTES[kind]
    assert packed.shape == (2, -(-n // rows), -(-k // 128), size * rows // 64) and size % 16 == 0
    padded = np.zeros((2, rows * packed.shape[1], 128 * packed.shape[2]))
    padded[:, :n, :k] = want

    for e, r, c in itertools.product(*map(range, packed.shape[:3])):
        for part in range(rows // 64):
            tile = words(packed[e, r, c, part * size : (part + 1) * size].numpy())
            shifted = bf16(pairs_of_words(tile, kind))  # [words, pairs, 2]
            factors = bf16(factors_of_words(tile))[..., 0]
            found = np.full((64, 128), np.nan)
            for thread in range(128):
                warp, lane = divmod(thread, 32)
                row, column = 16 * warp + lane // 4, lane % 4 * 2
                for step in range(8):
                    if kind == "mxfp4":
                        own = step // 4 * 512 + 4 * thread + step % 4
                        place = 1024 + (warp * 8 + lane // 4) * 2 + step // 4
                        pairs, scales = shifted[own], factors[place, step % 4 // 2 * 2 :]
                        values = [pairs[j] * scales[j % 2] * 2.0**64 for j in range(4)]
                    else:
                        at = step // 2 * 512 + 4 * thread + step % 2 * 2
                        scales = tile[2048:2050].view(np.float32).astype(np.float64)
                        pairs = shifted[at : at + 2].reshape(4, 2)
                        values = [pairs[j] * 2.0**120 * scales[j % 2] for j in range(4)]
                    for j, pair in enumerate(values):
                        found[row + j % 2 * 8, 16 * step + column + j // 2 * 8 :][:2] = pair
            start = rows * r + 64 * part
            assert np.array_equal(found, padded[e, start : start + 64, 128 * c : 128 * c + 128])


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["mxfp4", "fp8"]),
    gate_up=st.booleans(),
    experts=st.integers(1, 4),
    n=st.integers(1, 40),
    k=st.integers(1, 12),
    at_once=st.sampled_from([1, 20_000, 1 << 27]),
    seed=st.integers(0, 1000),
)
def test_unpacking_is_the_inverse_of_packing(kind, gate_up, experts, n, k, at_once, seed) -> None:
    """Any values, any sizes, packed at once or expert by expert."""
    g = torch.Generator().manual_seed(seed)
    rows = (256 * (1 + n % 2) if kind == "fp8" else 16 * n) if gate_up else 7 * n
    columns = 32 * k if kind == "mxfp4" else 29 * k
    if kind == "mxfp4":
        values = torch.randint(0, 256, (experts, rows, columns // 2), generator=g, dtype=torch.uint8)
        weight = Mxfp4(values, torch.randint(0, 193, (experts, rows, columns // 32), generator=g, dtype=torch.uint8))
    else:
        values = torch.randint(0, 256, (experts, rows, columns), generator=g, dtype=torch.uint8)
        scales = torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=g)
        weight = Fp8Blocks(values.view(torch.float8_e4m3fn), scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verify_kernels.cute.moe.pack.AT_ONCE", at_once)
        first, second = pack_experts(weight, weight) if gate_up else pack_experts(torch.zeros(1), weight)
    packed = first if gate_up else second
    assert (packed.kind, packed.shape, packed.nbytes, packed.numel()) == (kind, weight.shape, weight.nbytes, weight.numel())
    assert packed.tiles.shape == packed_shape(kind, weight.shape, gate_up)
    found = unpack(packed.tiles, kind, weight.shape[1:], gate_up)
    for e in range(experts):
        for other in (found[e], packed[e]):
            assert type(other) is type(weight)
            assert torch.equal(other.values.view(torch.uint8), weight.values[e].view(torch.uint8))
            assert torch.equal(other.scales, weight.scales[e])


@pytest.mark.parametrize("quantize", [quantize_mxfp4, quantize_fp8])
def test_packed_experts_are_multiplied_as_what_they_stand_for(quantize) -> None:
    torch.manual_seed(1)
    stored = quantize(torch.randn(4, 256, 96) / 8), quantize(torch.randn(4, 96, 128) / 8)
    packed = pack_experts(*stored)
    x, (weights, ids) = torch.randn(5, 96), moe_route(torch.randn(5, 4), 2, True)
    assert torch.equal(moe_experts(x, *packed, weights, ids), moe_experts(x, *stored, weights, ids))
    assert torch.equal(packed[1].dequantize(torch.float32), stored[1].dequantize(torch.float32))
    for op in ("pack_experts", "moe_experts", "situ_experts"):
        assert op in UNMEASURED
    plain = torch.randn(2, 32, 16), torch.randn(2, 16, 16)
    assert all(a is b for a, b in zip(pack_experts(*plain), plain))  # read as they are
    assert all(a is b for a, b in zip(ops.pack_experts(*stored), stored))  # on a CPU nothing changes


def test_products_that_come_out_of_the_shifts_are_exact_bf16() -> None:
    """Every e2m1 under the scales that are allowed, and every e4m3: shifted, times its factor, without rounding."""
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for scale in (0, 1, 66, 127, 192):
        product = torch.tensor(values * 2.0**-126) * 2.0 ** (scale - 65)
        assert torch.equal(product.bfloat16().double(), product) or scale < 66  # smaller weights underflow, as they may
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(e4m3.bfloat16().double(), e4m3)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ValueError, match="found 40 rows of gate and up, allowed: multiples of 16"):
        pack(quantize_mxfp4(torch.zeros(1, 40, 32)), True)
    with pytest.raises(ValueError, match="found 64 channels, allowed with fp8 blocks: multiples of 128"):
        pack(quantize_fp8(torch.zeros(1, 128, 32)), True)
    with pytest.raises(ValueError, match=r"scales: found 2\^66, allowed: up to 2\^65"):
        pack(quantize_mxfp4(torch.full((1, 16, 32), 2.0**68)), False)


# ------------------------------------------------------------------------------------------------------- the code

PAIRS = [choose(torch.bfloat16, t, e, k) for t, e, k in ((8, 128, 8), (16, 128, 8), (64, 128, 8), (32, 896, 16))]
PAIRS += [choose(torch.bfloat16, t, 128, 8, kind) for t, kind in ((8, "mxfp4"), (64, "mxfp4"), (16, "fp8"), (64, "fp8"))]
COMPILED = [variant for pair in PAIRS for variant in pair]
COMPILED.append(choose(torch.bfloat16, 16, 896, 16, "mxfp4", situ=(4.0, 25.0))[0])
ROUTES = [
    choose_route(torch.bfloat16, 128, 8, True),
    choose_route(torch.float32, 896, 16, True, scores="sigmoid", bias=True),
    choose_route(torch.float32, 256, 8, True, scores="sigmoid", bias=True, num_groups=8, top_groups=4),
]


@needs_dsl
@pytest.mark.parametrize("variant", COMPILED, ids=lambda v: v.name)
def test_compiles_without_spills_or_serialised_products(variant, tmp_path) -> None:
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert spills and all(int(n) == 0 for n in spills), remarks
    assert "wgmma.mma_async instructions are serialized" not in remarks
    # Two CTAs of either kernel are on an SM at once; registers of a warp come in lots of 256.
    (registers,) = map(int, re.findall(r"Used (\d+) registers", remarks))
    gather = not variant.down and variant.tokens > 8
    threads = 320 if gather else 288
    assert 2 * -(-registers // 8) * 8 * threads <= REGISTERS

    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    plain, most = variant.kind == "plain", min(variant.tokens, MOST_COLUMNS)
    product = r"wgmma\.mma_async\.sync\.aligned\.m64n%dk16\.f32\.bf16\.bf16 \{[^}]*\}, "
    for columns in (8, 16, 32, 64):  # an entry is multiplied with as few as hold it
        steps = 0 if columns > most else 4 if plain else 8
        assert len(re.findall(product % columns, text)) == steps
        assert len(re.findall((product + r"\{") % columns, text)) == (0 if plain else steps)
    pieces = sum(columns // 4 for columns in (8, 16, 32) if columns <= most) * (1 if plain else 2) if gather else 0
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", text)) == pieces
    boxes = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", text)
    if plain:  # gate and up in one box, in turns of 8 rows; down asks in two places, ahead and in turn
        assert boxes.count("3" if variant.down else "5") == (2 if variant.down else 1)
    else:
        assert f"], {PART_BYTES[variant.kind] * (1 if variant.down else 2)}, [" in text
    depth = 1 if plain else 2
    assert boxes.count("2") == (0 if gather else most // 8 * depth if variant.down else depth)
    # The first waits for what it reads before all else, and lets the second start; the second asks for weights before it
    # waits.
    before, waits, _ = text.partition("griddepcontrol.wait")
    assert waits and ("cp.async.bulk" in before) == variant.down
    assert ("ld.global.cg.b64" in before) == variant.down
    assert text.count("griddepcontrol.launch_dependents") == 1


@needs_dsl
@pytest.mark.parametrize("variant", ROUTES, ids=lambda v: v.name)
def test_routes_compile_without_spills(variant, tmp_path) -> None:
    """A choice takes two warp-wide reductions, by largest and by lowest id; a choice among groups the same."""
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert spills and all(int(n) == 0 for n in spills), remarks
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    for order in ("max", "min"):
        assert text.count(f"redux.sync.{order}.s32") == (2 if variant.groups > 1 else 1)
    before, waits, _ = text.partition("griddepcontrol.wait")
    assert waits and "ld.global" not in before and text.count("griddepcontrol.launch_dependents") == 1


@needs_dsl
def test_keys_order_as_the_numbers_do() -> None:
    from tests.verify_kernels.cute.moe_on_cpu import keys_of

    values = np.float32([-np.inf, -3e38, -2.5, -1e-40, 0.0, 1e-40, 0.5, np.nextafter(np.float32(0.5), 1), 7.0, 3e38, np.inf])
    keys = keys_of(values.view(np.int32))
    assert (np.diff(keys.astype(np.int64)) > 0).all() and keys[0] > np.iinfo(np.int32).min


def test_rings_of_two_ctas_fit_into_shared_memory() -> None:
    for tokens, down in itertools.product((8, 16, 32, 64), (False, True)):
        for num_experts, top_k in ((1, 1), (8, 2), (128, 8), (256, 8), (896, 16), (1024, 32)):
            for kind in ("plain", *PART_BYTES):
                n = stages(tokens, num_experts, top_k, down, kind)
                stage = stage_bytes(tokens, kind, down)
                assert n >= 2 and other_bytes(tokens, num_experts, top_k, down) + 16 * n + 1024 + n * stage <= HALF


def test_choice_and_errors() -> None:
    assert [choose(torch.bfloat16, t, 128, 8)[0].tokens for t in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    first, second = choose(torch.float16, 4, 64, 6)
    assert (first.down, second.down) == (False, True) and first.name != second.name
    for arguments, words in (
        ((torch.float32, 8, 128, 8), "dtype is torch.float32, allowed"),
        ((torch.bfloat16, 65, 128, 8), "found 65 tokens, allowed: 1 to 64"),
        ((torch.bfloat16, 8, 2000, 8), "found 8 of 2000, allowed: 1 to 32 of up to 1024"),
        ((torch.bfloat16, 8, 4, 33), "found 33 of 4, allowed"),
        ((torch.float16, 8, 128, 8, "mxfp4"), "dtype is torch.float16, allowed with mxfp4: torch.bfloat16"),
    ):
        with pytest.raises(KernelError, match=words):
            choose(*arguments)
    with pytest.raises(KernelError, match="dtype is torch.float64, allowed: bfloat16, float16, float32"):
        choose_route(torch.float64, 128, 8, True)
    with pytest.raises(KernelError, match="found 8 of 2048 in 1 groups, allowed: 1 to 32 of up to 1024"):
        choose_route(torch.float32, 2048, 8, True)
    pair = choose(torch.bfloat16, 8, 4, 2)
    ids, weights = torch.zeros(9, 2, dtype=torch.int64), torch.zeros(9, 2)
    x, gate_up, down = torch.zeros(9, 16), torch.zeros(4, 24, 16), torch.zeros(4, 16, 12)
    with pytest.raises(ValueError, match="found 9 tokens, allowed by .*: 8"):
        experts((None, None), pair, x, gate_up, down, weights, ids, x)
    with pytest.raises(ValueError, match="hidden size 16 with 24 and 12 channels, allowed: multiples of 8"):
        experts((None, None), pair, x[:8], gate_up, down, weights[:8], ids[:8], x)


@needs_dsl
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", 24, "tokens is 24, allowed: 8, 16, 32, 64"),
        ("top_k", 40, "found 40 of 128, allowed: 1 to 32 of up to 1024"),
        ("kind", "int4", "kind is 'int4', allowed: plain, mxfp4, fp8"),
    ],
)
def test_unsupported_variants(field, value, words) -> None:
    with pytest.raises(ValueError, match=words):
        kernels.compile_variant(dataclasses.replace(COMPILED[0], **{field: value}))


def test_not_served_before_it_was_measured() -> None:
    assert {"moe_experts", "moe_route"} <= set(UNMEASURED)
