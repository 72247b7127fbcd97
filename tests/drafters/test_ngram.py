"""Prompt lookup against a plain-Python transcription."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import BatchState
from drafters.ngram import NgramDrafter
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.sampling import SamplingParams
from tests.dspark_runtime.test_capturable import NoHostReads


def state(histories: list[list[int]], max_drafts: list[int] | None = None) -> BatchState:
    longest = max(map(len, histories))
    r = len(histories)
    zeros = torch.zeros(r, dtype=torch.int64)
    return BatchState(
        # Beyond its length a row holds anything, here tokens that would match.
        tokens=torch.tensor([h + [h[-1]] * (longest + 3 - len(h)) for h in histories]),
        seq_lens=torch.tensor([len(h) for h in histories]),
        page_table=torch.zeros(r, 1, dtype=torch.int32),
        max_drafts=torch.tensor(max_drafts or [63] * r),
        temperature=torch.zeros(r),
        seeds=zeros,
        num_outputs=zeros,
        max_seq_len=longest,
    )


def continuations(history: list[int], depth: int, max_ngram: int, min_ngram: int) -> list[list[int]]:
    """All continuations, best first: longest shared suffix, then most recent."""
    found = []
    for end in range(len(history) - 1):
        shared = 0
        while shared < max_ngram and shared <= end and history[end - shared] == history[-1 - shared]:
            shared += 1
        if shared >= min_ngram:
            found.append((shared, end, history[end + 1 : end + 1 + depth]))
    return [c for _, _, c in sorted(found, reverse=True)]


def trie(root: int, found: list[list[int]], budget: int) -> tuple[list[int], list[int]]:
    tokens, parents, children = [root], [-1], {}
    for continuation in found:
        node = 0
        for token in continuation:
            if (node, token) not in children:
                if len(tokens) == budget:
                    break
                children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = children[node, token]
    return tokens, parents


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    out = []
    for token, parent in zip(tokens, parents):
        out.append((out[parent] if parent >= 0 else ()) + (token,))
    assert len(set(out)) == len(out)  # no sibling twice
    return set(out)


def of(tree: DraftTree, r: int) -> tuple[list[int], list[int]]:
    n = int(tree.num_nodes[r])
    assert (tree.tokens[r, n:] == -1).all() and (tree.parents[r, n:] == -1).all()
    return tree.tokens[r, :n].tolist(), tree.parents[r, :n].tolist()


histories = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)


@settings(max_examples=120, deadline=None)
@given(histories, st.integers(1, 6), st.integers(1, 4), st.data())
def test_chain_is_the_best_continuation(rows: list[list[int]], k: int, max_ngram: int, data: st.DataObject) -> None:
    min_ngram = data.draw(st.integers(1, max_ngram))
    limits = data.draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)))
    tree = NgramDrafter(max_ngram, min_ngram).propose(state(rows, limits), TreeSpec.chain(k), False)
    assert tree.is_chain and tree.width > tree.depth and tree.probs is None
    for r, history in enumerate(rows):
        best = (continuations(history, k, max_ngram, min_ngram) or [[]])[0][: limits[r]]
        assert of(tree, r) == ([history[-1], *best], list(range(-1, len(best))))


@settings(max_examples=120, deadline=None)
@given(histories, st.sampled_from([(-1, 0, 0, 1), (-1, 0, 0, 0, 1, 2, 4, 6), (-1, 0, 0, *range(1, 14))]), st.data())
def test_tree_is_the_trie_of_the_best_continuations(
    rows: list[list[int]], parents: tuple[int, ...], data: st.DataObject
) -> None:
    spec = TreeSpec(parents)
    limits = data.draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)))
    tree = NgramDrafter().propose(state(rows, limits), spec, False)
    chain = NgramDrafter().propose(state(rows, limits), TreeSpec.chain(spec.depth), False)
    for r, history in enumerate(rows):
        found = [c[: limits[r]] for c in continuations(history, spec.depth, 4, 1)[: spec.num_drafts]]
        tokens, above = of(tree, r)
        assert (tokens, above) == trie(history[-1], found, spec.num_nodes)
        assert max(map(len, paths(tokens, above))) - 1 <= min(spec.depth, limits[r])
        first, _ = of(chain, r)  # the tree's first branch is the chain
        first = first[: spec.num_nodes]
        assert tokens[: len(first)] == first and above[: len(first)] == list(range(-1, len(first) - 1))


def test_no_match_gives_only_the_root() -> None:
    for spec in (TreeSpec.chain(3), TreeSpec((-1, 0, 0, 1))):
        tree = NgramDrafter().propose(state([[1, 2, 3]]), spec, False)
        assert of(tree, 0) == ([3], [-1])
    plain = NgramDrafter().propose(state([[1, 1]]), TreeSpec.chain(0), False)
    assert of(plain, 0) == ([1], [-1])


def test_depth_limits_cut_trees() -> None:
    tree = NgramDrafter().propose(state([[0, 1, 2, 0, 3, 4, 0]], [1]), TreeSpec((-1, 0, 0, 1, 2)), False)
    tokens, parents = of(tree, 0)
    assert sorted(tokens[1:]) == [1, 3] and parents == [-1, 0, 0]


def test_the_first_draft_is_verified_like_any_other() -> None:
    """Users' fact sheet, row 35: after [1, 1, 1] prompt lookup drafts 1, the model says 2."""
    model = ScriptedModel(4, lambda prefix: [0.0, 0.0, 1.0, 0.0], max_model_len=16)
    assert of(NgramDrafter().propose(state([[1, 1, 1]]), TreeSpec.chain(1), False), 0) == ([1, 1], [-1, 0])
    engine = Engine(model, NgramDrafter(), spec=TreeSpec.chain(1))
    out = engine.generate([[1, 1, 1]], SamplingParams(temperature=0.0, max_tokens=2))[0]
    assert out.token_ids == [2, 2]
    assert (engine.records[0].drafted, engine.records[0].accepted) == ([1], [0])


def test_proposing_reads_nothing_back() -> None:
    rows = state([[1, 2, 1, 2, 1], [3]])
    for spec in (TreeSpec.chain(3), TreeSpec((-1, 0, 0, 1))):
        NgramDrafter().propose(rows, spec, False)  # constants are made once
        with NoHostReads():
            NgramDrafter().propose(rows, spec, False)
