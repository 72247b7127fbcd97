"""Delta attention for Hopper: the kernels' own functions on the CPU against the reference in float64, and what the
compiler says.

`recurrence_on_cpu` runs every function of the kernels, thread by thread and barrier by barrier, over shared memory full
of NaN; only the exchange between eight lanes is transcribed (`test_lanes_meet`).
"""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from eval.bench_recurrence import all_variants, floor_us, predicted_us
from tests.verify_kernels.compiled import compile_remarks
from tests.verify_kernels.kda_cases import BOUND, Layer, make_pass
from tests.verify_kernels.test_recurrence import line_of, random_tree
from verify_kernels import cute, ops
from verify_kernels.batch import Records
from verify_kernels.cute import UNMEASURED, compile as kernels
from verify_kernels.cute.recurrence import run
from verify_kernels.cute.recurrence.run import choose, choose_commit, choose_norm, lift_of
from verify_kernels.cute.variants import GatedNormVariant, KdaCommitVariant, KdaVerifyVariant
from verify_kernels.errors import KernelError
from verify_kernels.reference import recurrence

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")
DIM = 128
NAN = float("nan")


def layer_of(heads: int, seed: int) -> Layer:
    return Layer.random(heads, DIM, 4, seed, torch.float32)


def slices(x: tuple[torch.Tensor, ...], even: bool = True) -> tuple[torch.Tensor, ...]:
    """Parts of one product, as they come: rows lie an even or odd number of elements apart."""
    sizes = [t.shape[1] for t in x]
    rest = 2 + (sum(sizes) + (not even)) % 2
    wide = torch.cat([*x, torch.full((len(x[0]), rest), NAN, dtype=x[0].dtype)], dim=1)
    return wide.split([*sizes, rest], dim=1)[:-1]


def passed(layer: Layer, counts, contexts, rows, trees, seed, dtype=torch.float32, padding=0):
    """(batch, tokens, state, window): what nobody wrote is NaN, and so are `padding` tokens past the last request."""
    batch = make_pass(counts, contexts, rows, trees)
    tokens = tuple(
        torch.cat((t, t.new_full((padding, t.shape[1]), NAN))) for t in layer.tokens(sum(counts), seed, dtype)
    )
    if trees is not None:
        batch.ancestor_masks = torch.cat((batch.ancestor_masks, torch.full((padding,), -1)))
    g = torch.Generator().manual_seed(seed)
    state = torch.randn(max(rows) + 2, layer.heads, DIM, DIM, generator=g)
    window = torch.randn(max(rows) + 2, 3, layer.channels, generator=g).to(dtype)
    used = [row for row, context in zip(rows, contexts) if context]
    for t in (state, window):
        for row in {*range(len(t))} - {*used}:
            t[row] = NAN
    return batch, tokens, state, window


def verified(variant: KdaVerifyVariant, layer: Layer, batch, tokens, state, window) -> tuple[torch.Tensor, Records]:
    """By the kernel's functions on the CPU."""
    from tests.verify_kernels.cute.recurrence_on_cpu import verify

    x = tokens[0]
    shape = (batch.num_requests, batch.max_query_len, layer.heads, DIM)
    y = torch.full((len(x), layer.heads, DIM), NAN, dtype=x.dtype)
    inputs = torch.full((*shape[:2], layer.channels), NAN, dtype=x.dtype)
    records = Records(inputs, *(torch.full(shape, NAN) for _ in range(3)))
    verify(
        variant, *tokens, layer.conv, layer.a_log, layer.dt_bias, BOUND, lift_of(batch.max_query_len, BOUND), state,
        window, batch.state_rows, batch.context_lens, batch.request_offsets, batch.ancestor_masks, y, inputs,
        records.keys, records.log_decay, records.updates,
    )  # fmt: skip
    return y, records


def wanted(layer: Layer, batch, tokens, state, window) -> tuple[torch.Tensor, Records]:
    """By the reference, in float64 but for what it rounds to x's dtype."""
    count = int(batch.request_offsets[-1])
    masks, batch.ancestor_masks = batch.ancestor_masks, None if batch.ancestor_masks is None else batch.ancestor_masks[:count]
    plan = recurrence.plan_recurrence(batch, 4)
    batch.ancestor_masks = masks
    weights = (layer.conv.double(), layer.a_log.double(), layer.dt_bias.double(), BOUND)
    return recurrence.kda_verify(*(t[:count] for t in tokens), *weights, state.double(), window, plan)


def near(found: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    off = (found.double() - want.double()).abs().max()
    assert off < limit * max(1.0, float(want.abs().max())), off


def compare(batch, found, want, limit: float) -> None:
    count = int(batch.request_offsets[-1])
    near(found[0][:count], want[0], limit)
    assert found[0][count:].isnan().all()
    for r, n in enumerate(batch.request_offsets.diff().tolist()):
        assert torch.equal(found[1].inputs[r, :n], want[1].inputs[r, :n])
        for name in ("keys", "log_decay", "updates"):
            got = getattr(found[1], name)
            near(got[r, :n], getattr(want[1], name)[r, :n], limit)
            assert got[r, n:].isnan().all()


VARIANTS = [
    (8, 8, True), (8, 16, False), (8, 32, True), (8, 64, True), (16, 8, False), (16, 16, True), (16, 32, False),
    (16, 64, False), (32, 8, True), (32, 16, False), (32, 32, True), (32, 64, True),
]  # fmt: skip


@needs_dsl
@pytest.mark.parametrize(("nodes", "columns", "tree"), VARIANTS)
def test_verify_equals_the_reference(nodes, columns, tree):
    variant = KdaVerifyVariant("float32", nodes, columns, tree)
    for seed in range(6):
        rng = random.Random(seed)
        heads, requests = (2, 3) if seed % 2 else (1, 2)
        layer = layer_of(heads, seed)
        counts = [rng.choice([1, nodes, rng.randint(1, nodes), rng.randint(nodes // 2 + 1, nodes)]) for _ in range(requests)]
        contexts = [rng.choice([0, 1, 900]) for _ in range(requests)]
        trees = [random_tree(rng, n) for n in counts] if tree else None
        rows = rng.sample(range(requests + 2), requests)
        batch, tokens, state, window = passed(layer, counts, contexts, rows, trees, seed, padding=rng.choice([0, 3]))
        before = state.clone(), window.clone()
        x, gate, beta = slices(tokens)
        found = verified(variant, layer, batch, (x, gate, beta), state, window)
        assert all(torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0)) for now, then in zip((state, window), before))
        compare(batch, found, wanted(layer, batch, tokens, state, window), 2e-6)


@needs_dsl
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_where_the_reference_rounds(dtype):
    variant = KdaVerifyVariant(str(dtype).removeprefix("torch."), 8, 16, True)
    rng = random.Random(1)
    layer, counts = layer_of(2, 1), [8, 5]
    trees = [random_tree(rng, n) for n in counts]
    batch, tokens, state, window = passed(layer, counts, [7, 0], [1, 0], trees, 1, dtype)
    found, want = (call(layer, batch, tokens, state, window) for call in (lambda *a: verified(variant, *a), wanted))
    # A sum of taps at the edge between two numbers may be rounded to either; otherwise nothing differs.
    last = 2**-8 if dtype == torch.bfloat16 else 2**-11
    compare(batch, found, want, last)
    assert ((found[0].double() - want[0].double()).abs() > 0.01 * last * want[0].abs().double()).float().mean() < 0.02


@needs_dsl
@pytest.mark.parametrize(("bias", "limit"), [(100.0, 1e-5), (-100.0, 2e-6)])
def test_strongest_and_no_decay(bias, limit):
    """32 nodes in a line: decays of exp(-160) beside neighbours of exp(-5), and none at all."""
    layer = layer_of(1, 3)
    layer.dt_bias.fill_(bias)
    counts = [32]
    batch, tokens, state, window = passed(layer, counts, [5], [0], [random_tree(random.Random(0), 32)], 3)
    batch.ancestor_masks = torch.tensor([(2 << t) - 1 for t in range(32)])
    found = verified(KdaVerifyVariant("float32", 32, 32, True), layer, batch, tokens, state, window)
    compare(batch, found, wanted(layer, batch, tokens, state, window), limit)


def test_lanes_meet():
    """The exchange leaves lane l of eight with the l-th eighth of all eight lanes' sums, as the other functions expect."""
    from tests.verify_kernels.cute.recurrence_on_cpu import exchanged

    for values in (16, 64):
        sums = np.random.default_rng(values).standard_normal((32, values))
        found, eighth = exchanged(sums), values // 8
        for lane in range(32):
            total = sums[lane // 8 * 8 : lane // 8 * 8 + 8].sum(0)
            assert np.allclose(found[lane], total[lane % 8 * eighth : (lane % 8 + 1) * eighth], rtol=0, atol=1e-12)


@needs_dsl
@pytest.mark.parametrize("nodes", [16, 32])
def test_commit_equals_the_reference(nodes):
    from tests.verify_kernels.cute.recurrence_on_cpu import commit

    for seed in range(4):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        layers, heads, requests = rng.choice([1, 3]), rng.choice([1, 2]), rng.choice([1, 3])
        channels, kept = 3 * heads * DIM, [rng.randint(0, nodes) for _ in range(requests)]
        contexts = torch.tensor([rng.choice([0, 44]) for _ in range(requests)])
        rows = torch.tensor(rng.sample(range(requests + 1), requests))
        state = torch.randn(layers, requests + 1, heads, DIM, DIM, generator=g)
        window = torch.randn(layers, requests + 1, 3, channels, generator=g)
        for row, context in zip(rows, contexts):
            if not context:
                state[:, row], window[:, row] = NAN, NAN
        path = torch.full((requests, max(*kept, 1)), -1)
        shape = (layers, requests, nodes, heads, DIM)
        inputs = torch.full((*shape[:3], channels), NAN)
        keys, log_decay, updates = (torch.full(shape, NAN) for _ in range(3))
        for r, n in enumerate(kept):
            nodes_of = sorted(rng.sample(range(nodes), n))
            path[r, :n] = torch.tensor(nodes_of)
            for node in nodes_of:
                inputs[:, r, node] = torch.randn(layers, channels, generator=g)
                keys[:, r, node] = torch.nn.functional.normalize(torch.randn(layers, heads, DIM, generator=g), dim=-1)
                log_decay[:, r, node] = BOUND * torch.rand(layers, heads, DIM, generator=g) ** rng.choice([1, 8])
                updates[:, r, node] = torch.randn(layers, heads, DIM, generator=g)
        want = state.double(), window.clone()
        records = [Records(*(t[i].double() for t in (inputs, keys, log_decay, updates))) for i in range(layers)]
        for r in records:
            r.inputs = r.inputs.float()
            for t in (r.keys, r.log_decay, r.updates, r.inputs):
                t.nan_to_num_(0.0)  # its sums go over what was not kept
        recurrence.commit_states(*want, records, rows, contexts, path)
        variant = KdaCommitVariant("float32", nodes)
        commit(variant, state, window, inputs, keys, log_decay, updates, rows, contexts, path)
        idle = ({*range(requests + 1)} - {*rows.tolist()}).pop()
        assert torch.equal(state[:, idle].double(), want[0][:, idle]) and torch.equal(window, want[1])
        near(state[:, rows], want[0][:, rows], 2e-6)


@needs_dsl
def test_gated_norm_equals_the_reference():
    from tests.verify_kernels.cute.recurrence_on_cpu import norm

    g = torch.Generator().manual_seed(0)
    x, wide = torch.randn(5, 2, DIM, generator=g), torch.randn(5, 2 * DIM + 6, generator=g)
    weight, out = torch.rand(DIM, generator=g), torch.full((5, 2, DIM), NAN)
    gate = wide[:, 2 : 2 * DIM + 2].view(5, 2, DIM)
    norm(GatedNormVariant("float32"), x, weight, gate, 1e-3, out)
    near(out, recurrence.gated_rms_norm(x.double(), weight.double(), gate.double(), 1e-3), 1e-6)


# --- as operations


@pytest.fixture
def served(monkeypatch):
    """The CUDA implementations with the kernels' functions on the CPU; the list of variants that ran."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from tests.verify_kernels.cute import recurrence_on_cpu as cpu

    calls: list = []

    def load(variant):
        def call(*arguments):
            calls.append((variant, arguments))
            if isinstance(variant, KdaVerifyVariant):
                return cpu.verify(variant, *arguments[:-1])
            return (cpu.commit if isinstance(variant, KdaCommitVariant) else cpu.norm)(variant, *arguments)

        return call

    monkeypatch.setattr(cute, "check_machine", lambda: None)
    monkeypatch.setattr(cute.kernels, "build", lambda variant, folder: variant)
    monkeypatch.setattr(cute.kernels, "load", load)
    found = cute.implementations(unmeasured=True)
    names = ("plan_recurrence", "kda_verify", "commit_states", "gated_rms_norm")
    monkeypatch.setattr(ops, "_loaded", {"cpu": ops._REFERENCE | {name: found[name] for name in names}})
    return calls


@needs_dsl
def test_events_leave_states_at_rounding(served, monkeypatch):
    """Accepted paths, rejected trees and aborted requests in any order, two layers, against the reference's float64; in
    float32, so that nothing is rounded to 16 bits, either way, in between."""
    monkeypatch.setattr(run, "_name", lambda dtype, what: str(dtype).removeprefix("torch."))
    rng = random.Random(8)
    layers = [layer_of(1, 9), layer_of(1, 10)]
    state, window = torch.full((2, 3, 1, DIM, DIM), NAN), torch.full((2, 3, 3, 3 * DIM), NAN)
    exact = state.double(), window.clone()
    contexts, worst = [0, 0, 0], 0.0
    for event in range(60):
        rows = rng.sample(range(3), rng.randint(1, 3))
        counts = [rng.randint(1, 8) for _ in rows]
        trees = [random_tree(rng, n) for n in counts] if event % 2 else None
        batch = make_pass(counts, [contexts[r] for r in rows], rows, trees)
        plan, plain = ops.plan_recurrence(batch, 4), recurrence.plan_recurrence(batch, 4)
        records: list[list[Records]] = [[], []]
        for i, layer in enumerate(layers):
            tokens = slices(layer.tokens(sum(counts), 1000 + 2 * event + i, torch.float32))
            y, kept = ops.kda_verify(*tokens, *layer.arguments(), state[i], window[i], plan)
            weights = (layer.conv.double(), layer.a_log.double(), layer.dt_bias.double(), BOUND)
            want, kept_too = recurrence.kda_verify(*tokens, *weights, exact[0][i], exact[1][i], plain)
            near(y, want, 5e-6)
            records[0].append(kept)
            records[1].append(kept_too)
        what = rng.random()
        if what < 0.1:  # the whole step is dropped: nothing was written
            continue
        paths = [
            [0] if what < 0.3 else line_of(trees[r], rng.randrange(n)) if trees else list(range(rng.randint(1, n)))
            for r, n in enumerate(counts)
        ]
        depth = max(map(len, paths))
        path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths])
        served.clear()
        ops.commit_states(state, window, records[0], batch.state_rows, batch.context_lens, path)
        assert len(served) == 1  # one launch for all layers
        recurrence.commit_states(*exact, records[1], batch.state_rows, batch.context_lens, path)
        for row, line in zip(rows, paths):
            contexts[row] += len(line)
        if what > 0.9:  # aborted: the row goes to a new request
            contexts[rng.choice(rows)] = 0
        live = [r for r in range(3) if contexts[r]]
        assert torch.equal(window[:, live], exact[1][:, live])
        scale = max(1.0, float(exact[0][:, live].abs().max())) if live else 1.0
        worst = max(worst, float((state[:, live] - exact[0][:, live]).abs().max()) / scale if live else 0.0)
    assert worst < 2e-6


@needs_dsl
def test_operations_take_slices_of_a_product_with_odd_rows(served):
    layer = layer_of(1, 4)
    batch, tokens, state, window = passed(layer, [3], [5], [0], None, 4, torch.bfloat16)
    odd = slices(tokens, even=False)
    assert odd[0].stride(0) % 2 and not odd[0].is_contiguous()
    plans = [ops.plan_recurrence(batch, 4) for _ in range(2)]
    found = [ops.kda_verify(*t, *layer.arguments(), state, window, p)[0] for t, p in zip((odd, tokens), plans)]
    assert torch.equal(*found)
    assert [call[1][-1] for call in served] == [1, 1]  # fresh tables
    ops.kda_verify(*tokens, *layer.arguments(), state, window, plans[0])
    assert served[-1][1][-1] == 0
    gate = odd[1].view(3, 1, DIM)
    want = recurrence.gated_rms_norm(found[0], torch.ones(DIM), gate, 1e-5)
    near(ops.gated_rms_norm(found[0], torch.ones(DIM), gate, 1e-5), want, 2**-7)


def test_committed_tokens_and_unsuitable_passes_go_the_reference_s_way(served):
    layer = layer_of(1, 4)
    batch = make_pass([3], [0], [0], speculative=False)
    plan = ops.plan_recurrence(batch, 4)
    state, window = torch.zeros(1, 1, DIM, DIM), torch.zeros(1, 3, 3 * DIM)
    ops.kda_prefill(*layer.tokens(3, 0, torch.float32), *layer.arguments(), state, window, plan)
    assert not served and state.abs().sum() > 0
    batch = make_pass([3], [0], [0])
    batch.first_query = 1
    with pytest.raises(ValueError, match="first_query: found 1, allowed: 0"):
        ops.plan_recurrence(batch, 4)
    with pytest.raises(KernelError, match="width: found 3, allowed: 4"):
        ops.plan_recurrence(make_pass([3], [0], [0]), 3)


# --- on the host


def test_records_of_layers_whose_states_lie_together_lie_together():
    plan = run.RecurrencePlan(make_pass([3, 2], [0, 4], [1, 0]))
    state = torch.zeros(3, 2, 1, DIM, DIM)
    found = [plan.records(state[i], 3 * DIM, torch.bfloat16) for i in range(3)]
    assert all(r.stack is found[0].stack for r in found) and [r.index for r in found] == [0, 1, 2]
    assert found[1].updates.shape == (2, 3, 1, DIM) and found[1].inputs.dtype == torch.bfloat16
    calls = []
    again = plan.records(state[0], 3 * DIM, torch.bfloat16)  # more layers than states: another stack
    window, rows = torch.zeros(4, 2, 3, 3 * DIM), torch.tensor([1, 0])
    states = torch.zeros(4, 2, 1, DIM, DIM)
    run.commit(lambda *a: calls.append(a), states, window, [*found, again], rows, torch.tensor([4, 4]), rows[:, None])
    assert [len(c[0]) for c in calls] == [3, 1] == [len(c[3]) for c in calls]
    assert calls[1][0].data_ptr() == states[3].data_ptr() and calls[1][3].data_ptr() == again.keys.data_ptr()


def test_columns_fill_the_multiprocessors_once():
    found = {(r, n): choose(torch.bfloat16, r, 6, n, True) for r in (1, 2, 4, 8, 32) for n in (8, 32)}
    assert {k: v.columns for k, v in found.items()} == {
        (1, 8): 8, (2, 8): 16, (4, 8): 32, (8, 8): 32, (32, 8): 64,
        (1, 32): 8, (2, 32): 16, (4, 32): 32, (8, 32): 32, (32, 32): 32,
    }  # fmt: skip
    assert [choose(torch.bfloat16, 1, 6, n, True).nodes for n in (1, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]
    assert [choose_commit(torch.bfloat16, n).nodes for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_lift_keeps_factors_within_float32():
    assert lift_of(16, -5.0) == 1.0 and lift_of(32, -5.0) == 2.0**111
    for nodes in range(1, 33):
        lift, least = lift_of(nodes, -5.0), np.exp(-5.0 * nodes)
        assert 1 / (lift * least) < 2.0**121 and lift <= 2.0**112 and lift * least > 2.0**-121
    with pytest.raises(KernelError, match="lower_bound: found -9.0, allowed with 32 nodes: -5.0"):
        lift_of(32, -9.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: choose(torch.float32, 1, 6, 8, True), "kda_verify: dtype: found torch.float32, allowed"),
        (lambda: choose(torch.bfloat16, 1, 6, 33, True), "nodes: found 33, allowed: 1 to 32"),
        (lambda: choose(torch.bfloat16, 1, 6, 8, True, dim=64), "head_dim: found 64, allowed: 128"),
        (lambda: choose(torch.bfloat16, 1, 6, 8, True, width=3), "conv_kernel: found 3, allowed: 4"),
        (lambda: choose_commit(torch.bfloat16, 40), "path: found 40 nodes, allowed: 1 to 32"),
        (lambda: choose_norm(torch.bfloat16, 64), "head_dim: found 64, allowed: 128"),
    ],
)
def test_errors_name_the_field(call, words):
    with pytest.raises(KernelError, match=re.escape(words)):
        call()


def test_not_served_until_measured():
    assert {"plan_recurrence", "kda_verify", "commit_states", "gated_rms_norm"} <= set(UNMEASURED)


# --- compiled

BUDGET = {  # variant: registers a thread, bytes of shared memory
    KdaVerifyVariant("bfloat16", 8, 8, True): (128, 24),
    KdaVerifyVariant("bfloat16", 16, 64, False): (168, 76),
    KdaVerifyVariant("bfloat16", 32, 32, True): (128, 102),
    KdaCommitVariant("bfloat16", 16): (128, None),
    GatedNormVariant("bfloat16"): (64, None),
}


@needs_dsl
@pytest.mark.parametrize("variant", BUDGET, ids=lambda v: v.name)
def test_compiles_without_spills(variant, tmp_path):
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert len(spills) == 2 and all(int(n) == 0 for n in spills), remarks
    registers, kilobytes = BUDGET[variant]
    assert int(re.search(r"Used (\d+) registers", remarks).group(1)) <= registers
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    assert ".local" not in text
    if kilobytes:
        from verify_kernels.cute.fake import DTYPES
        from verify_kernels.cute.recurrence.verify import KdaVerify

        shapes = KdaVerify(DTYPES["bfloat16"], variant.nodes, variant.columns, variant.tree).shared()
        assert sum(4 * rows * columns for _, rows, columns in shapes) <= 1024 * kilobytes
        # The state comes once, past the registers; what was fetched is waited for in groups.
        threads = 32 * KdaVerify(DTYPES["bfloat16"], variant.nodes, variant.columns, variant.tree).warps
        assert len(re.findall(r"cp\.async\.c[ag]", text)) == 1 + max(1, variant.columns * 32 // threads)
        assert len(re.findall(r"cp\.async\.commit", text)) == 2 and "mul.ftz" not in text and "fma.rn.ftz" not in text


def test_bench_builds_what_it_runs_and_predicts_above_the_floor():
    names = [v.name for v in all_variants()]
    assert len(names) == len(set(names))
    for shape in ((1, 1), (1, 8), (8, 16), (32, 32)):
        assert predicted_us(*shape) > floor_us(*shape)[0]
