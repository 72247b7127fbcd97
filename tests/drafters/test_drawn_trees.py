"""Trees that are drawn: every outcome of the draws enumerated, each verified by an independent float64 transcription."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from drafters.tree import DraftTree, TreeSpec
from drafters.tree_growth import draw_tree
from drafters.tree_search import best_tree, drawn_profile, drawn_tree
from dspark_runtime import acceptance
from verify_kernels import rng

V, DEPTH = 3, 3
LENGTH = DEPTH + 1
NARROW, WIDE = TreeSpec((-1, 0, 0, 1, 1, 3)), TreeSpec((-1, 0, 0, 0, 1, 2))


def tables(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """For each prefix of d tokens, by its code: the target's law p and the drafter's q [V^d, V] float64, and a
    confidence [V^d] float32 that depends on the prefix as much as it can and has nothing to do with either."""
    generator = torch.Generator().manual_seed(seed)

    def law(d: int) -> Tensor:
        x = torch.rand(V**d, V, generator=generator, dtype=torch.float64) ** 2 + 0.05
        return x / x.sum(1, keepdim=True)

    p, q = ([law(d) for d in range(LENGTH)] for _ in range(2))
    return p, q, [torch.rand(V**d, generator=generator) for d in range(LENGTH)]


def joint(p: list[Tensor], code: int = 0, depth: int = 0) -> Tensor:
    """Law of the tokens behind a prefix, up to LENGTH in all, [V^(LENGTH - depth)]."""
    law = torch.ones(1, dtype=torch.float64)
    for d in range(depth, LENGTH):
        rows = code * V ** (d - depth) + torch.arange(V ** (d - depth))
        law = (law[:, None] * p[d][rows]).flatten()
    return law


def enumerated(spec: TreeSpec, q: list[Tensor], sure: list[Tensor], adapt: bool) -> tuple[DraftTree, Tensor]:
    """Every outcome of all the draws as a row of one batch, with its probability."""
    counts = [0] * spec.num_nodes  # draws of each node, as a first run asks for them

    def count(k: int, nodes: slice, tokens: Tensor, carry, ranks: int):
        counts[nodes] = [ranks] * tokens.shape[1]
        return torch.zeros(1, tokens.shape[1], ranks, dtype=torch.int64), torch.zeros(1, 1, V), None, ()

    draw_tree(torch.zeros(1, dtype=torch.int64), count, spec, V, adapt)
    options = [torch.tensor(list(itertools.permutations(range(V), c))) if c else None for c in counts]
    picks = torch.cartesian_prod(*[torch.arange(len(o)) for o in options if o is not None])
    weights = torch.ones(len(picks), dtype=torch.float64)

    def draws(k: int, nodes: slice, tokens: Tensor, carry, ranks: int):
        code = carry[0] * V + tokens if k else torch.zeros_like(tokens)
        ids = torch.stack([options[i][picks[:, i]] for i in range(nodes.start, nodes.stop)], 1)
        left = q[k][code].clone()
        for j in range(ranks):
            one = left.gather(2, ids[:, :, j : j + 1])
            weights.mul_((one / left.sum(2, keepdim=True)).prod(1).squeeze(1))
            left.scatter_(2, ids[:, :, j : j + 1], 0.0)
        return ids, q[k][code].float(), sure[k][code], (code,)

    tree = draw_tree(torch.zeros(len(picks), dtype=torch.int64), draws, spec, V, adapt)
    assert weights.sum() == pytest.approx(1)
    return tree, weights


def verified(tree: DraftTree, row: int, p: list[Tensor], q: list[Tensor], node=0, code=0, depth=0) -> Tensor:
    """Law of what is emitted behind a node that was reached, recursive rejection written out; as `joint`."""
    size = V ** (LENGTH - depth - 1)
    out, here = torch.zeros(V * size, dtype=torch.float64), 1.0
    target, draft = p[depth][code].clone(), q[depth][code].clone()
    for child in range(1, int(tree.num_nodes[row])):
        if int(tree.parents[row, child]) != node:
            continue
        x = int(tree.tokens[row, child])
        accept = min(1.0, float(target[x] / draft[x]))
        below = verified(tree, row, p, q, child, code * V + x, depth + 1)
        out[x * size : (x + 1) * size] += here * accept * below
        here *= 1 - accept
        if here == 0:
            return out
        target = (target - draft).clamp(min=0)
        target /= target.sum()
        draft[x] = 0
        draft /= draft.sum()
    for x in range(V):
        out[x * size : (x + 1) * size] += here * target[x] * joint(p, code * V + x, depth + 1)
    return out


def law_of(tree: DraftTree, weights: Tensor, p: list[Tensor], q: list[Tensor]) -> Tensor:
    return sum(w * verified(tree, row, p, q) for row, w in enumerate(weights.tolist()))


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize(("spec", "seed"), [(NARROW, 0), (NARROW, 1), (WIDE, 5)])
def test_drawn_trees_emit_the_targets_law(spec: TreeSpec, seed: int, adapt: bool) -> None:
    p, q, sure = tables(seed)
    tree, weights = enumerated(spec, q, sure, adapt)
    shapes = {tuple(row) for row in tree.parents.tolist()}
    assert len(shapes) > 1 if adapt else shapes == {spec.parents}
    assert [row.count(d) for d in range(LENGTH) for row in tree.depths().tolist()[:1]] == [
        spec.depths.count(d) for d in range(LENGTH)
    ]
    assert (law_of(tree, weights, p, q) - joint(p)).abs().sum() < 1e-9


def test_the_enumeration_fails_a_shape_that_looked_at_its_own_draws() -> None:
    p, q, sure = tables(0)
    tree, weights = enumerated(NARROW, q, sure, True)
    law = law_of(tree.prune(tree.tokens > 0), weights, p, q)
    assert law.sum() == pytest.approx(1) and (law - joint(p)).abs().sum() > 0.01


def test_the_enumeration_fails_a_level_that_is_cut_after_the_next_one_was_drawn() -> None:
    """The second child goes where the first one's own child looks good: its place depends on its sibling's draw, which
    is allowed, and on whether it would have had the better one itself, which is not."""
    p, q, sure = tables(0)
    tree, weights = enumerated(TreeSpec((-1, 0, 0, 1, 2)), q, sure, False)
    good = torch.tensor([0.1, 0.5, 0.9])[tree.tokens]
    keep = torch.ones_like(tree.tokens, dtype=torch.bool)
    keep[:, 2] = good[:, 2] * good[:, 4] > good[:, 1] * good[:, 3]
    keep[:, 1] = ~keep[:, 2]
    law = law_of(tree.prune(keep), weights, p, q)
    assert law.sum() == pytest.approx(1) and (law - joint(p)).abs().sum() > 0.01


def test_the_runtimes_rule_on_drawn_trees() -> None:
    """200,000 requests, draws and verdicts from the runtime's own random numbers."""
    p, q, sure = tables(3)
    seeds = torch.arange(200_000)
    zero = torch.zeros_like(seeds)
    spec = TreeSpec((-1, 0, 0, 1, 1, 2, 3))

    def draws(k: int, nodes: slice, tokens: Tensor, carry, ranks: int):
        code = carry[0] * V + tokens if k else torch.zeros_like(tokens)
        key = torch.arange(nodes.start, nodes.stop)[:, None] * V + torch.arange(ranks)
        law = q[k][code].float()
        u = rng.uniform(seeds[:, None, None], zero[:, None, None], rng.DRAFT, key)
        return rng.sample_distinct(law, u), law, sure[k][code], (code,)

    tree = draw_tree(zero, draws, spec, V, adapt=True)
    code = torch.zeros_like(tree.tokens)
    for j in range(1, spec.num_nodes):
        code[:, j] = code.gather(1, tree.parents[:, j : j + 1]).squeeze(1) * V + tree.tokens[:, j]
    n, depths = spec.num_nodes, torch.tensor(spec.depths)
    probs = torch.stack([p[int(depths[j])][code[:, j]].float() for j in range(n)], 1)
    got = acceptance.tree_rejection(tree, probs.flatten(0, 1), torch.arange(len(seeds) * n).view(-1, n), seeds, zero)
    assert (got.num_emitted > DEPTH).any()
    total = torch.zeros_like(seeds)
    for i in range(LENGTH):
        plain = rng.sample(p[i][total].float(), rng.uniform(seeds, zero + i, rng.TARGET))
        total = total * V + torch.where(i < got.num_emitted, got.tokens[:, min(i, got.tokens.shape[1] - 1)], plain)
    counts, expected = total.bincount(minlength=V**LENGTH).double(), joint(p) * len(seeds)
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-3


def test_a_level_goes_where_draws_are_likeliest_to_be_accepted() -> None:
    spec = TreeSpec((-1, 0, 0, 1, 1, 2))
    sure = torch.tensor([[0.5], [0.6]])

    def draws(k: int, nodes: slice, tokens: Tensor, carry, ranks: int):
        w = tokens.shape[1]
        c = sure if k == 0 else torch.tensor([[0.3, 0.9], [0.9, 0.1]])
        return torch.arange(w * ranks).view(1, w, ranks).expand(2, -1, -1), torch.zeros(2, w, 99), c, ()

    tree = draw_tree(torch.zeros(2, dtype=torch.int64), draws, spec, 99, True)
    # Row 0: children of rates 0.5, 0.125; of node 1 0.15 and 0.0525, of node 2 0.1125 and 0.005.
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 1], [-1, 0, 0, 1, 1, 2]]
    assert tree.tokens.tolist() == [[0, 0, 1, 0, 3, 1], [0, 0, 1, 0, 1, 3]]
    want = [[1, 0.5, 0.125, 0.3, 0.9, 0.105], [1, 0.6, 0.12, 0.9, 0.045, 0.1]]
    torch.testing.assert_close(tree.confidence, torch.tensor(want))


def test_the_profile_of_draws_is_a_distribution_over_siblings_and_its_tree_is_the_best() -> None:
    for first in (0.0, 0.3, 0.66, 1.0):
        rates = drawn_profile(first, 40)
        left = math.prod(1 - first / j for j in range(1, 41))
        assert math.fsum(rates) == pytest.approx(1 - left) and rates == sorted(rates, reverse=True)
    for n, depth in ((2, 7), (16, 7), (64, 7), (9, 2)):
        spec = drawn_tree(n, depth)
        assert spec.num_nodes == n and spec.depth <= depth
        assert spec == best_tree(drawn_profile(0.6, 16), n, depth)
