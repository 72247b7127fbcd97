"""Forced expert choices: each law by exact enumeration, passes of a model under it, and what files may hold."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dspark_runtime import forced_routing
from dspark_runtime.cost.routing import inclusion
from dspark_runtime.errors import ConfigError
from dspark_runtime.forced_routing import Independent, Recorded, Trace, load_trace, split, systematic
from dspark_runtime.models.config import ModelConfig
from dspark_runtime.models.transformer import Transformer
from dspark_runtime.weights import DummyTensors
from tests.dspark_runtime.passes import Pages

CPU = torch.device("cpu")
MOE = ModelConfig(
    architecture="qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6, max_position_embeddings=256,
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=(1,),
)  # fmt: skip


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(5, 2, 3), (4, 3, 2), (6, 1, 4), (4, 4, 2)])
def test_expected_number_under_the_uniform_law_by_enumeration(experts: int, top_k: int, tokens: int) -> None:
    sets = list(itertools.combinations(range(experts), top_k))
    passes = list(itertools.product(sets, repeat=tokens))
    mean = Fraction(sum(len(set().union(*p)) for p in passes), len(passes))
    law = Independent("uniform", 0.0, 1, experts, top_k, 0, CPU)
    assert law.expected([tokens]) == pytest.approx(float(mean), abs=1e-12)
    assert law.expected([1] * tokens) == law.expected([tokens])  # tokens are independent, whoever's they are


@pytest.mark.parametrize(("experts", "top_k", "exponent"), [(5, 2, 1.0), (6, 3, 0.7), (4, 2, 3.0)])
def test_systematic_draws_have_the_stated_chances(experts: int, top_k: int, exponent: float) -> None:
    """Over every order of the experts and every interval of the offset, exactly; then the expected number, from it."""
    chances = [Fraction(p).limit_denominator(10**9) for p in inclusion(experts, top_k, exponent)]
    chances[-1] += top_k - sum(chances)
    law: Counter[frozenset[int]] = Counter()
    orders = list(itertools.permutations(range(experts)))
    for order in orders:
        ends = list(itertools.accumulate(chances[i] for i in order))
        cuts = sorted({Fraction(0), Fraction(1), *((1 - e % 1) % 1 for e in ends)})
        for low, high in zip(cuts, cuts[1:]):
            u = (low + high) / 2
            steps = [0, *(int(e + u) for e in ends)]
            picked = frozenset(i for i, a, b in zip(order, steps, steps[1:]) if b > a)
            assert len(picked) == top_k
            law[picked] += (high - low) / len(orders)
    for i, chance in enumerate(chances):
        assert sum(p for picked, p in law.items() if i in picked) == chance
    mean = sum(p * q * len(a | b) for a, p in law.items() for b, q in law.items())
    made = Independent(f"zipf:{exponent}", exponent, 1, experts, top_k, 0, CPU)
    assert made.expected([2]) == pytest.approx(float(mean), abs=1e-7)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 2.0])
def test_drawn_lines_follow_their_law(exponent: float) -> None:
    experts, top_k, tokens = 24, 4, 40000
    chances = np.array(inclusion(experts, top_k, exponent))
    drawn = systematic(chances, tokens, np.random.default_rng(1))
    assert all(len(set(row)) == top_k for row in drawn.tolist())
    share = np.bincount(drawn.ravel(), minlength=experts) / tokens
    assert (np.abs(share - chances) < 5 * np.sqrt(chances * (1 - chances) / tokens) + 1e-9).all()


def batch(model, counts: list[int]):
    pages = Pages(model, len(counts), 64, 8)
    tokens = [[(7 * r + i) % 64 for i in range(n)] for r, n in enumerate(counts)]
    return pages.batch(list(range(len(counts))), [0] * len(counts), tokens), pages.cache


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(MOE, DummyTensors(MOE, 0, torch.float32, "cpu"), name="moe", dtype=torch.float32, device="cpu")


def test_a_pass_meets_the_law_and_every_layer_its_own(model: Transformer) -> None:
    model.routing = forced_routing.make("uniform", MOE, 3, CPU)
    seen = []
    for _ in range(300):
        passed, cache = batch(model, [4])
        model.forward(passed, cache)
        assert [tuple(ids.shape) for ids in passed.experts] == [(4, 3)] * 2
        seen.append([len(ids.unique()) for ids in passed.experts])
    model.routing = None
    counts = np.array(seen)
    expected = 8 * (1 - (5 / 8) ** 4)
    assert abs(counts.mean() - expected) < 5 * counts.std() / counts.size**0.5
    assert np.corrcoef(counts.T)[0, 1] < 0.25  # layers are drawn apart
    free, cache = batch(model, [4])
    model.forward(free, cache)
    assert len(free.experts) == 2


def test_the_seed_decides(model: Transformer) -> None:
    passes = [batch(model, [5])[0] for _ in range(3)]
    laws = [forced_routing.make("zipf:1", MOE, seed, CPU) for seed in (4, 4, 5)]
    drawn = [[law(p) for p in passes] for law in laws]
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1]))
    assert not torch.equal(torch.cat(drawn[0]), torch.cat(drawn[2]))
    assert not torch.equal(drawn[0][0], drawn[0][1])  # and passes differ


def trace_of(lengths: list[int], experts: int = 6, top_k: int = 2, layers: int = 2) -> Trace:
    draw = np.random.default_rng(0)
    n = sum(lengths)
    ids = draw.random((n, layers, experts)).argsort(-1)[..., :top_k].astype(np.int16)
    return Trace(ids, np.cumsum([0, *lengths]), experts)


def test_recorded_stretches_stay_within_a_text_and_the_expected_number_is_their_mean(model: Transformer) -> None:
    trace = trace_of([5, 2, 7])
    law = Recorded("trace:t", trace, 0, CPU)
    assert trace.starts(4).tolist() == [0, 1, 7, 8, 9, 10]
    assert trace.starts(8).tolist() == list(range(14))  # none is that long: any place, over the ends
    met = Counter()
    for _ in range(400):
        passed, _ = batch(model, [3, 4])
        drawn = law(passed)
        assert drawn.shape == (2, 7, 2) and drawn[0].is_contiguous()
        for a, b in ((0, 3), (3, 7)):
            found = [s for s in trace.starts(4) if (trace.experts[s : s + b - a] == drawn[:, a:b].transpose(0, 1).numpy()).all()]
            assert found
            met[(a, found[0])] += 1
    assert len(met) == 12  # both requests begin everywhere
    starts = trace.starts(4)
    wanted = np.mean([
        len(set(trace.experts[s : s + 3, layer].ravel()) | set(trace.experts[t : t + 4, layer].ravel()))
        for s in starts for t in starts for layer in range(2)
    ])  # fmt: skip
    assert law.expected([3, 4]) == pytest.approx(wanted, abs=1e-12)


def test_a_trace_file_comes_back(tmp_path) -> None:
    trace = trace_of([3, 4])
    trace.save(tmp_path / "t.safetensors", {"target": "x"})
    again = load_trace(tmp_path / "t.safetensors")
    assert (again.experts == trace.experts).all() and (again.offsets == trace.offsets).all() and again.num_experts == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(format="x"), "format: found 'x', allowed: 'dspark routing 1'"),
        (dict(num_experts="many"), "num_experts: found 'many', allowed: an integer"),
        (dict(num_experts="3"), "experts: found 0 to 5, allowed: 0 to 2"),
        (dict(experts=np.zeros((7, 2), np.int16)), r"experts: found shape \[7, 2\], allowed: \[tokens, layers, top_k\]"),
        (dict(sequence_offsets=np.array([0, 9])), r"sequence_offsets: found \[0, 9\], allowed: growing, from 0 to 7"),
        (dict(other=np.zeros(1)), "found .*'other'.*, allowed: experts, sequence_offsets"),
    ],
)
def test_broken_traces_are_one_line(tmp_path, change, words) -> None:
    trace = trace_of([3, 4])
    arrays = {"experts": trace.experts, "sequence_offsets": trace.offsets}
    about = {"format": "dspark routing 1", "num_experts": "6"}
    for name, value in change.items():
        (about if isinstance(value, str) else arrays)[name] = value
    save_file(arrays, tmp_path / "t.safetensors", about)
    with pytest.raises(ConfigError, match=words):
        load_trace(tmp_path / "t.safetensors")


def test_errors_name_the_field(tmp_path) -> None:
    for text in ("unifrom", "zipf", "zipf:x", "uniform:1", "trace:"):
        with pytest.raises(ConfigError, match=f"routing: found '{text}', allowed: uniform, zipf:EXPONENT"):
            split(text)
    with pytest.raises(ConfigError, match="allowed: zipf exponents from 0 to 10"):
        split("zipf:-1")
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        split("trace:nowhere")
    dense = MOE.model_copy(update=dict(architecture="qwen3"))
    with pytest.raises(ConfigError, match="routing: found 'uniform' for a target without experts"):
        forced_routing.make("uniform", dense, 0, CPU)
    trace_of([3]).save(tmp_path / "t.safetensors", {})
    with pytest.raises(ConfigError, match="found 2 layers of 2 of 6 experts, allowed: 2 layers of 3 of 8 experts"):
        forced_routing.make(f"trace:{tmp_path}/t.safetensors", MOE, 0, CPU)
