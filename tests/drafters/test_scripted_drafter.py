"""The scripted drafter hands over exactly what its function says, within the budget and the limits."""

from __future__ import annotations

import pytest
import torch

from drafters.base import BatchState
from drafters.scripted import ScriptedDrafter
from drafters.tree import TreeSpec
from tests.drafters.scripted_cases import PROMPT, STREAM, V, after, always_right, logits, right_for

SPEC = TreeSpec((-1, 0, 0, 1, 1, 2))


def state(histories: list[list[int]], max_drafts: list[int] | None = None) -> BatchState:
    longest = max(map(len, histories))
    zeros = torch.zeros(len(histories), dtype=torch.int64)
    return BatchState(
        tokens=torch.tensor([h + [99] * (longest + 2 - len(h)) for h in histories]),  # 99 is not committed
        seq_lens=torch.tensor([len(h) for h in histories]),
        page_table=torch.zeros(len(histories), 1, dtype=torch.int32),
        max_drafts=torch.tensor(max_drafts or [63] * len(histories)),
        temperature=torch.zeros(len(histories)),
        seeds=zeros,
        num_outputs=zeros,
        max_seq_len=longest,
    )


def of(tree, r: int) -> tuple[list[int], list[int]]:
    n = int(tree.num_nodes[r])
    assert (tree.tokens[r, n:] == -1).all() and (tree.parents[r, n:] == -1).all()
    return tree.tokens[r, :n].tolist(), tree.parents[r, :n].tolist()


def test_fixture_s_gives_the_known_stream() -> None:
    token, out = PROMPT[-1], []
    for _ in STREAM:
        row = logits((token,))
        token = row.index(10.0)
        assert sorted(row)[-2] == 0.0 and len(row) == V
        out.append(token)
    assert out == STREAM
    assert always_right((1, 2, 7), 5) == STREAM[:5]
    two = right_for(2)((7,), 4)
    assert two == [38, 1, after(1) + 1, after(after(1) + 1) + 1] == [38, 1, 9, 49]


def test_chains_see_the_committed_tokens_only_and_may_be_short() -> None:
    seen = []

    def drafts(prefix: tuple[int, ...], count: int) -> list[int]:
        seen.append((prefix, count))
        return {1: [5, 6, 7], 2: [8, -1, 9], 3: [], 4: [-1, -1, -1]}[len(prefix)]

    tree = ScriptedDrafter(drafts).propose(state([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]), TreeSpec.chain(3), False)
    assert seen == [((1,), 3), ((1, 2), 3), ((1, 2, 3), 3), ((1, 2, 3, 4), 3)]
    assert tree.is_chain and tree.probs is None and tree.width > tree.depth
    assert [of(tree, r) for r in range(4)] == [
        ([1, 5, 6, 7], [-1, 0, 1, 2]),
        ([2, 8], [-1, 0]),
        ([3], [-1]),
        ([4], [-1]),
    ]


def test_chains_keep_to_the_budget_and_to_max_drafts() -> None:
    drafter = ScriptedDrafter(lambda prefix, count: list(range(20, 30)))
    tree = drafter.propose(state([[1], [2], [3]], [63, 1, 0]), TreeSpec.chain(3), False)
    assert [of(tree, r)[0] for r in range(3)] == [[1, 20, 21, 22], [2, 20], [3]]


def test_trees_keep_their_parents_and_lose_what_is_too_deep() -> None:
    drafter = ScriptedDrafter(lambda prefix, count: ([10, 11, 12, 13, 14], [0, 0, 2, 1, 2]))
    tree = drafter.propose(state([[1], [2], [3]], [63, 1, 0]), SPEC, False)
    assert not tree.is_chain and tree.depth >= 2
    assert of(tree, 0) == ([1, 10, 11, 12, 13, 14], [-1, 0, 0, 2, 1, 2])
    assert of(tree, 1) == ([2, 10, 11], [-1, 0, 0])
    assert of(tree, 2) == ([3], [-1])
    assert tree.depths()[0].tolist() == [0, 1, 1, 2, 2, 2]


def test_an_empty_tree_is_the_root() -> None:
    tree = ScriptedDrafter(lambda prefix, count: ([], [])).propose(state([[1, 4]]), SPEC, False)
    assert of(tree, 0) == ([4], [-1])


def test_it_refuses_other_devices() -> None:
    drafter = ScriptedDrafter(always_right)
    with pytest.raises(ValueError, match="device: found meta, allowed: cpu"):
        drafter.allocate(4, 4, torch.device("meta"))
    drafter.allocate(4, 4, torch.device("cpu"))


def test_what_exceeds_the_trees_depth_is_cut() -> None:
    chain = ScriptedDrafter(lambda prefix, count: [10, 11, 12, 13, 14])
    tree = chain.propose(state([[1], [2]], [63, 1]), SPEC, False)
    assert tree.depth == SPEC.depth == 2
    assert [of(tree, r) for r in range(2)] == [([1, 10, 11], [-1, 0, 1]), ([2, 10], [-1, 0])]
    deep = ScriptedDrafter(lambda prefix, count: ([10, 11, 12, 13], [0, 1, 2, 1]))
    assert of(deep.propose(state([[1]]), SPEC, False), 0) == ([1, 10, 11, 13], [-1, 0, 1, 1])


@pytest.mark.parametrize(
    "proposal, spec, message",
    [
        (([10, 11], [0]), SPEC, r"parents: found \[0\] for 2 drafts, allowed: for draft i, 0 to i"),
        (([10, 11], [0, 2]), SPEC, r"parents: found \[0, 2\] for 2 drafts"),
        (([10, 11], [0, -1]), SPEC, r"parents: found \[0, -1\] for 2 drafts"),
        (([10, -1], [0, 1]), SPEC, r"drafts: found \[10, -1\], allowed: ids from 0 in a tree"),
        (([10], [0]), TreeSpec.chain(2), r"drafts: found a tree, allowed: a list"),
    ],
)
def test_malformed_trees_are_refused(proposal, spec: TreeSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedDrafter(lambda prefix, count: proposal).propose(state([[1]]), spec, False)
