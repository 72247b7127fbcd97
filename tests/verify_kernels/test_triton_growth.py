"""The growth kernels against the reference on random levels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.verify_kernels.triton_cases import DEVICE, kernels, on_device, poisoned, same  # noqa: F401
from verify_kernels.errors import KernelError
from verify_kernels.reference import growth
from verify_kernels.reference.growth import Nodes

OURS = kernels()
often = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("r, w, m, rank", [(1, 1, 32, 40), (3, 17, 5, 9), (2, 31, 33, 65)])
def test_candidate_logits(r: int, w: int, m: int, rank: int) -> None:
    g = torch.Generator().manual_seed(w)
    vocab, slots = 70, 3
    values = torch.randn(r, slots, m, generator=g)[:, 1]
    ids = torch.randint(vocab, (r, slots, m), generator=g)[:, 1]
    w2, table = torch.randn(vocab, rank, generator=g), torch.randn(50, rank, generator=g)
    rows = torch.randint(50, (r, w + 4), generator=g)[:, :w]
    args = (values, ids, w2, table, rows, torch.tensor([0.0, 0.5, 2.0])[:r])
    found = OURS["candidate_logits"](*map(on_device, args)).cpu()
    torch.testing.assert_close(found, growth.candidate_logits(*args), rtol=1e-4, atol=1e-4)


@st.composite
def levels(draw: st.DrawFn) -> dict:
    r, w, m = draw(st.integers(1, 3)), draw(st.integers(1, 33)), draw(st.integers(1, 40))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    first = int(torch.randint(1, 5, (), generator=g))
    keep = int(torch.randint(1, min(63, w * m) + 1, (), generator=g))
    out = first + w + int(torch.randint(3, (), generator=g))
    nodes = Nodes.room(torch.zeros(r, dtype=torch.int64), out + keep + 2)
    for x in nodes[:2]:
        x[:] = torch.randint(99, x.shape, generator=g)
    for x in nodes[2:]:
        x[:] = -torch.rand(x.shape, generator=g)
    nodes.scores[torch.rand(nodes.scores.shape, generator=g) < 0.1] = float("-inf")
    candidates = torch.randint(1000, (r, w if draw(st.booleans()) else 1, m), generator=g)
    limits = torch.randint(0, 4, (r,), generator=g)
    logits = torch.randn(r, w, m, generator=g)
    columns = dict(level=1, first=first, out=out, keep=keep)
    return dict(nodes=nodes, q=logits, candidates=candidates, max_drafts=limits, **columns)


@often
@given(levels(), st.booleans())
def test_grow_level(case: dict, is_logits: bool) -> None:
    """Powers of two as probabilities, whose logarithms are exact enough to tie, then everything equal; or logits."""
    if not is_logits:
        case["q"] = torch.exp2((case["q"] * 2).round().clamp(-4, 0))
        case["nodes"].scores.mul_(4).round_().div_(4)
    ours = Nodes(*(x.clone().to(DEVICE) for x in case["nodes"]))
    theirs = Nodes(*(x.clone() for x in case["nodes"]))
    rest = [case[x] for x in ("q", "candidates", "max_drafts", "level", "first", "out", "keep")]
    wanted = growth.grow_level(theirs, *rest, is_logits)
    found = OURS["grow_level"](ours, *map(on_device, rest), is_logits).cpu()
    columns = slice(case["out"], case["out"] + case["keep"])
    live = theirs.scores[:, columns] > float("-inf")
    torch.testing.assert_close(ours.scores.cpu(), theirs.scores, rtol=1e-5, atol=1e-5)
    same(found[live], wanted[live])
    for x, y in zip(ours[:2], theirs[:2]):
        same(x[:, columns].cpu()[live], y[:, columns][live])
        x[:, columns] = y[:, columns] = 0
        same(x, y)
    torch.testing.assert_close(ours.steps[:, columns].cpu()[live], theirs.steps[:, columns][live], rtol=1e-4, atol=1e-6)


@often
@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 64), st.integers(0, 2**32), st.booleans())
def test_best_tree(r: int, total: int, size: int, seed: int, tied: bool) -> None:
    """Of trees whose scores fall along their paths, some of them equal."""
    g = torch.Generator().manual_seed(seed)
    size = min(size, total)
    nodes = Nodes.room(torch.arange(r), total + 3)
    for j in range(1, total):
        parent = torch.randint(j, (r,), generator=g)
        step = -torch.rand(r, generator=g) * 3
        step = step.round() if tied else step
        step[torch.rand(r, generator=g) < 0.05] = float("-inf")
        nodes.parents[:, j], nodes.tokens[:, j] = parent, torch.randint(99, (r,), generator=g)
        nodes.scores[:, j], nodes.steps[:, j] = nodes.scores[torch.arange(r), parent] + step, step
    wanted = growth.best_tree(nodes, total, size)
    found = OURS["best_tree"](Nodes(*map(on_device, nodes)), total, size)
    same(found[:3], wanted[:3])
    live = wanted[0] >= 0
    same(found[3].cpu()[live], wanted[3][live])


def test_too_many_children_are_refused() -> None:
    nodes = Nodes.room(torch.zeros(1, dtype=torch.int64), 99)
    with pytest.raises(KernelError, match="candidates: found 600 for each of 31 nodes"):
        OURS["grow_level"](
            nodes, torch.rand(1, 31, 600), torch.zeros(1, 1, 600).long(), torch.ones(1).long(), 0, 0, 31, 9
        )
