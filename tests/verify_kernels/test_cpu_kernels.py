"""Compiled CPU operations against float64, and against themselves: a row's result depends on the row alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from verify_kernels import cpu
from verify_kernels.batch import PassBatch
from verify_kernels.reference import attention as reference_attention, linear as ref_linear, moe as reference_moe

if not cpu._state()[0]:
    pytest.skip(cpu.status(), allow_module_level=True)

from verify_kernels.cpu import attention, build, elementwise, linear, moe  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
NAN = float("nan")


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 product and how far a float32 sum, rounded once, may be from it."""
    exact = x.double() @ weight.double().T
    sums = x.double().abs() @ weight.double().abs().T
    return exact, exact.abs() * ROUNDING[x.dtype] + sums * x.shape[1] * 2.0**-24 + 1e-30


# Products


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70), n=st.integers(1, 90), k=st.integers(1, 130), dtype=st.sampled_from(DTYPES),
    bias=st.booleans(), threads=st.integers(1, 2), seed=st.integers(0, 1000),
)  # fmt: skip
def test_linear_is_within_one_rounding(tokens, n, k, dtype, bias, threads, seed):
    x, w = randn(tokens, k, seed=seed, dtype=dtype), randn(n, k, seed=seed + 1, dtype=dtype)
    b = randn(n, seed=seed + 2, dtype=dtype) if bias else None
    with_threads(threads)
    y = linear.linear(x, w, b)
    exact, bound = exact_product(x, w)
    if bias:
        exact += b.double()
        bound += exact.abs() * ROUNDING[dtype] + b.double().abs() * 2.0**-23
    assert y.dtype == dtype and y.shape == (tokens, n)
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (40, 1536), (33, 2000), (5, 17), (24, 771)])
def test_a_row_does_not_know_its_company(n, k, dtype):
    x, w = randn(67, k, seed=1, dtype=dtype), randn(n, k, seed=2, dtype=dtype)
    with_threads(1)
    alone = torch.cat([linear.linear(row[None], w) for row in x])
    for threads in (1, 2):
        with_threads(threads)
        for tokens in (1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 67):
            assert torch.equal(linear.linear(x[:tokens], w), alone[:tokens])
            assert torch.equal(linear.linear(x[67 - tokens :], w), alone[67 - tokens :])
    # Nor does a column.
    assert torch.equal(linear.linear(x[:9], w[n // 2 :]), alone[:9, n // 2 :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_sums_of_small_integers_are_exact(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (11, 301), generator=g).to(dtype)
    w = torch.randint(-3, 4, (29, 301), generator=g).to(dtype)
    assert torch.equal(linear.linear(x, w), (x.double() @ w.double().T).to(dtype))
    assert torch.equal(linear.logits(x, w), (x.double() @ w.double().T).to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_operands(dtype):
    wide_x, wide_w = randn(5, 200, seed=1, dtype=dtype), randn(20, 200, seed=2, dtype=dtype)
    want = linear.linear(wide_x[:, 30:130].contiguous(), wide_w[:, 50:150].contiguous())
    assert torch.equal(linear.linear(wide_x[:, 30:130], wide_w[:, 50:150]), want)
    assert torch.equal(linear.linear(wide_x[:, 30:130].T.contiguous().T, wide_w[:, 50:150].T.contiguous().T), want)


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weight: found \(3, 9\)"):
        linear.linear(x, torch.zeros(3, 9, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"bias: found \(4,\)"):
        linear.linear(x, torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))


def test_other_dtypes_and_recorded_calls_run_the_reference():
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    assert torch.equal(linear.linear(x, w), ref_linear.linear(x, w))
    x = torch.randn(3, 8, requires_grad=True)
    linear.linear(x, torch.ones(4, 8)).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 8), 4.0))
    assert elementwise.rms_norm(x, torch.ones(8), 1e-6).requires_grad


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20), vocab=st.integers(1, 700), k=st.integers(1, 40), dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2), levels=st.integers(1, 3), seed=st.integers(0, 1000),
)  # fmt: skip
def test_greedy_is_the_first_maximum_of_logits(tokens, vocab, k, dtype, threads, levels, seed):
    g = torch.Generator().manual_seed(seed)  # few distinct values: many ties
    x = torch.randint(-levels, levels + 1, (tokens, k), generator=g).to(dtype)
    w = torch.randint(-levels, levels + 1, (vocab, k), generator=g).to(dtype)
    with_threads(threads)
    all_logits = linear.logits(x, w)
    ids, best = linear.greedy_logits(x, w)
    want = [min(i for i in range(vocab) if row[i] == max(row)) for row in all_logits.tolist()]
    assert ids.tolist() == want
    assert torch.equal(best, all_logits.gather(1, ids[:, None])[:, 0])
    assert torch.equal(all_logits, linear.linear(x, w).float())


def test_greedy_on_values_that_rounding_makes_equal():
    # 1 and 1 + 2^-9 are one bfloat16: the lower id wins although its float32 sum is smaller.
    x = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    w = torch.zeros(300, 2, dtype=torch.bfloat16)
    w[70], w[200] = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert linear.greedy_logits(x, w)[0].tolist() == [70]


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_reports_nan_and_infinities(dtype):
    with_threads(2)
    x = torch.ones(4, 16, dtype=dtype)
    x[1, 3] = NAN
    w = randn(5000, 16, seed=0, dtype=dtype)
    ids, best = linear.greedy_logits(x, w)
    assert best.isnan().tolist() == [False, True, False, False] and ids[1] == 0
    x[1, 3] = 1.0
    w[1234, 0], w[4321, 0] = NAN, NAN
    ids, best = linear.greedy_logits(x, w)
    assert ids.tolist() == [1234] * 4 and best.isnan().all()
    ids, best = linear.greedy_logits(x, torch.full((50, 16), float("-inf"), dtype=dtype))
    assert ids.tolist() == [0] * 4 and bool((best == float("-inf")).all())


# Elementwise


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), h=st.integers(1, 100), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_norms_and_gate_within_their_roundings(rows, h, dtype, seed):
    x, y = randn(rows, h, seed=seed, dtype=dtype), randn(rows, h, seed=seed + 1, dtype=dtype)
    w = randn(h, seed=seed + 2, dtype=dtype)
    tolerance = ROUNDING[dtype] + 1e-6

    def norm(v: Tensor) -> Tensor:
        v = v.double()
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()

    assert close(elementwise.rms_norm(x, w, 1e-5), norm(x), tolerance)
    out, total = elementwise.add_rms_norm(x, y, w, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(out, elementwise.rms_norm(total, w, 1e-5))
    assert torch.equal(elementwise.rms_norm(x, w, 1e-5)[-1:], elementwise.rms_norm(x[-1:], w, 1e-5))
    both = torch.cat([x, y], 1)
    silu = torch.nn.functional.silu(x.double())
    # Two roundings: silu(gate), then the product.
    assert close(elementwise.silu_and_mul(both), silu * y.double(), 2 * ROUNDING[dtype] + 1e-6)


def close(found: Tensor, exact: Tensor, relative: float) -> bool:
    return bool(((found.double() - exact).abs() <= exact.abs() * relative + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_at_the_ends(dtype):
    gate = torch.tensor([-1e4, -100.0, -90.0, -88.0, -1e-3, 0.0, 90.0, 1e4, float("inf"), NAN], dtype=dtype)
    found = elementwise.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0].double()
    want = torch.nn.functional.silu(gate.double())
    assert torch.allclose(found, want, rtol=2.0**-8, atol=1e-36, equal_nan=True)


def test_experts_meet_only_their_tokens():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 40, generator=g).bfloat16()
    gate_up, down = torch.randn(6, 48, 40, generator=g).bfloat16(), torch.randn(6, 40, 24, generator=g).bfloat16()
    weights, ids = reference_moe.moe_route(torch.randn(9, 6, generator=g), 2, True)
    gate_up[5], ids[ids == 5] = NAN, 0  # nobody picks expert 5 (some may pick 0 twice)
    found = moe.moe_experts(x, gate_up, down, weights, ids)
    exact = torch.zeros(9, 40, dtype=torch.float64)
    for t in range(9):
        for i in range(2):
            e = int(ids[t, i])
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            exact[t] += float(weights[t, i]) * (down[e].double() @ (torch.nn.functional.silu(gate) * up))
    # Three bfloat16 roundings before the last product: compare norms, not single elements near zero.
    assert float((found.double() - exact).norm() / exact.norm()) < 2 * ROUNDING[torch.bfloat16]
    for t in range(9):
        one = slice(t, t + 1)
        assert torch.equal(moe.moe_experts(x[one], gate_up, down, weights[one], ids[one]), found[one])


def random_batch(
    g: torch.Generator, page: int, counts: list[int], contexts: list[int], masks: str
) -> tuple[PassBatch, int]:
    """A ragged pass: pages in random order, siblings in random trees. Returns the batch and the number of pages."""
    requests, n = len(counts), sum(counts)
    need = [-(-(c + q) // page) for c, q in zip(contexts, counts)]
    width = max(need) + int(torch.randint(0, 3, (), generator=g))
    order = (torch.randperm(sum(need), generator=g) + 1).tolist()
    table = torch.zeros(requests, width, dtype=torch.int32)
    slots, positions, words = [], [], []
    for r in range(requests):
        mine = [order.pop() for _ in range(need[r])]
        table[r, : need[r]] = torch.tensor(mine, dtype=torch.int32)
        slots += [mine[(contexts[r] + j) // page] * page + (contexts[r] + j) % page for j in range(counts[r])]
        seen: list[int] = []
        for j in range(counts[r]):
            parent = -1 if j == 0 else int(torch.randint(0, j, (), generator=g))
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << j)
            depth = seen[j].bit_count() - 1
            positions.append(contexts[r] + (depth if masks == "tree" else j))
        words += [m - (1 << 64) if m >= 1 << 63 else m for m in seen]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    batch = PassBatch(
        torch.zeros(n, dtype=torch.int64), torch.tensor(positions), offsets, torch.tensor(contexts, dtype=torch.int32),
        table, torch.tensor(slots), torch.tensor(words) if masks == "tree" else None, max(counts),
        max(c + q for c, q in zip(contexts, counts)),
    )  # fmt: skip
    return batch, sum(need) + 1


def exact_attention(q, k_pages, v_pages, batch, scale, mask, softcap, window) -> Tensor:
    """One query and one key at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    page, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    offsets = batch.request_offsets.tolist()
    for r, context in enumerate(batch.context_lens.tolist()):
        at = [
            int(batch.page_table[r, j // page]) * page + j % page for j in range(context + offsets[r + 1] - offsets[r])
        ]
        keys = k_pages.reshape(-1, *k_pages.shape[2:])[at].double().repeat_interleave(group, 1)
        values = v_pages.reshape(-1, *v_pages.shape[2:])[at].double().repeat_interleave(group, 1)
        for row in range(offsets[r], offsets[r + 1]):
            i = row - offsets[r]
            see = []
            for j in range(len(at)):
                fresh = j - context
                if fresh >= 0:
                    if mask == "tree" and batch.ancestor_masks is not None:
                        if not int(batch.ancestor_masks[row]) >> fresh & 1:
                            continue
                    elif mask != "full" and fresh > i:
                        continue
                where = j if fresh < 0 else int(batch.positions[offsets[r] + fresh])
                if window and int(batch.positions[row]) - where >= window:
                    continue
                see.append(j)
            if see:
                scores = (keys[see] * q[row].double()).sum(-1) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row] = (scores.softmax(0)[..., None] * values[see]).sum(0)
    return out


def attention_case(seed: int):
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(0, len(options), (), generator=g))]

    masks = pick("tree", "tree", "chain")
    most = 64 if masks == "tree" else 80
    counts = [pick(1, 2, 3, 5, 8, 17, most) for _ in range(pick(1, 1, 2, 3))]
    page = pick(1, 4, 7, 16)
    contexts = [pick(0, 1, page - 1, page, page + 1, 31, 32, 33, 100) for _ in counts]
    batch, pages = random_batch(g, page, counts, contexts, masks)
    kv_heads, group, dim = pick(1, 2, 3), pick(1, 2, 3, 5), pick(16, 20, 64, 80)
    return g, pick, batch, pages, page, kv_heads, group, dim


@pytest.mark.parametrize("block", range(10))
def test_attention_against_float64(block):
    for seed in range(block * 22, block * 22 + 22):
        g, pick, batch, pages, page, kv_heads, group, dim = attention_case(seed)
        dtype = pick(*DTYPES)
        with_threads(pick(1, 1, 2))
        n = batch.num_tokens
        q = torch.randn(n, kv_heads * group, dim, generator=g).to(dtype)
        k = torch.randn(pages, page, kv_heads, dim, generator=g).to(dtype)
        v = torch.randn(pages, page, kv_heads, dim, generator=g).to(dtype)
        # Everything that no request owns is poisoned.
        owned = torch.zeros(pages * page, dtype=torch.bool)
        offsets = batch.request_offsets.tolist()
        for r, context in enumerate(batch.context_lens.tolist()):
            for j in range(context + offsets[r + 1] - offsets[r]):
                owned[int(batch.page_table[r, j // page]) * page + j % page] = True
        k.view(-1, kv_heads, dim)[~owned] = NAN
        v.view(-1, kv_heads, dim)[~owned] = NAN
        mask, softcap, window = pick("tree", "tree", "causal", "full"), pick(0.0, 0.0, 5.0), pick(0, 0, 1, 7, 40)
        if pick(True, False):
            batch.plan = attention.plan_attention(batch, page, mask=mask, window=window)
        settings_ = dict(scale=dim**-0.5, mask=mask, softcap=softcap, window=window)
        found = attention.paged_tree_attention(q, k, v, batch, **settings_)
        want = exact_attention(q, k, v, batch, *settings_.values())
        bound = ROUNDING[dtype] * want.abs() + 3e-6
        assert found.dtype == dtype
        assert bool(((found.double() - want).abs() <= bound).all()), (seed, settings_)


def test_attention_hides_nan_of_nodes_that_are_not_ancestors():
    g = torch.Generator().manual_seed(0)
    batch, pages = random_batch(g, 16, [9], [20], "tree")
    q = torch.randn(9, 4, 64, generator=g).bfloat16()
    k, v = (torch.randn(pages, 16, 2, 64, generator=g).bfloat16() for _ in range(2))
    clean = attention.paged_tree_attention(q, k, v, batch, scale=0.125)
    for t in (k, v):
        t.view(-1, 2, 64)[batch.slot_mapping[5]] = NAN
    found = attention.paged_tree_attention(q, k, v, batch, scale=0.125)
    hit = [bool(int(m) >> 5 & 1) for m in batch.ancestor_masks]
    for row in range(9):
        assert bool(found[row].isnan().all()) if hit[row] else torch.equal(found[row], clean[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [0, 5, 30, 61, 300])
def test_attention_in_a_tree_equals_plain_decoding_bit_for_bit(context, dtype):
    g = torch.Generator().manual_seed(context)
    page, kv_heads, heads, dim, nodes = 16, 3, 9, 64, 33
    batch, pages = random_batch(g, page, [nodes], [context], "tree")
    q = torch.randn(nodes, heads, dim, generator=g).to(dtype)
    k, v = (torch.randn(pages, page, kv_heads, dim, generator=g).to(dtype) for _ in range(2))
    for threads in (1, 2):
        with_threads(threads)
        tree = attention.paged_tree_attention(q, k, v, batch, scale=0.125)
        for node in (0, 7, nodes - 1):
            path = [j for j in range(nodes) if int(batch.ancestor_masks[node]) >> j & 1]
            # The same keys, side by side in a cache of their own, with the node as the only new token.
            logical = list(range(context)) + [context + j for j in path]
            slots = [int(batch.page_table[0, j // page]) * page + j % page for j in logical]
            size = -(-len(logical) // page)
            plain_k, plain_v = (torch.full((size + 1, page, kv_heads, dim), NAN, dtype=dtype) for _ in range(2))
            plain_k.view(-1, kv_heads, dim)[page : page + len(slots)] = k.view(-1, kv_heads, dim)[slots]
            plain_v.view(-1, kv_heads, dim)[page : page + len(slots)] = v.view(-1, kv_heads, dim)[slots]
            last = len(logical) - 1
            alone = PassBatch(
                torch.zeros(1, dtype=torch.int64), torch.tensor([last]), torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([last], dtype=torch.int32), torch.arange(1, size + 1, dtype=torch.int32)[None],
                torch.tensor([page + last]), None, 1, last + 1,
            )  # fmt: skip
            found = attention.paged_tree_attention(q[node : node + 1], plain_k, plain_v, alone, scale=0.125)
            assert torch.equal(found[0], tree[node])


def test_attention_refuses_what_it_cannot_read():
    batch, pages = random_batch(torch.Generator().manual_seed(0), 16, [2], [20], "tree")
    q, kv = torch.zeros(2, 4, 16), torch.zeros(pages, 16, 2, 16)
    with pytest.raises(ValueError, match="mask: found 'diagonal'"):
        attention.plan_attention(batch, 16, mask="diagonal")
    with pytest.raises(ValueError, match="q: found"):
        attention.paged_tree_attention(torch.zeros(2, 5, 16), kv, kv, batch, scale=1.0)
    batch.page_table[0, 1] = pages
    with pytest.raises(IndexError, match="page_table"):
        attention.paged_tree_attention(q, kv, kv, batch, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_append_kv_writes_slots_and_rotates(dtype, norms):
    g = torch.Generator().manual_seed(3)
    batch, pages = random_batch(g, 4, [3, 6], [2, 9], "tree")
    heads, kv_heads, dim = 6, 2, 20
    qkv = torch.randn(9, (heads + 2 * kv_heads) * dim, generator=g).to(dtype)
    q, k, v = (
        t.view(9, -1, dim) for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )  # fmt: skip
    angles = torch.rand(40, dim // 2, generator=g) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    weights = [torch.rand(dim, generator=g).to(dtype) for _ in range(2)] if norms else [None, None]
    found = [torch.full((pages, 4, kv_heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    want = [t.clone() for t in found]
    q_found = elementwise.append_kv(q, k, v, *found, batch, cos_sin, *weights, eps=1e-5)
    q_want = reference_attention.append_kv(q, k, v, *want, batch, cos_sin, *weights, eps=1e-5)
    assert torch.equal(found[1], want[1])
    scale = 2 * ROUNDING[dtype] if norms else ROUNDING[dtype]  # a norm that rounds the other way, then the rotation
    for a, b in ((q_found, q_want), (found[0], want[0])):
        assert a.dtype == dtype and torch.allclose(a.float(), b.float(), rtol=scale, atol=2 * scale)
    batch.slot_mapping[0] = pages * 4
    with pytest.raises(IndexError, match="append_kv"):
        elementwise.append_kv(q, k, v, *found, batch, cos_sin)


# Building


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


REPORT = "from verify_kernels import cpu, ops; print(sorted(cpu.implementations())); print(cpu.status())"


def test_without_a_compiler_everything_still_runs(tmp_path):
    text = run_python(REPORT, CXX="no-such-compiler", DSPARK_CACHE=str(tmp_path))
    assert text.startswith("[]\n") and "no C++ compiler found (looked for no-such-compiler)" in text


def test_a_failing_build_says_why(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x: error: no" >&2\nexit 1\n')
    compiler.chmod(0o755)
    text = run_python(REPORT, CXX=str(compiler), DSPARK_CACHE=str(tmp_path))
    assert text.startswith("[]\n") and "failed: x: error: no" in text


def test_two_processes_build_at_once(tmp_path):
    compiler = tmp_path / "slow"  # hands out this process's library after a while: both are at it together
    compiler.write_text(f'''#!/bin/sh
[ "$1" = --version ] && exit 0
sleep 1
while [ "$1" != -o ]; do shift; done
cp "{build.library()._name}" "$2"
''')
    compiler.chmod(0o755)
    env = {**os.environ, "DSPARK_CACHE": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-c", REPORT]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "'paged_tree_attention'" in text and "compiled" in text
    assert len(list((tmp_path / "cpu-kernels").iterdir())) == 1


def test_switched_off():
    assert run_python(REPORT, DSPARK_CPU_KERNELS="0").startswith("[]\nCPU kernels: off (DSPARK_CPU_KERNELS=0)")


def with_threads(count: int) -> None:
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def _restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
