from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.tree import MAX_NODES, DraftTree, TreeSpec


@st.composite
def specs(draw, max_nodes: int = 24):
    """A tree in breadth-first order: parents never decrease, and depths follow."""
    n = draw(st.integers(1, max_nodes))
    parents = [-1]
    for i in range(1, n):
        parents.append(draw(st.integers(max(parents[-1], 0), i - 1)))
    return TreeSpec(tuple(parents))


def path_of(parents, i):
    path = []
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path


@given(specs())
@settings(max_examples=60, deadline=None)
def test_depths_ranks_masks_and_ancestors_follow_the_parents(spec):
    n = spec.num_nodes
    paths = [path_of(spec.parents, i) for i in range(n)]
    assert list(spec.depths) == [len(p) - 1 for p in paths]
    assert spec.depth == max(spec.depths) and spec.num_drafts == n - 1
    assert spec.is_chain == all(p == i - 1 for i, p in enumerate(spec.parents))
    for i in range(1, n):
        siblings = [j for j in range(1, n) if spec.parents[j] == spec.parents[i]]
        assert spec.ranks[i] == siblings.index(i)

    tree = DraftTree.from_spec(spec, torch.arange(2 * n).view(2, n))
    assert tree.depths().tolist() == [list(spec.depths)] * 2
    assert tree.masks().tolist() == [[sum(1 << j for j in p) for p in paths]] * 2
    assert tree.ancestors().tolist() == [[[j in p for j in range(n)] for p in paths]] * 2


def test_a_mask_uses_the_sign_bit_for_node_63():
    tree = DraftTree.from_spec(TreeSpec.chain(63), torch.zeros(1, 64, dtype=torch.int64))
    assert tree.masks()[0, 63].item() & (2**64 - 1) == 2**64 - 1
    star = DraftTree.from_spec(TreeSpec((-1, *[0] * 63)), torch.zeros(1, 64, dtype=torch.int64))
    assert star.masks()[0, 63].item() & (2**64 - 1) == (1 << 63) | 1


@given(specs(), st.data())
@settings(max_examples=80, deadline=None)
def test_prune_keeps_connected_nodes_in_order_and_moves_every_field(spec, data):
    n, vocab = spec.num_nodes, 3
    tokens = torch.arange(100, 100 + 2 * n).view(2, n)
    probs = torch.arange(2 * n * vocab).float().view(2, n, vocab)
    tree = DraftTree.from_spec(spec, tokens, probs=probs, confidence=tokens.float())
    keep = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(2)]
    pruned = tree.prune(torch.tensor(keep))
    assert pruned.width == n
    for r in range(2):
        kept = [i for i in range(n) if all(keep[r][j] or j == 0 for j in path_of(spec.parents, i))]
        count = len(kept)
        assert pruned.num_nodes[r] == count
        assert pruned.tokens[r].tolist() == [100 + r * n + i for i in kept] + [-1] * (n - count)
        old_parents = [spec.parents[i] for i in kept]
        assert pruned.parents[r].tolist() == [kept.index(p) if p >= 0 else -1 for p in old_parents] + [-1] * (n - count)
        assert torch.equal(pruned.probs[r, :count], probs[r, kept])
        assert pruned.confidence[r, :count].tolist() == [100 + r * n + i for i in kept]
        assert pruned.depths()[r].tolist() == [spec.depths[i] for i in kept] + [0] * (n - count)
    assert torch.equal(pruned.prune(pruned.tokens >= 0).tokens, pruned.tokens)  # a second time changes nothing


@given(specs(), st.lists(st.integers(0, 8), min_size=2, max_size=2))
@settings(max_examples=40, deadline=None)
def test_limit_drops_exactly_the_deeper_nodes(spec, limits):
    n = spec.num_nodes
    tree = DraftTree.from_spec(spec, torch.arange(2 * n).view(2, n)).limit(torch.tensor(limits))
    for r, limit in enumerate(limits):
        count = sum(d <= limit for d in spec.depths)  # breadth-first: they come first
        assert tree.num_nodes[r] == count
        assert tree.tokens[r].tolist() == [r * n + i for i in range(count)] + [-1] * (n - count)
        assert tree.parents[r].tolist() == list(spec.parents[:count]) + [-1] * (n - count)


def test_a_pruned_chain_keeps_its_ancestor_masks():
    tree = DraftTree.from_spec(TreeSpec.chain(3), torch.tensor([[9, 8, 7, 6]]))
    pruned = tree.prune(torch.tensor([[True, True, False, True]]))
    assert pruned.tokens.tolist() == [[9, 8, -1, -1]] and pruned.num_nodes.tolist() == [2]
    assert pruned.masks()[0, :2].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "must be -1"),
        ((0, 0), "must be -1"),
        ((-1, 1), r"parents\[1\]: found 1, allowed: 0 to 0"),
        ((-1, -1), r"parents\[1\]: found -1"),
        ((-1, 0, 1, 0), "breadth-first"),
        ((-1, *range(MAX_NODES)), "found 65 nodes"),
    ],
)
def test_a_bad_topology_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        TreeSpec(parents)


def test_chain_lengths():
    assert TreeSpec.chain(0).parents == (-1,) and TreeSpec.chain(0).is_chain
    assert TreeSpec.chain(63).num_nodes == MAX_NODES
    for k in (-1, 64):
        with pytest.raises(ValueError, match=f"found {k}, allowed: 0 to 63"):
            TreeSpec.chain(k)
