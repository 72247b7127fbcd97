"""Trees of an EAGLE-3 drafter: every node under its own path, against the formulas in float64 and against enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dspark.load import load_drafter
from drafters.tree import DraftTree, TreeSpec
from drafters.tree_search import drawn_tree
from dspark_runtime.engine import Engine
from eval.evaluate import budget
from tests.drafters import dspark_reference as reference
from tests.drafters.dspark_cases import V, target, write
from tests.drafters.test_dspark import GREEDY, PROMPTS, Case, layer_outputs, loaded, make, one_request
from tests.drafters.test_tree_growth import paths

TOKENS = list(range(1, 20))
TREE = TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
DIALECTS = ["deepspec eagle3", "eagle3"]  # the second has a vocabulary of 30 of 48
Drafted = tuple[int, ...]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 16 columns: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def law_of(case: Case, model: Any, tokens: list[int], temperature: float = 1.0) -> Callable[[Drafted], Tensor]:
    """law(path) -> probabilities [V] of the token after the anchor and the drafts `path`, float64."""
    outputs = layer_outputs(model, tokens)
    features = torch.cat([outputs[i] for i in case.taps], -1)[:-1]

    @cache
    def law(path: Drafted) -> Tensor:
        logits = reference.eagle_logits(case.net, features, tokens, list(path)) / temperature
        return torch.zeros(V, dtype=torch.float64).index_add(0, case.ids, logits.softmax(0))

    return law


def looked_at(law: Callable[[Drafted], Tensor], depth: int, width: int) -> dict[Drafted, float]:
    """Probability of every path below the best `width` nodes of each level."""
    found, frontier = {(): 1.0}, [()]
    for _ in range(depth):
        level = {(*p, x): found[p] * float(q) for p in frontier for x, q in enumerate(law(p)) if q > 0}
        frontier = sorted(level, key=level.get, reverse=True)[:width]
        found |= level
    return found


def drafts(tree: DraftTree, row: int = 0) -> list[Drafted]:
    """Every node's path below the root."""
    return [path[1:] for path in paths(tree, row)]


# ------------------------------------------------------------------------------------------------ grown


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("nodes, depth, width", [(9, 3, 8), (4, 2, 3), (60, 2, 59), (24, 5, 6), (64, 3, 32), (64, 7, 10), (18, 9, 2)])
def test_a_grown_tree_is_the_best_of_its_size(name: str, nodes: int, depth: int, width: int, tmp_path: Path) -> None:
    """Of all paths where `width` holds a whole tree of the size (the first three), else of those below the best nodes of
    each level. 64 nodes of depth 3 take all 64 bits of a mask."""
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    drafter.candidates = len(case.ids)
    tree = drafter.propose(one_request(model, drafter, TOKENS), budget(nodes, depth), sample=False)
    law = law_of(case, model, TOKENS)
    every = looked_at(law, depth, width)
    got = drafts(tree)
    assert len(got) == nodes and set(got) <= set(every)
    best = sorted(every.values(), reverse=True)[:nodes]
    assert math.fsum(every[p] for p in got) == pytest.approx(math.fsum(best), rel=1e-4)
    for i, path in enumerate(got[1:], start=1):
        assert float(tree.confidence[0, i]) == pytest.approx(float(law(path[:-1])[path[-1]]), rel=2e-3)
    if nodes <= 9 and len(case.ids) < V:  # 931 paths to look at, and not 2353
        whole = sorted(looked_at(law, depth, 10**6).values(), reverse=True)[:nodes]
        assert math.fsum(best) == pytest.approx(math.fsum(whole))


def test_requests_grow_their_own_trees(tmp_path: Path) -> None:
    """In one pass, at their own temperatures and limits."""
    case, model = make("deepspec eagle3"), target()
    drafter = loaded(case, tmp_path, model)
    drafter.candidates = V
    state = one_request(model, drafter, TOKENS, rows=3)
    state.temperature = torch.tensor([0.0, 0.5, 1.0])
    state.max_drafts = torch.tensor([9, 2, 0])
    tree = drafter.propose(state, budget(12, 4), sample=False)
    for row, (temperature, depth) in enumerate([(1.0, 4), (0.5, 2), (1.0, 0)]):
        every = looked_at(law_of(case, model, TOKENS, temperature), depth, 5)
        best = sorted(every.values(), reverse=True)[:12]
        got = drafts(tree, row)
        assert len(got) == len(best)
        assert math.fsum(every[p] for p in got) == pytest.approx(math.fsum(best), rel=1e-4)


def test_few_candidates_are_the_best_ones(tmp_path: Path) -> None:
    case, model = make("deepspec eagle3"), target()
    drafter = load_drafter(write(tmp_path, case.config, case.tensors), model, candidates=2)
    tree = drafter.propose(one_request(model, drafter, TOKENS), budget(12, 3), sample=False)
    law = law_of(case, model, TOKENS)
    for path in drafts(tree)[1:]:
        assert path[-1] in law(path[:-1]).topk(2).indices.tolist()


def test_repeats_of_the_text_are_children_too(tmp_path: Path) -> None:
    case, model = make("eagle3"), target()
    drafter = load_drafter(write(tmp_path, case.config, case.tensors, case.rename), model, suffix=3)
    tokens = [7, 8, 9, 10, 11, 12, 1, 2, 7, 8, 9]
    tree = drafter.propose(one_request(model, drafter, tokens), budget(16, 3), sample=False)
    assert {(10,), (10, 11), (10, 11, 12)} <= set(drafts(tree))
    assert int(tree.num_nodes[0]) == 16  # the drafter's own fill the rest


# ------------------------------------------------------------------------------------------------ topologies


@pytest.mark.parametrize("name", DIALECTS)
def test_a_topology_holds_the_best_children_under_their_own_paths(name: str, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    drafter.grow = False
    tree = drafter.propose(one_request(model, drafter, TOKENS), TREE, sample=False)
    law = law_of(case, model, TOKENS)
    assert tree.parents[0].tolist() == list(TREE.parents) and tree.probs is None
    for i, path in enumerate(drafts(tree)[1:], start=1):
        assert path[-1] == int(law(path[:-1]).argsort(descending=True)[TREE.ranks[i]])


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("grow", [True, False])
def test_sampled_trees_carry_the_law_of_their_draws(name: str, grow: bool, tmp_path: Path) -> None:
    case, model, temperature = make(name), target(), 0.7
    drafter = loaded(case, tmp_path, model)
    state = one_request(model, drafter, TOKENS, rows=2, temperature=temperature)
    drafter.grow = grow
    tree = drafter.propose(state, TREE, sample=True)
    spec = drawn_tree(TREE.num_nodes, TREE.depth) if grow else TREE
    assert tree.parents.tolist() == [list(spec.parents)] * 2
    law = law_of(case, model, TOKENS, temperature)
    for row in range(2):
        got = drafts(tree, row)  # which checks that siblings differ
        for i, path in enumerate(got):
            if i in spec.parents:
                torch.testing.assert_close(tree.probs[row, i].double(), law(path), atol=1e-5, rtol=1e-3)
            assert not path or law(path[:-1])[path[-1]] > 0
    assert drafts(tree, 0) != drafts(tree, 1)


# ------------------------------------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("options", [{}, {"suffix": 3}, {"grow": False}, {"candidates": 2}], ids=str)
def test_greedy_output_equals_plain_decoding(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    case, model = make(name), target("llama")
    drafter = load_drafter(write(tmp_path, case.config, case.tensors, case.rename), model, **options)
    want = [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    for spec in (TREE, budget(64, 7), budget(5, 2)):
        engine = Engine(model, drafter, spec=spec, max_num_requests=3, page_size=4, max_prefill_tokens=7)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [o.token_ids for o in outputs] == want
        assert sum(o.num_drafted for o in outputs)


def test_every_proposal_of_a_crowded_run_is_the_formulas_own(tmp_path: Path) -> None:
    """Drafts that were accepted out of a tree, chunks, pages that move, requests that are preempted and come back."""
    case, model = make("deepspec eagle3"), target()
    drafter = loaded(case, tmp_path, model)
    drafter.grow = False
    propose, spec = drafter.propose, TreeSpec((-1, 0, 0, 1, 1, 2, 3))
    right: list[bool] = []

    def watched(state: Any, spec: TreeSpec, sample: bool) -> DraftTree:
        tree = propose(state, spec, sample)
        for row in range(state.num_requests):
            tokens = state.tokens[row, : int(state.seq_lens[row])].tolist()
            got = drafts(tree, row)
            if len(tokens) == 1:
                assert len(got) == 1
                continue
            law = law_of(case, model, tokens)
            for path in got[1:]:
                rank = [p for p in got if p[:-1] == path[:-1] and len(p) == len(path)].index(path)
                right.append(path[-1] == int(law(path[:-1]).argsort(descending=True)[rank]))
        return tree

    drafter.propose = watched
    engine = Engine(model, drafter, spec=spec, max_num_requests=4, page_size=2, num_pages=34, max_prefill_tokens=7)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    assert engine.num_preemptions and sum(o.num_accepted for o in outputs) and len(right) > 200 and all(right)


def test_options_of_other_drafters_are_refused(tmp_path: Path) -> None:
    case, model = make("deepspec eagle3"), target()
    folder = write(tmp_path, case.config, case.tensors)
    with pytest.raises(ValueError, match="confidence: not an option of eagle3:.*, which has no confidence head"):
        load_drafter(folder, model, confidence="weight")
    with pytest.raises(ValueError, match="candidates: found 0, allowed: 1 or more"):
        load_drafter(folder, model, candidates=0)
