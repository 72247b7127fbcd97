"""Growth against the enumeration of every tree, and what else it must respect."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.base import BatchState
from drafters.suffix import Continuations, continuations
from drafters.tree import DraftTree
from drafters.tree_growth import SUFFIX_RATES, grow

V, DEPTH = 3, 3


def model(seed: int, rows: int, recurrent: bool = False):
    """Logits [R, depth, V parents, V] of a random head; `children` for grow, and the law q(k, path) of each row."""
    table = torch.randn(rows, DEPTH, V, V, generator=torch.Generator().manual_seed(seed)) * 1.5
    sure = torch.rand(rows, DEPTH, V, generator=torch.Generator().manual_seed(seed + 1))
    order = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(seed + i)) for i in range(rows)])

    def children(k: int, tokens: Tensor, carry: tuple[Tensor, ...]):
        r = torch.arange(rows)[:, None]
        logits = table[r, k, tokens]
        if recurrent:  # the sum of the path's tokens shifts the law
            carry = (tokens[..., None].float() + (carry[0] if carry else 0),)
            logits = logits + carry[0] * torch.arange(V) * 0.3
        ids = order[:, None]
        if recurrent:  # every parent in its own order
            ids = torch.stack([order.roll(i, 1) for i in range(tokens.shape[1])], 1)
        return ids, logits.gather(2, ids.expand(-1, tokens.shape[1], -1)), sure[r, k, tokens], carry

    def law(row: int, path: tuple[int, ...]) -> Tensor:
        k = len(path) - 1
        logits = table[row, k, path[-1]].double()
        if recurrent:
            logits = logits + sum(path) * torch.arange(V) * 0.3
        return logits.softmax(0)

    return children, law, sure


def paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for i in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, i])
        assert parent < i
        out.append((*(out[parent] if parent >= 0 else ()), int(tree.tokens[row, i])))
    assert (tree.tokens[row, len(out) :] == -1).all() and (tree.parents[row, len(out) :] == -1).all()
    assert len(set(out)) == len(out)
    return out


def scores(law, row: int, root: int, weight=lambda path: 1.0) -> dict[tuple[int, ...], float]:
    """Probability of every path below the root."""
    found = {(root,): 1.0}
    for depth in range(DEPTH):
        for path in [p for p in found if len(p) == depth + 1]:
            q = law(row, path) * weight(path)
            found |= {(*path, x): found[path] * float(q[x]) for x in range(V)}
    return found


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 20, 64])
def test_the_grown_tree_is_the_best_of_its_size(nodes: int, recurrent: bool) -> None:
    rows = 4
    children, law, _ = model(nodes, rows, recurrent)
    roots = torch.tensor([0, 1, 2, 0])
    tree = grow(roots, children, DEPTH, nodes, torch.tensor([9, 9, 9, 2]))
    for row in range(rows):
        every = {p: s for p, s in scores(law, row, int(roots[row])).items() if row < 3 or len(p) <= 3}
        best = sorted(every.values(), reverse=True)[:nodes]
        got = paths(tree, row)
        assert len(got) == min(nodes, len(every))
        assert math.fsum(every[p] for p in got) == pytest.approx(math.fsum(best), rel=1e-5)
        for i, path in enumerate(got[1:], start=1):
            assert float(tree.confidence[row, i]) == pytest.approx(float(law(row, path[:-1])[path[-1]]), rel=1e-4)


def test_no_tree_of_the_size_has_more_by_enumeration_of_trees() -> None:
    """The surrogate's optimum over all prefix-closed sets, not only over sets of best nodes."""
    children, law, _ = model(7, 1)
    every = {p: s for p, s in scores(law, 0, 1).items() if len(p) <= 3}
    tree = grow(torch.tensor([1]), children, 2, 5, torch.tensor([9]))
    rest = [p for p in every if len(p) > 1]
    sums = [
        sum(every[p] for p in chosen)
        for chosen in itertools.combinations(rest, 4)
        if all(len(p) == 2 or p[:-1] in chosen for p in chosen)
    ]
    assert sum(every[p] for p in paths(tree, 0)[1:]) == pytest.approx(max(sums), rel=1e-5)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("nodes", [5, 12, 30])
def test_a_narrow_tree_is_the_best_of_what_it_looked_at(nodes: int, width: int, recurrent: bool) -> None:
    """Level by level the best `width` nodes have children; the tree is the best of these, each with its parent."""
    rows = 3
    children, law, _ = model(nodes, rows, recurrent)
    asked: list[int] = []

    def watched(k: int, tokens: Tensor, carry: tuple[Tensor, ...]):
        asked.append(tokens.shape[1])
        return children(k, tokens, carry)

    tree = grow(torch.tensor([0, 1, 2]), watched, DEPTH, nodes, torch.tensor([9, 9, 2]), width=width)
    assert asked == [1, *[min(width, V ** (k + 1), nodes - 1) for k in range(DEPTH - 1)]]
    for row in range(rows):
        looked, frontier = {(row,): 1.0}, [(row,)]
        for _ in range(DEPTH if row < 2 else 2):
            level = {(*path, x): looked[path] * float(law(row, path)[x]) for path in frontier for x in range(V)}
            frontier = sorted(level, key=level.get, reverse=True)[:width]
            looked |= level
        best = sorted(looked.values(), reverse=True)[:nodes]
        got = paths(tree, row)
        assert set(got) <= set(looked) and len(got) == min(nodes, len(looked))
        assert math.fsum(looked[p] for p in got) == pytest.approx(math.fsum(best), rel=1e-5)


def test_a_chain_takes_the_best_token_each_time() -> None:
    children, law, _ = model(3, 3, recurrent=True)
    tree = grow(torch.tensor([0, 1, 2]), children, DEPTH, DEPTH + 1, torch.tensor([9, 1, 0]), chain=True)
    assert tree.is_chain and tree.num_nodes.tolist() == [4, 2, 1]
    for row in range(3):
        path = (row,)
        for token in tree.tokens[row, 1 : int(tree.num_nodes[row])].tolist():
            assert token == int(law(row, path).argmax())
            path = (*path, token)


def test_confidence_weights_stops_and_matches() -> None:
    children, law, sure = model(11, 1)
    root = torch.tensor([2])
    c = lambda path: float(sure[0, len(path) - 1, path[-1]])  # noqa: E731
    weighted = scores(law, 0, 2, c)
    tree = grow(root, children, DEPTH, 9, torch.tensor([9]), confidence="weight")
    best = sorted(weighted.values(), reverse=True)[:9]
    assert math.fsum(weighted[p] for p in paths(tree, 0)) == pytest.approx(math.fsum(best), rel=1e-5)

    plain = scores(law, 0, 2)
    tree = grow(root, children, DEPTH, 40, torch.tensor([9]), confidence="stop", stop_below=0.08)
    allowed = {(2,)}
    for path in sorted(plain, key=len):
        if len(path) > 1 and path[:-1] in allowed and plain[path[:-1]] * c(path[:-1]) >= 0.08:
            allowed.add(path)
    assert set(paths(tree, 0)) == allowed and 1 < len(allowed) < 40

    tree = grow(root, children, DEPTH, 40, torch.tensor([9]), confidence="match")
    got = paths(tree, 0)
    for i, path in enumerate(got):
        below = [float(tree.confidence[0, j]) for j, p in enumerate(got) if p[:-1] == path]
        if len(below) == V:
            assert sum(below) == pytest.approx(1, abs=1e-4)
            assert max(below) == pytest.approx(max(c(path), 1 / V), abs=0.02)


def test_equal_scores_keep_parents_before_children() -> None:
    """A law that is certain gives a child its parent's own score."""
    certain = torch.tensor([0.0, -200.0, -200.0])

    def children(k: int, tokens: Tensor, carry: tuple[Tensor, ...]):
        return torch.arange(V)[None, None], certain.expand(1, tokens.shape[1], V), None, ()

    for nodes in range(2, 6):
        paths(grow(torch.tensor([0]), children, DEPTH, nodes, torch.tensor([9])), 0)


# ------------------------------------------------------------------------------------------------ repeats


def mixture(law, repeats: list[tuple[list[int], int]], vocab: int):
    """q with the continuations mixed in, over tokens that q does not know too."""

    def mixed(row: int, path: tuple[int, ...]) -> Tensor:
        q = torch.zeros(vocab, dtype=torch.float64)
        q[:V] = law(row, path) if path[-1] < V else law(row, (*path[:-1], 0))
        k, left, extra, said = len(path) - 1, 1.0, torch.zeros(vocab, dtype=torch.float64), set()
        for tokens, matched in repeats:
            if tuple(tokens[:k]) == path[1:] and len(tokens) > k and tokens[k] not in said and matched:
                rate = SUFFIX_RATES[min(matched + k, len(SUFFIX_RATES) - 1)]
                extra[tokens[k]] += left * rate
                left *= 1 - rate
                said.add(tokens[k])
        return q * left + extra

    return mixed


def test_repeats_enter_the_same_tree_as_children() -> None:
    known, law, _ = model(5, 1)
    vocab = 6

    def children(k: int, tokens: Tensor, carry: tuple[Tensor, ...]):
        return known(k, torch.where(tokens < V, tokens, 0), carry)

    repeats = [([4, 5, 1], 3), ([4, 2], 2), ([1, 1, 5], 1), ([4, 5, 0], 1)]
    padded = torch.tensor([[t + [-1] * (DEPTH - len(t)) for t, _ in repeats]])
    tree = grow(torch.tensor([0]), children, DEPTH, 12, torch.tensor([9]),
                repeats=Continuations(padded, torch.tensor([[m for _, m in repeats]])))  # fmt: skip
    mixed, found = mixture(law, repeats, vocab), {(0,): 1.0}
    for depth in range(DEPTH):
        for path in [p for p in found if len(p) == depth + 1]:
            q = mixed(0, path)
            assert float(q.sum()) == pytest.approx(1)
            found |= {(*path, x): found[path] * float(q[x]) for x in range(vocab)}
    best = sorted(found.values(), reverse=True)[:12]
    got = paths(tree, 0)
    assert {(0, 4), (0, 4, 5)} <= set(got)
    assert math.fsum(found[p] for p in got) == pytest.approx(math.fsum(best), rel=1e-5)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=DEPTH), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0, 200.0]), st.integers(2, 12), st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_with_repeats_no_score_rises_along_a_path(repeats, sure: float, num_nodes: int, chain: bool) -> None:
    """Not by rounding either, where drafter and repeats are certain of the same: the best nodes are then no tree."""
    logits = torch.tensor([0.0, -sure, -sure])

    def children(k: int, tokens: Tensor, carry: tuple[Tensor, ...]):
        return torch.arange(V)[None, None], logits.expand(1, tokens.shape[1], V), None, ()

    padded = torch.tensor([[t + [-1] * (DEPTH - len(t)) for t, _ in repeats]])
    found = Continuations(padded, torch.tensor([[m for _, m in repeats]]))
    tree = grow(torch.tensor([0]), children, DEPTH, num_nodes, torch.tensor([9]), chain=chain, repeats=found)
    steps, parents = tree.confidence[0], tree.parents[0]
    for i, path in enumerate(paths(tree, 0)):
        assert 0 < steps[i] <= 1 and (i == 0 or tree.tokens[0, parents[i]] == path[-2])


def test_without_a_repeat_the_tree_is_the_drafters_own() -> None:
    children, _, _ = model(5, 2)
    roots, limit = torch.tensor([0, 1]), torch.tensor([9, 9])
    none = Continuations(torch.full((2, 3, DEPTH), -1), torch.zeros(2, 3, dtype=torch.int64))
    a, b = grow(roots, children, DEPTH, 9, limit), grow(roots, children, DEPTH, 9, limit, repeats=none)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.parents, b.parents)


def test_continuations_say_how_much_they_match() -> None:
    lines = [[7, 1, 2, 3, 9, 1, 2, 3], [5, 5, 5, 0, 0, 0, 0, 0]]
    state = BatchState(
        tokens=torch.tensor(lines), seq_lens=torch.tensor([8, 3]), page_table=torch.zeros(2, 1, dtype=torch.int32),
        max_drafts=torch.tensor([9, 9]), temperature=torch.zeros(2), seeds=torch.zeros(2, dtype=torch.int64),
        num_outputs=torch.zeros(2, dtype=torch.int64), max_seq_len=8,
    )  # fmt: skip
    found = continuations(state, 3, 2, longest=8)
    assert found.tokens.tolist() == [[[9, 1, 2], [-1] * 3], [[5, -1, -1], [5, 5, -1]]]
    assert found.matched.tolist() == [[3, 0], [2, 1]]
