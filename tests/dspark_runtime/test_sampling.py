from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import BatchState
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.acceptance import node_sampling
from dspark_runtime.errors import RequestError
from dspark_runtime.sampling import SamplingParams, SamplingState, logprobs_of, target_probs

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
INF = math.inf


def batch(histories: list[list[int]], prompt_lens: list[int]) -> BatchState:
    r, width = len(histories), max(map(len, histories)) + 2
    tokens = torch.full((r, width), 10**6)  # what lies beyond seq_lens must not matter
    for i, h in enumerate(histories):
        tokens[i, : len(h)] = torch.tensor(h)
    lens = torch.tensor([len(h) for h in histories])
    zeros = torch.zeros(r, dtype=torch.int64)
    return BatchState(
        tokens, lens, zeros[:, None].int(), zeros, torch.zeros(r), zeros, lens - torch.tensor(prompt_lens), width
    )


def distributions(logits, params, histories=None, prompt_lens=None, tree=None, stop_ids=None) -> torch.Tensor:
    """logits [R, n, V] -> probs [R, n, V], through shuffled rows with a row of nobody at each end."""
    r, n, vocab = logits.shape
    histories = histories or [[0]] * r
    prompt_lens = prompt_lens or [1] * r
    stop_ids = stop_ids or [()] * r
    tree = tree or DraftTree.from_spec(TreeSpec.chain(n - 1), torch.zeros(r, n, dtype=torch.int64))
    order = torch.randperm(r * n, generator=torch.Generator().manual_seed(0)) + 1
    flat = torch.full((r * n + 2, vocab), 3.0)
    flat[order] = logits.flatten(0, 1)
    before = flat.clone()
    rows = torch.where(tree.tokens >= 0, order.view(r, n), 0)
    state = SamplingState.build(params, prompt_lens, stop_ids, vocab, "cpu")
    probs = target_probs(flat, state, batch(histories, prompt_lens), tree, rows)
    assert torch.equal(flat, before)
    assert probs.dtype == torch.float32 and not probs.isnan().any()
    return probs[order].view(r, n, vocab)


def one(logits, history=None, prompt_len=1, stop_ids=(), **params) -> list[float]:
    x = torch.as_tensor(logits, dtype=torch.float32)[None, None]
    probs = distributions(x, [SamplingParams(**params)], [history or [0]], [prompt_len], stop_ids=[stop_ids])
    return probs[0, 0].tolist()


# --- reference: one node at a time, plain Python floats --------------------------------------------------------------


def reference(logits, params, prompt, output, stop_ids):
    x = [float(v) for v in logits]
    if len(output) < params.min_tokens:
        x = [-INF if i in stop_ids else v for i, v in enumerate(x)]
    for i, bias in (params.logit_bias or {}).items():
        x[i] += bias
    for i in range(len(x)):
        if i in prompt or i in output:
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        x[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty * (i in output)
    if params.temperature == 0:
        best = x.index(max(x))
        return [float(i == best) for i in range(len(x))]
    x = [v / params.temperature for v in x]
    top = max(x)
    weights = [math.exp(v - top) for v in x]
    weights = [w if w >= params.min_p * (1 - 1e-9) else 0.0 for w in weights]
    if 0 < params.top_k < len(x):
        kth = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    total = sum(weights)
    p = [w / total for w in weights]
    kept = [v if sum(w for w in p if w > v) < params.top_p else 0.0 for v in p]
    return [v / sum(kept) for v in kept]


@st.composite
def requests(draw, vocab: int, temperatures=(0.0, 0.5, 1.0, 1.7)):
    maybe = lambda off, *on: draw(st.sampled_from([off, off, *on]))  # noqa: E731
    params = SamplingParams(
        temperature=draw(st.sampled_from(temperatures)),
        top_k=maybe(0, -1, 1, 2, 3, vocab + 5),
        top_p=maybe(1.0, 0.33, 0.71),
        min_p=maybe(0.0, 0.13),
        presence_penalty=maybe(0.0, 0.7, -0.3),
        frequency_penalty=maybe(0.0, 0.61, -0.2),
        repetition_penalty=maybe(1.0, 1.3, 0.8),
        logit_bias=maybe(None, {0: -100.0}, {1: 2.5, 3: -1.25}),
        min_tokens=maybe(0, 2, 4),
    )
    prompt = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4))
    output = draw(st.lists(st.integers(0, vocab - 1), min_size=0, max_size=4))
    return params, prompt, output, maybe((), (2,), (1, 2))


@given(st.data(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_every_node_of_a_mixed_batch_equals_plain_decoding(data, seed):
    vocab, r = 5, data.draw(st.integers(1, 4))
    cases = [data.draw(requests(vocab)) for _ in range(r)]
    spec = data.draw(st.sampled_from([TreeSpec.chain(0), TreeSpec.chain(3), TreeSpec((-1, 0, 0, 1, 1, 2, 3))]))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (r, spec.num_nodes), generator=generator)
    tokens[:, 0] = torch.tensor([(prompt + output)[-1] for _, prompt, output, _ in cases])
    tree = DraftTree.from_spec(spec, tokens).limit(torch.randint(spec.depth + 1, (r,), generator=generator))
    logits = torch.randn(r, spec.num_nodes, vocab, generator=generator) * 2
    got = distributions(
        logits,
        [c[0] for c in cases],
        [c[1] + c[2] for c in cases],
        [len(c[1]) for c in cases],
        tree,
        [c[3] for c in cases],
    )
    for i, (params, prompt, output, stop_ids) in enumerate(cases):
        for j in range(tree.num_nodes[i]):
            path, node = [], j
            while node > 0:
                path.insert(0, tokens[i, node].item())
                node = spec.parents[node]
            want = reference(logits[i, j], params, prompt, output + path, stop_ids)
            assert got[i, j].tolist() == pytest.approx(want, abs=2e-6)


# --- known answers ---------------------------------------------------------------------------------------------------


def test_frequency_penalty_gives_the_known_greedy_stream_in_steps_and_in_one_block():
    want = [0, 0, 1, 0, 1, 0, 2, 1]
    logits, params = torch.tensor([5.0, 4.0, 3.0]), {"temperature": 0, "frequency_penalty": 0.6}
    output = []
    for _ in want:
        probs = one(logits, [2, *output], **params)
        output.append(probs.index(1.0))
    assert output == want
    # All eight in one pass: a chain whose drafts are right.
    tree = DraftTree.from_spec(TreeSpec.chain(7), torch.tensor([[2, *want[:-1]]]))
    probs = distributions(logits.expand(1, 8, 3), [SamplingParams(**params)], [[2]], [1], tree)
    assert probs[0].argmax(1).tolist() == want and probs.sum() == 8


def test_temperature_unset_is_one_and_never_greedy():
    assert SamplingParams().temperature == 1.0 and not SamplingParams(top_k=50).is_greedy
    assert one(P.log(), top_k=3) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])


def test_a_banned_token_is_emitted_at_no_slot():
    seeds = torch.arange(20_000)
    r, params = len(seeds), SamplingParams(logit_bias={0: -100})
    tree = DraftTree.from_spec(TreeSpec.chain(2), torch.tensor([[1, 0, 1]]).expand(r, 3))
    state = SamplingState.build([params] * r, [1] * r, [()] * r, 4, "cpu")
    rows = torch.arange(r * 3).view(r, 3)
    probs = target_probs(P.log().expand(r * 3, 4), state, batch([[1]] * r, [1] * r), tree, rows)
    assert (probs[:, 0] < 1e-40).all() and torch.allclose(probs[:, 1:], (P[1:] / 0.5).expand(r * 3, 3))
    got = node_sampling(tree, probs, rows, seeds, torch.zeros_like(seeds))
    assert not (got.tokens == 0).any()


def test_temperatures_mix_without_nan_and_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 1.0, 0.0], [-INF, 0.0, -INF]])[:, None].expand(2, 3, 3)
    for top_p in (1.0, 0.5):
        params = [SamplingParams(temperature=0, top_p=top_p, top_k=2, min_p=0.1), SamplingParams(top_p=top_p)]
        probs = distributions(logits, params)
        assert probs.tolist() == [[[1, 0, 0]] * 3, [[0, 1, 0]] * 3]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e4])
def test_extreme_temperatures_stay_finite(temperature):
    probs = one([50.0, 49.0, -INF, -1e30], temperature=temperature)
    assert sum(probs) == pytest.approx(1) and probs[2] == 0


def test_filters_keep_ties_whatever_the_order():
    assert one([1.0, 1.0, 1.0, 0.0], top_k=2) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert one([0.0, 0.0, 0.0, 0.0], top_p=0.3) == pytest.approx([0.25] * 4)
    assert one(P.log(), top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0])
    assert one(P.log(), top_p=0.01) == one(P.log(), top_p=1e-30) == [1, 0, 0, 0]
    assert one(P.log(), top_p=0.6, top_k=3) == pytest.approx([0.625, 0.375, 0, 0])
    assert one(P.log(), min_p=0.2) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert one(P.log(), min_p=1) == [1, 0, 0, 0]
    assert one(P.log(), top_k=99) == one(P.log(), top_k=-1) == pytest.approx(P.tolist())


def test_min_tokens_keeps_stop_ids_away_for_exactly_that_many_tokens():
    tree = DraftTree.from_spec(TreeSpec.chain(3), torch.tensor([[1, 1, 1, 1]]))
    logits = torch.zeros(1, 4, 3)
    probs = distributions(logits, [SamplingParams(min_tokens=3)], [[1, 1]], [1], tree, [(0, 2)])  # one token emitted
    assert probs[0].tolist() == [[0, 1, 0], [0, 1, 0], pytest.approx([1 / 3] * 3), pytest.approx([1 / 3] * 3)]


def test_the_same_row_has_the_same_distribution_in_any_batch():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 4, 50, generator=generator)
    params = [
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(min_p=0.05, top_p=0.9),
    ]
    histories = [[1, 2, 3], [4, 5], [6, 6, 6, 6]]
    together = distributions(logits, params, histories, [2, 1, 2])
    for i in range(3):
        alone = distributions(logits[i : i + 1], [params[i]], [histories[i]], [[2, 1, 2][i]])
        assert torch.equal(alone[0], together[i])


def test_host_facts_say_what_can_be_skipped():
    def state(*params, stop_ids=(1,)):
        return SamplingState.build(params, [1] * len(params), [stop_ids] * len(params), 10, "cpu")

    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    assert state(greedy, greedy).all_greedy and not state(greedy).any_filter
    assert not state(greedy, SamplingParams()).all_greedy
    for name, value in (
        ("presence_penalty", 1), ("frequency_penalty", 1), ("repetition_penalty", 1.1), ("logit_bias", {3: 1}),
        ("min_tokens", 2),
    ):  # fmt: skip
        assert not state(greedy, SamplingParams(temperature=0, **{name: value})).all_greedy
    assert state(SamplingParams(temperature=0, min_tokens=2), stop_ids=()).all_greedy
    plain = state(SamplingParams(), SamplingParams(top_k=10))
    assert not (plain.any_penalty or plain.any_bias or plain.any_filter or plain.any_min_tokens or plain.any_greedy)
    assert state(SamplingParams(temperature=1e-6)).all_greedy


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(1)) * 4
    ids = torch.tensor([0, 8, 3, 3, 1, 5])
    chosen, best_ids, best = logprobs_of(logits, ids, 3)
    for i in range(6):
        total = math.log(sum(math.exp(v) for v in logits[i].double().tolist()))
        want = [v - total for v in logits[i].double().tolist()]
        assert chosen[i].item() == pytest.approx(want[ids[i]], abs=1e-5)
        order = sorted(range(9), key=lambda t: -want[t])[:3]
        assert best_ids[i].tolist() == order
        assert best[i].tolist() == pytest.approx([want[t] for t in order], abs=1e-5)
    assert logprobs_of(logits, ids, 0)[1].shape == (6, 0)


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", "hot", "finite"),
        ("temperature", None, "finite"),
        ("top_k", -2, "0 or -1 for off"),
        ("top_k", 1.5, "integer"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.1, r"\(0, 1\]"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("repetition_penalty", 0, "> 0"),
        ("logit_bias", {-1: 0.0}, "token ids >= 0"),
        ("logit_bias", {"5": 0.0}, "token ids >= 0"),
        ("logit_bias", {5: INF}, r"\[-100, 100\]"),
        ("min_tokens", -1, "from 0 to max_tokens"),
        ("min_tokens", 17, r"max_tokens \(16\)"),
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", True, ">= 1"),
        ("stop", ("",), "not empty"),
        ("stop_token_ids", (-1,), ">= 0"),
        ("ignore_eos", 1, "true or false"),
        ("logprobs", -1, ">= 0"),
        ("seed", 2**63, "64-bit"),
        ("seed", 1.0, "64-bit"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value, allowed):
    with pytest.raises(RequestError, match=rf"^{field}.*: found .*, allowed: .*{allowed}"):
        SamplingParams(**{field: value})


def test_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={63: 1}, stop_token_ids=[63], logprobs=64).validate(64)
    for params, message in (
        ({"logit_bias": {64: 1}}, "logit_bias: found 64, allowed: token ids from 0 to 63"),
        ({"stop_token_ids": [64]}, "stop_token_ids: found 64, allowed: token ids from 0 to 63"),
        ({"logprobs": 65}, "logprobs: found 65, allowed: at most the vocabulary, 64"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**params).validate(64)


def test_lists_and_single_strings_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])
    assert params.stop == ("END",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


def test_parameters_are_read_without_torch():
    code = "import sys, dspark_runtime.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "field,value",
    [("stop", 5), ("stop_token_ids", 5), ("logit_bias", [1, 2]), ("temperature", 1e300), ("repetition_penalty", 1e-300)],
)
def test_values_of_the_wrong_kind_or_size_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field}: found"):
        SamplingParams(**{field: value})
