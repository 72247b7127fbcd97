from __future__ import annotations

import json
import math

import pytest
import torch
from scipy import stats

from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.errors import ConfigError
from dspark_runtime.synthetic import SyntheticLaw, accept, accepted_drafts, expected_length

BUSHY = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3, 5))


def steps_of_one_request(law: SyntheticLaw, seed: int, steps: int, spec: TreeSpec | None = None):
    """`steps` verify steps of one request, as rows of one batch. -> (tree, targets, Accepted)"""
    spec = spec or TreeSpec.chain(law.depth)
    tokens = torch.arange(spec.num_nodes).repeat(steps, 1)
    tree = DraftTree.from_spec(spec, tokens)
    targets = tokens + 100
    seeds = torch.full((steps,), seed)
    return tree, targets, accept(tree, targets, law, seeds, torch.arange(steps))


def deviation(survival) -> float:
    p = [a - b for a, b in zip([1.0, *survival], [*survival, 0.0])]
    mean = sum(i * x for i, x in enumerate(p))
    return math.sqrt(sum((i - mean) ** 2 * x for i, x in enumerate(p)))


def test_the_laws_of_one_length_and_their_spread():
    low = SyntheticLaw.make(7, acceptance_length=3.78)
    assert low.survival == pytest.approx([1, 1, 0.78, 0, 0, 0, 0])
    high = SyntheticLaw.make(7, acceptance_length=3.78, law="geometric")
    rho = high.survival[0]
    assert high.survival == pytest.approx([rho**i for i in range(1, 8)])
    assert expected_length(low) == pytest.approx(3.78) and expected_length(high) == pytest.approx(3.78, abs=1e-12)
    assert deviation(low.survival) == pytest.approx(0.41, abs=0.005)
    assert deviation(high.survival) == pytest.approx(2.48, abs=0.005)
    assert SyntheticLaw.make(7, acceptance_length=3.24).describe() == "SYNTHETIC AL 3.24 (min_variance)"


@pytest.mark.parametrize("law", ["min_variance", "geometric"])
@pytest.mark.parametrize(("length", "survival"), [(1, 0.0), (5, 1.0)])
def test_the_ends_of_the_range_accept_nothing_and_everything(law, length, survival):
    made = SyntheticLaw.make(4, acceptance_length=length, law=law)
    assert made.survival == pytest.approx([survival] * 4, abs=1e-12)
    _, _, got = steps_of_one_request(made, 3, 50)
    assert (got.num_emitted == length).all()
    assert SyntheticLaw.make(0, acceptance_length=1, law=law).survival == ()


@pytest.mark.parametrize("length", [1.5, 3.24, 3.5, 3.78, 4.0, 4.99])
@pytest.mark.parametrize("seed", [0, 1, 980406, -5])
def test_min_variance_is_within_a_hundredth_over_1000_steps(length, seed):
    law = SyntheticLaw.make(4, acceptance_length=length)
    _, _, got = steps_of_one_request(law, seed, 1000)
    assert abs(got.num_emitted.double().mean().item() - length) < 0.01  # the bonus token included: never length + 1
    assert set(got.num_emitted.tolist()) <= {math.floor(length), math.ceil(length)}


@pytest.mark.parametrize("seed", [0, 7, 12345])
@pytest.mark.parametrize("options", [{"acceptance_length": 3.4, "law": "geometric"}, {"rates": [0.9, 0.6, 0.6, 0.1]}])
def test_other_laws_are_within_three_standard_errors_and_have_their_histogram(options, seed):
    law = SyntheticLaw.make(4, **options)
    _, _, got = steps_of_one_request(law, seed, 1000)
    error = deviation(law.survival) / 1000**0.5
    assert abs(got.num_emitted.double().mean().item() - expected_length(law)) < 3 * error
    counts = (got.num_emitted - 1).bincount(minlength=5).double()
    p = torch.tensor([1.0, *law.survival]) - torch.tensor([*law.survival, 0.0])
    assert counts[p < 1e-9].sum() == 0
    p = p[p >= 1e-9].double()
    assert stats.chisquare(counts[counts > 0], p / p.sum() * 1000).pvalue > 1e-3


def test_requests_are_independent_and_reproducible():
    law = SyntheticLaw.make(4, acceptance_length=3.5)
    seeds = torch.arange(400)
    now = [accepted_drafts(law, seeds, torch.full((400,), s)) for s in range(60)]
    share = torch.stack(now).double().mean(1) - 2
    assert abs(share - 0.5).max() < 5 * 0.5 / 400**0.5  # not all requests at once
    assert torch.equal(accepted_drafts(law, seeds[[7, 3]], torch.tensor([9, 9])), now[9][[7, 3]])


def test_a_trace_is_replayed_in_order_from_a_seeded_offset(tmp_path):
    recorded = [0, 3, 1, 1, 2, 0, 3]
    (tmp_path / "a.json").write_text(json.dumps({"accepted": recorded}))
    (tmp_path / "b.json").write_text(json.dumps({"emitted": [a + 1 for a in recorded]}))
    law = SyntheticLaw.make(3, trace=tmp_path / "a.json")
    assert law.trace == SyntheticLaw.make(3, trace=str(tmp_path / "b.json")).trace == tuple(recorded)
    assert law.survival == (5 / 7, 3 / 7, 2 / 7) and expected_length(law) == pytest.approx(1 + 10 / 7)
    assert law.describe() == "SYNTHETIC AL 2.43 (trace)"
    offsets = set()
    for seed in range(40):
        got = accepted_drafts(law, torch.full((14,), seed), torch.arange(14)).tolist()
        offset = next(o for o in range(7) if got == [recorded[(o + i) % 7] for i in range(14)])
        offsets.add(offset)
    assert len(offsets) == 7


def test_emitted_ids_are_the_drafts_and_then_the_targets_own_token():
    law = SyntheticLaw.make(4, acceptance_length=2.5)
    tree, targets, got = steps_of_one_request(law, 1, 30)
    for r in range(30):
        k = got.num_emitted[r].item() - 1
        assert got.path[r].tolist() == [*range(k + 1)] + [-1] * (4 - k)
        assert got.tokens[r].tolist() == [*range(1, k + 1), 100 + k] + [-1] * (4 - k)


@pytest.mark.parametrize("chain", [True, False])
def test_padding_is_never_accepted(chain):
    law = SyntheticLaw.make(3, acceptance_length=4)
    for parents in ([[-1, 0, -1, -1]], [[-1, 0, 1, 2]]):
        tree = DraftTree(torch.tensor([[5, 1, -1, -1]]), torch.tensor(parents), torch.tensor([2]), 3, chain)
        got = accept(tree, torch.tensor([[7, 8, 9, 9]]), law, torch.tensor([0]), torch.tensor([0]))
        assert got.tokens.tolist() == [[1, 8, -1, -1]] and got.path.tolist() == [[0, 1, -1, -1]]
        assert got.num_emitted.tolist() == [2]


def test_a_tree_realises_the_length_through_children_that_can_reach_it():
    law = SyntheticLaw.make(3, acceptance_length=3.3, rank_frequencies=[0.5, 0.5])
    tree, targets, got = steps_of_one_request(law, 4, 1000, BUSHY)
    assert abs(got.num_emitted.double().mean().item() - 3.3) < 0.01
    for r in range(1000):
        path = [i for i in got.path[r].tolist() if i >= 0]
        assert all(BUSHY.parents[b] == a for a, b in zip(path, path[1:]))
        assert got.tokens[r, : len(path)].tolist() == [*path[1:], 100 + path[-1]]
        if len(path) == 4:
            assert path[2] != 4  # a leaf at depth 2
    first = got.path[:, 1]
    assert 400 < (first == 1).sum() < 600 and (first >= 1).all()


def test_ranks_follow_their_frequencies_and_the_first_child_is_the_default():
    spec = TreeSpec((-1, 0, 0, 0))
    law = SyntheticLaw.make(1, acceptance_length=2, rank_frequencies=[6, 0, 2])
    _, _, got = steps_of_one_request(law, 0, 4000, spec)
    counts = got.path[:, 1].bincount(minlength=4).tolist()
    assert counts[2] == 0 and stats.chisquare([counts[1], counts[3]], [3000, 1000]).pvalue > 1e-3
    _, _, got = steps_of_one_request(SyntheticLaw.make(1, acceptance_length=2), 0, 50, spec)
    assert (got.path[:, 1] == 1).all()
    # No recorded rank exists here: the first child that reaches the depth.
    law = SyntheticLaw.make(3, acceptance_length=4, rank_frequencies=[0, 0, 0, 1])
    _, _, got = steps_of_one_request(law, 0, 5, BUSHY)
    assert got.path.tolist() == [[0, 1, 3, 6]] * 5


def test_a_request_whose_tree_is_cut_accepts_what_there_is():
    law = SyntheticLaw.make(3, acceptance_length=4)
    for spec in (TreeSpec.chain(3), BUSHY):
        tree = DraftTree.from_spec(spec, torch.arange(spec.num_nodes).repeat(4, 1)).limit(torch.arange(4))
        got = accept(tree, tree.tokens + 100, law, torch.arange(4), torch.arange(4))
        assert got.num_emitted.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance_length": 0.9}, r"synthetic_acceptance_length: found 0.9, allowed: 1 to 5"),
        ({"acceptance_length": 5.01}, r"synthetic_acceptance_length: found 5.01, allowed: 1 to 5"),
        ({"acceptance_length": math.nan}, r"synthetic_acceptance_length: found nan, allowed: 1 to 5"),
        ({"acceptance_length": 3, "law": "normal"}, "found 'normal', allowed: min_variance, geometric"),
        ({"rates": [0.5, 0.2]}, "found 2 values, allowed: 4"),
        ({"rates": [0.5, 0.6, 0.1, 0]}, r"rates\[1\]: found 0.6 after 0.5, allowed: no increase"),
        ({"rates": [1.5, 0.6, 0.1, 0]}, r"rates\[0\]: found 1.5, allowed: 0 to 1"),
        ({"rates": [0.5, 0.4, 0.1, -0.1]}, r"rates\[3\]: found -0.1"),
        ({"rates": [0.5, math.nan, 0.1, 0]}, r"rates\[1\]: found nan"),
        (
            {"acceptance_length": 3, "rates": [1, 1, 0, 0]},
            "found synthetic_acceptance_length and synthetic_acceptance_rates",
        ),
        ({}, "found nothing, allowed: exactly one of"),
        ({"acceptance_length": 3, "rank_frequencies": [0, 0]}, "rank_frequencies"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticLaw.make(4, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold"),
        ('{"accepted": []}', "must hold"),
        ('{"accepted": [1], "emitted": [2]}', "must hold"),
        ('{"accepted": [1, 5]}', r"accepted\[1\]: found 5, allowed: integers 0 to 4"),
        ('{"emitted": [0]}', r"emitted\[0\]: found 0, allowed: integers 1 to 5"),
        ('{"accepted": [true]}', "found True"),
        ("{", "cannot read"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        SyntheticLaw.make(4, trace=path)
    with pytest.raises(ConfigError, match="cannot read"):
        SyntheticLaw.make(4, trace=tmp_path / "missing.json")
