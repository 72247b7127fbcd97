"""The tree kernels against the reference, exactly, over random trees with padding in strided tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.verify_kernels.triton_cases import DEVICE, kernels, on_device, poisoned, same  # noqa: F401
from verify_kernels.reference import trees

OURS = kernels()
often = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def padding(x: Tensor, n: int) -> Tensor:
    """A view of wider rows."""
    wide = torch.full((x.shape[0], n + 3), -1)
    wide[:, : x.shape[1]] = x
    return wide[:, :n]


@st.composite
def forests(draw: st.DrawFn) -> dict:
    """Trees of up to 4 requests, tokens from few so that siblings and cousins repeat, and padding behind."""
    r, n = draw(st.integers(1, 4)), draw(st.integers(1, 64))
    seed, chain = draw(st.integers(0, 2**32)), draw(st.booleans())
    g = torch.Generator().manual_seed(seed)
    near = int(torch.randint(1, 9, (), generator=g))
    tokens, parents = torch.full((r, n), -1), torch.full((r, n), -1)
    for i in range(r):
        count = int(torch.randint(1, n + 1, (), generator=g))
        tokens[i, :count] = torch.randint(5, (count,), generator=g)
        for j in range(1, count):
            low = max(0, j - near)
            parents[i, j] = j - 1 if chain else int(torch.randint(low, j, (), generator=g))
    depth = max(int(trees.tree_masks(parents, 63)[1].max()), 1)
    more = dict(n=n, depth=depth, chain=chain, g=g, choices=torch.randint(5, (r, n), generator=g))
    return dict(tokens=padding(tokens, n), parents=padding(parents, n), **more)


def both(name: str, *args: object) -> None:
    wanted = getattr(trees, name)(*args)
    same(OURS[name](*map(on_device, args)), wanted)


@often
@given(forests())
def test_masks(case: dict) -> None:
    wanted = trees.tree_masks(case["parents"], case["depth"])
    found = OURS["tree_masks"](on_device(case["parents"]), case["depth"])
    real = case["tokens"] >= 0
    same([x.cpu()[real] for x in found], [x[real] for x in wanted])
    same(found[1], wanted[1])


@often
@given(forests())
def test_follow(case: dict) -> None:
    args = (case["tokens"], case["parents"], case["choices"], case["depth"])
    both("follow_tree", *args)
    if case["chain"] and case["n"] > case["depth"]:
        same(trees.follow_tree(*args, is_chain=True), trees.follow_tree(*args))


@often
@given(forests())
def test_prune(case: dict) -> None:
    keep = torch.rand(case["tokens"].shape, generator=case["g"]) < 0.8
    both("prune_tree", case["tokens"], case["parents"], keep, case["depth"])


@often
@given(forests())
def test_reach(case: dict) -> None:
    wanted = torch.randint(case["depth"] + 1, case["tokens"][:, 0].shape, generator=case["g"])
    args = (case["tokens"], case["parents"], case["choices"], wanted, case["depth"])
    both("reach_tree", *args)
    if case["chain"] and case["n"] > case["depth"]:
        same(trees.reach_tree(*args, is_chain=True), trees.reach_tree(*args))


@often
@given(forests(), st.integers(1, 40))
def test_place(case: dict, page_size: int) -> None:
    tokens, g = case["tokens"], case["g"]
    r = tokens.shape[0]
    lengths = torch.randint(1, 90, (r,), generator=g)
    pages = torch.randint(1, 1000, (r, (160 // page_size) + 2), generator=g, dtype=torch.int32)
    vocab = int(torch.randint(2, 7, (), generator=g))
    args = (tokens, case["parents"], lengths, pages, page_size, case["depth"], vocab, case["chain"])
    found, wanted = OURS["place_tree"](*map(on_device, args)), trees.place_tree(*args)
    masks = [x.masks if x.masks is None else x.masks.cpu()[tokens >= 0] for x in (found, wanted)]
    same(masks[0], masks[1])
    same(found._replace(masks=None), wanted._replace(masks=None))
    kept = torch.randint(case["n"] + 1, (r,), generator=g)
    for limit in (50, 4096):
        both("place_block", lengths, pages, case["n"], page_size, limit, kept)
        both("place_block", lengths, pages[:, :2], case["n"], page_size, limit, None)


@pytest.mark.parametrize("even", [False, True])
def test_synthetic_drafts(even: bool) -> None:
    g = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (200,), generator=g)
    steps = torch.randint(0, 10_000, (200,), generator=g)
    for depth in (1, 7, 33):
        survival = torch.rand(depth, generator=g, dtype=torch.float64).sort(descending=True).values
        both("synthetic_drafts", seeds, steps, survival, even)


@often
@given(forests())
def test_commit(case: dict) -> None:
    tokens, g = case["tokens"], case["g"]
    (r, n), depth = tokens.shape, case["depth"]
    _, emitted, count = trees.follow_tree(tokens, case["parents"], case["choices"], depth)
    best = torch.randn(r, n, generator=g)
    best[torch.rand(r, n, generator=g) < 0.05] = float("nan")
    best[torch.rand(r, n, generator=g) < 0.05] = float("-inf")
    length = 100
    state = [torch.randint(9, (r, length), generator=g)]
    state += [torch.randint(1, 30, (r,), generator=g) for _ in range(3)]
    rest = (emitted, count, (tokens >= 0).sum(1), best, torch.full((r,), -1))
    theirs = [x.clone() for x in state]
    ours = [x.clone().to(DEVICE) for x in state]
    wanted = trees.commit_tokens(*theirs, *rest)
    same(OURS["commit_tokens"](*ours, *map(on_device, rest)), wanted)
    theirs[0][:, -1] = ours[0][:, -1] = 0  # takes the padding
    same(ours, theirs)
