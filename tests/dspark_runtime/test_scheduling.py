"""Confidence-scheduled verification: exact laws by enumeration, Algorithm 1 by transcription, whole engine runs.

The laws are exact: every block of drafts, every acceptance draw on a grid and every drawn token is enumerated, with the
policy's decision in between.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.base import BatchState
from drafters.draft_model import DraftModel
from drafters.dspark.load import load_drafter
from drafters.ngram import NgramDrafter
from drafters.scripted import ScriptedDrafter
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime import acceptance
from dspark_runtime.acceptance import Accepted, chain_path
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.scheduling import policies, scheduler
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.scheduling.estimator import OnlineEstimator
from dspark_runtime.scheduling.names import label, make_policy, split
from dspark_runtime.scheduling.policies import Budget, Drafts, EarlyStop, FixedLength, Lagged, Policy, Threshold
from dspark_runtime.scheduling.scheduler import Scheduler, survival
from dspark_runtime.synthetic import SyntheticLaw
from dspark_runtime.targets import load_target
from dspark_runtime.tuning.curve import Curve
from tests.drafters import planted
from tests.dspark_runtime.test_acceptance import (
    BUSHY, CHAIN, LENGTH, Enumerated, check_form, completed, deterministic, joint, padded_trees, rows_of, tables,
    total_variation,
)  # fmt: skip
from tests.dspark_runtime.test_capturable import NoHostReads
from tests.dspark_runtime.test_engine import TREE, all_free, bushy, greedy, right_for, target
from tests.dspark_runtime.tuning.curves import chain_curve, curve, point

CPU = torch.device("cpu")
SIBLINGS = TreeSpec((-1, 0, 0, 1, 2))
ROOT = Path(__file__).resolve().parents[2]


def costs(ms: list[float], requests: tuple[int, ...] = (1,), between: str = "linear", contexts=(64,)) -> Curve:
    """The same milliseconds by tokens a request for every number of requests and context, chains and trees."""
    points = [
        point(b, t, depth, x, context=c)
        for b in requests for c in contexts for t, x in enumerate(ms, start=1) for depth in {t - 1, min(t - 1, 2)}
    ]  # fmt: skip
    return curve(points, between)


def batch(rows: int, context: int = 10) -> BatchState:
    z = torch.zeros(rows, dtype=torch.int64)
    return BatchState(z[:, None], z + context + 1, z[:, None].int(), z + 9, z.float(), z, z, context + 1)


class Retrospective(EarlyStop):
    """The best budget in hindsight, by this step's confidences: not lossless for sampled drafts."""

    def keep(self, drafts: Drafts) -> Tensor:
        places, best = policies.ranked(drafts.survival)
        rows = len(drafts.survival)
        rate = policies.throughput(policies.descending(drafts.survival), self.costs.ms(drafts.context_lens), rows)
        return policies.first(places, best, rows + rate.argmax(0, keepdim=True))


# ------------------------------------------------------------------ exact laws


def laws(monkeypatch, rule, tree: DraftTree, p, q, grids: dict[int, int], share=None) -> Tensor:
    """Exact law of LENGTH tokens that each tree leads to under a rule, [R, V^LENGTH] float64.

    grids: accept index -> number of midpoints; share: index -> index whose draw it uses.
    """
    r, n = tree.tokens.shape
    vocab = p[0].shape[1]
    draws = list(itertools.product(*[[(i + 0.5) / g for i in range(g)] for g in grids.values()], range(vocab)))
    draws = torch.tensor(draws, dtype=torch.float64)
    m = len(draws)
    fields = (x.repeat_interleave(m, 0) for x in (tree.tokens, tree.parents, tree.num_nodes))
    many = DraftTree(*fields, tree.depth, tree.is_chain)
    probs, rows = rows_of(many, p, q)
    accept = torch.full((r * m, n), torch.nan, dtype=torch.float64)
    for column, index in enumerate(grids):
        accept[:, index] = draws[:, column].repeat(r)
    for index, source in (share or {}).items():
        accept[:, index] = accept[:, source]
    fake = Enumerated(accept, draws[:, -1].long().repeat(r))
    monkeypatch.setattr(acceptance, "rng", fake)
    got = rule(many, probs, rows, torch.arange(r * m), torch.zeros(r * m, dtype=torch.int64))
    monkeypatch.undo()
    check_form(many, got)
    weights = fake.weights * vocab / m
    return spread(got, weights, torch.arange(r).repeat_interleave(m), p)


def spread(got: Accepted, weights: Tensor, owner: Tensor, p) -> Tensor:
    """Weighted outcomes -> a law of LENGTH tokens for each owner, continued by plain decoding."""
    vocab, count = p[0].shape[1], int(owner.max()) + 1
    law = torch.zeros(count, 1, dtype=torch.float64)
    code = torch.zeros_like(owner)
    for i in range(LENGTH):
        law = (law[..., None] * p[i].double()).flatten(1)
        code = code * vocab + (got.tokens[:, i] if i < got.tokens.shape[1] else -1)
        ended = got.num_emitted == i + 1
        law.view(-1).scatter_add_(0, owner[ended] * law.shape[1] + code[ended], weights[ended])
    return law


def block_laws(monkeypatch, rule, tree: DraftTree, p, q, grids=None, share=None) -> Tensor:
    """As `laws` for block verification of chains, from the code's own stopping probabilities and weights."""
    probs, rows = rows_of(tree, p, q)
    w, h = acceptance.block_stops(tree, probs, rows)
    r, vocab = len(w), p[0].shape[1]
    count = tree.num_nodes - 1
    left = torch.ones(r, dtype=torch.float64)
    out = torch.zeros(r, vocab**LENGTH, dtype=torch.float64)
    for kept in range(tree.depth, -1, -1):
        stop, left = left * h[:, kept], left * (1 - h[:, kept])
        here = torch.nan_to_num(probs[rows[:, kept]].double())
        residual = (w[:, kept : kept + 1] * here - torch.nan_to_num(tree.probs[:, kept]).double()).clamp(min=0)
        residual = torch.where((kept == count)[:, None] | (residual.sum(1, keepdim=True) <= 0), here, residual)
        residual = torch.nan_to_num(residual / residual.sum(1, keepdim=True).clamp(min=1e-300))
        tokens = torch.full((r, tree.depth + 1), -1)
        tokens[:, :kept] = tree.tokens[:, 1 : kept + 1].clamp(min=0)  # padding has no weight
        for y in range(vocab):
            tokens[:, kept] = y
            got = Accepted(tokens, tokens, torch.full((r,), kept + 1))
            out += spread(got, stop * residual[:, y] * (kept <= count), torch.arange(r), p)
    return out


_known: dict[tuple, Tensor] = {}


def known_laws(monkeypatch, rule: str, case: int, tree: DraftTree, p, q) -> Tensor:
    """`laws` of a rule, each tree's computed once for a case (which stands for p and q): most policies cut alike."""
    accept, laws_of, *_, grids, share = RULES[rule]
    keys = [(rule, case, *map(tuple, rows)) for rows in zip(tree.tokens.tolist(), tree.parents.tolist())]
    new = list({key: i for i, key in enumerate(keys) if key not in _known}.values())
    if new:
        part = DraftTree(tree.tokens[new], tree.parents[new], tree.num_nodes[new], tree.depth, tree.is_chain)
        _known.update(zip((keys[i] for i in new), laws_of(monkeypatch, accept, part, p, q, grids, share)))
    return torch.stack([_known[key] for key in keys])


def blocks(spec: TreeSpec, vocab: int) -> DraftTree:
    """Every tree of a topology, siblings different."""
    n = spec.num_nodes
    pairs = [(i, j) for j in range(n) for i in range(1, j) if spec.parents[i] == spec.parents[j]]
    every = itertools.product(range(vocab), repeat=n - 1)
    tokens = [(0, *t) for t in every if all(t[i - 1] != t[j - 1] for i, j in pairs)]
    return DraftTree.from_spec(spec, torch.tensor(tokens))


def chances(tree: DraftTree, q) -> Tensor:
    """Probability [R] float64 of drawing each tree from q, siblings without replacement."""
    rows_of(tree, q, q)
    weights = torch.ones(len(tree.tokens), dtype=torch.float64)
    parents = tree.parents[0].tolist()
    for j in range(1, tree.width):
        law = tree.probs[:, parents[j]].double().clone()
        for i in range(1, j):
            if parents[i] == parents[j]:
                law.scatter_(1, tree.tokens[:, i : i + 1], 0.0)
        mass = law.sum(1)
        weights *= law.gather(1, tree.tokens[:, j : j + 1]).squeeze(1) / mass.masked_fill(mass == 0, 1.0)
    return weights


def sure_of(tree: DraftTree, seed: int, steps: int | None = None) -> Tensor:
    """Confidences that depend on what stands before a node and on nothing else; siblings have the same. steps: only so
    many values, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    vocab = int(tree.tokens.max()) + 1
    by_prefix = [torch.rand(vocab**d, generator=generator) ** 0.5 for d in range(tree.depth)]
    code, depths = torch.zeros_like(tree.tokens), tree.depths()
    out = torch.ones(tree.tokens.shape)
    for j in range(1, tree.width):
        above = tree.parents[:, j].clamp(min=0)
        before = code.gather(1, above[:, None]).squeeze(1)
        out[:, j] = by_prefix[int(depths[0, j]) - 1][before]
        code[:, j] = before * vocab + tree.tokens[:, j]
    return out if steps is None else (out * steps).round() / steps


POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: FixedLength(2),
    "fixed by load": lambda: FixedLength({1: 1, 2: 2}),
    "threshold": lambda: Threshold(0.4),
    "threshold by load": lambda: Threshold({1: (2, 0.3), 2: (2, 0.5)}),
    "budget": lambda: Budget(4),
    "early stop": lambda: EarlyStop(costs([10, 10.5, 12.5, 13.5, 17], (1, 2))),
    "early stop on steps": lambda: EarlyStop(costs([10, 10, 14, 14, 14.5], (1, 2), "step")),
    "async": lambda: Lagged(costs([10, 10.5, 12.5, 13.5, 17], (1, 2))),
    "async on steps": lambda: Lagged(costs([10, 14, 14, 14.5, 19], (1, 2), "step")),
}


def trimmed(policy: Callable[[], Policy], worlds: DraftTree, rows: int, estimated: bool, seed: int) -> DraftTree:
    """Each `rows` successive trees as the batch of one engine, scheduled after two steps of the same past."""
    parts = []
    past = [torch.rand(rows, worlds.width, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)]
    for first in range(0, len(worlds.tokens), rows):
        here = slice(first, first + rows)
        tree = DraftTree(
            worlds.tokens[here], worlds.parents[here], worlds.num_nodes[here], worlds.depth, worlds.is_chain,
            worlds.probs[here], None if estimated else worlds.confidence[here],
        )  # fmt: skip
        s = Scheduler(policy())
        spec = TreeSpec(tuple(worlds.parents[0].tolist()))
        s.start(spec, torch.arange(rows), calibrated=not estimated)
        for sure in past:
            before = replace(tree, tokens=torch.zeros_like(tree.tokens), confidence=None if estimated else sure)
            if estimated:  # a past that tells the bins apart
                before.probs = sure[..., None].expand(-1, -1, 3)
            before = s.schedule(before, batch(rows))
            kept = (before.num_nodes - 1).clamp(max=1)
            if estimated:
                path = torch.where(torch.arange(before.depth + 1) <= kept[:, None], chain_path(before, kept), -1)
                s.observe(before, Accepted(path, path, kept + 1))
        parts.append(s.schedule(tree, batch(rows)))
    whole = [torch.cat([getattr(t, name) for t in parts]) for name in ("tokens", "parents", "num_nodes", "probs")]
    return DraftTree(*whole[:3], worlds.depth, worlds.is_chain, whole[3])


RULES = {
    # rule, laws of it, topology, parts of p and q, grids, share
    "standard": (acceptance.chain_rejection, laws, CHAIN, 4, {0: 12, 1: 12, 2: 12}, {3: 2}),
    "block": (acceptance.block_verification, block_laws, CHAIN, None, None, None),
    "tree": (acceptance.tree_rejection, laws, SIBLINGS, 3, {1: 6, 2: 12, 3: 6}, {4: 3}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimated", [False, True], ids=["stated", "estimated"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_leaves_the_target_s_law(monkeypatch, name, rule, estimated, seed) -> None:
    spec, parts = RULES[rule][2:4]
    p, q = tables(3, parts, seed), tables(3, parts, 100 + seed)
    worlds = blocks(spec, 3)
    weights = chances(worlds, q)
    worlds.confidence = sure_of(worlds, seed, 4 if seed == 2 else None)
    cut = trimmed(POLICIES[name], worlds, 1, estimated, seed)
    got = known_laws(monkeypatch, rule, seed, cut, p, q)
    assert total_variation(weights @ got, joint(p)) < 1e-6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", POLICIES)
def test_requests_that_share_a_budget_keep_their_joint_law(monkeypatch, name, seed) -> None:
    spec = CHAIN
    two = torch.tensor(list(itertools.product(range(8), repeat=2)))
    p, q, law, weights, worlds = {}, {}, {}, [], []
    for r in range(2):
        p[r], q[r] = tables(2, 4, 10 * seed + r), tables(2, 4, 50 + 10 * seed + r)
        mine = DraftTree.from_spec(spec, blocks(spec, 2).tokens[two[:, r]])
        weights.append(chances(mine, q[r]))
        mine.confidence = sure_of(mine, 10 * seed + r, 3 if seed == 2 else None)
        worlds.append(mine)
    fields = (torch.stack([getattr(w, f) for w in worlds], 1).flatten(0, 1) for f in ("tokens", "parents", "num_nodes"))
    both = DraftTree(*fields, spec.depth, True)
    both.probs, both.confidence = (
        torch.stack([getattr(w, f) for w in worlds], 1).flatten(0, 1) for f in ("probs", "confidence")
    )
    cut = trimmed(POLICIES[name], both, 2, False, seed)
    for r in range(2):
        part = DraftTree(cut.tokens[r::2], cut.parents[r::2], cut.num_nodes[r::2], spec.depth, True)
        law[r] = known_laws(monkeypatch, "standard", 1000 + 10 * seed + r, part, p[r], q[r])
    got = torch.einsum("x,xi,xj->ij", weights[0] * weights[1], law[0], law[1])
    assert total_variation(got, joint(p[0])[:, None] * joint(p[1])) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_the_enumeration_fails_a_search_in_hindsight(monkeypatch, rule) -> None:
    spec, parts = RULES[rule][2:4]
    for seed in range(6):  # where few blocks have a probability, hindsight may be harmless
        p, q = tables(3, parts, seed), tables(3, parts, 100 + seed)
        worlds = blocks(spec, 3)
        weights = chances(worlds, q)
        worlds.confidence = sure_of(worlds, seed)
        # A whole block pays in about half of the worlds, a part of one in none.
        whole = 10 * float(survival(worlds, worlds.confidence).sum(1).median())
        ms = [10.0] + [whole + 20] * (spec.num_nodes - 2) + [whole]
        cut = trimmed(lambda: Retrospective(costs(ms)), worlds, 1, False, seed)
        got = weights @ known_laws(monkeypatch, rule, seed, cut, p, q)
        assert got.sum() == pytest.approx(1)
        far = total_variation(got, joint(p))
        if far > 0.005:
            return
    pytest.fail("no bias found")


@pytest.mark.parametrize(("policy", "first"), [(Retrospective, 0.85), (EarlyStop, 0.7), (Lagged, 0.7)])
def test_the_paper_s_counterexample(monkeypatch, policy, first) -> None:
    """Appendix A: steps a second 1, 0.5, 0.45. The confidence of the second draft depends on the first one."""
    p = [torch.tensor([[0.7, 0.3]]).repeat(2**d, 1) for d in range(LENGTH)]
    q = [torch.tensor([[0.5, 0.5]]).repeat(2**d, 1) for d in range(LENGTH)]
    spec = TreeSpec.chain(2)
    worlds = blocks(spec, 2)
    weights = chances(worlds, q)
    worlds.confidence = torch.tensor([[1.0, 0.8, 0.9 if x == 0 else 0.1] for x in worlds.tokens[:, 1]])
    cut = trimmed(lambda: policy(costs([1e3, 2e3, 1e3 / 0.45])), worlds, 1, False, 0)
    grids = {0: 20, 1: 20}  # 0.3 / 0.5 lies on it
    got = weights @ laws(monkeypatch, acceptance.chain_rejection, cut, p, q, grids, {2: 1})
    assert got.view(2, -1)[0].sum().item() == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("spec", [CHAIN, BUSHY])
@pytest.mark.parametrize("name", [*POLICIES, "in hindsight"])
def test_deterministic_drafts_emit_the_tokens_of_plain_sampling(spec, name) -> None:
    """Whatever the schedule: rule N draws at the target's own output indices."""
    p, seeds = tables(4, None, 5), torch.arange(200) * 7
    p = [table[:, :4] for table in p]
    line = costs([10, 10.4, 11, 13, 16, 20, 20, 25, 26], (1, 200))
    jumps = costs([10, 10, 11, 13, 16, 20, 20, 25, 26], (1, 200), "step")
    made = {
        "budget": lambda: Budget(700), "in hindsight": lambda: Retrospective(line),
        "early stop": lambda: EarlyStop(line), "async": lambda: Lagged(line),
        "early stop on steps": lambda: EarlyStop(jumps), "async on steps": lambda: Lagged(jumps),
    }  # fmt: skip
    s = Scheduler(made.get(name, POLICIES.get(name))())
    s.start(spec, torch.arange(200), calibrated=True)
    shapes = set()
    for step in range(3):
        tree = deterministic(spec, 4, 200)
        tree.confidence = torch.rand(tree.tokens.shape) ** 0.3
        tree = s.schedule(tree, batch(200))
        got = acceptance.node_sampling(tree, *rows_of(tree, p, None), seeds, torch.zeros_like(seeds))
        s.observe(tree, got)
        shapes |= set(tree.num_nodes.tolist())
        plain_tree = deterministic(TreeSpec.chain(0), 4, 200)
        plain = acceptance.node_sampling(plain_tree, *rows_of(plain_tree, p, None), seeds, torch.zeros_like(seeds))
        assert torch.equal(completed(got, p, seeds), completed(plain, p, seeds))
    assert len(shapes) > 1 or "fixed" in name


# ------------------------------------------------------------------ decisions


@st.composite
def drafted(draw, chains: bool | None = None):
    """Trees with confidences of every kind: ties, zeros, ones, and what is no probability."""
    if draw(st.booleans()) if chains is None else chains:
        r, k = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        tree = DraftTree.from_spec(TreeSpec.chain(k), torch.zeros(r, k + 1, dtype=torch.int64))
        tree = tree.limit(torch.tensor(draw(st.lists(st.integers(0, k), min_size=r, max_size=r))))
    else:
        tree = draw(padded_trees())[0]
    odd = [0.0, -0.0, 0.25, 0.5, 1.0, 1.5, -1.0, float("nan"), float("inf")]
    value = st.one_of(st.sampled_from(odd), st.floats(0, 1, width=32))
    flat = draw(st.lists(value, min_size=tree.tokens.numel(), max_size=tree.tokens.numel()))
    return replace(tree, confidence=torch.tensor(flat).view(tree.tokens.shape))


def started(policy: Policy, tree: DraftTree) -> Scheduler:
    s = Scheduler(policy)
    n = tree.width
    spec = TreeSpec.chain(n - 1) if tree.is_chain else TreeSpec((-1, *[0] * (n - 1)))
    s.start(spec, torch.arange(len(tree.tokens)), calibrated=True)
    return s


def check_trimmed(tree: DraftTree, cut: DraftTree, keep: Tensor) -> None:
    """Exactly the kept nodes, in order, with their own parents. A node that cannot be accepted may stay or go."""
    if tree.confidence is not None:
        hopeless = (survival(tree, tree.confidence) == 0) & (tree.tokens >= 0)
        keep = keep & ~hopeless & (tree.tokens >= 0)
        for r in range(len(tree.tokens)):  # those that stayed: the first ones, by the order of nodes
            hope = keep[r].sum()
            extra = hopeless[r].nonzero().flatten()[: int(cut.num_nodes[r] - hope)]
            keep[r, extra] = True
    for r in range(len(tree.tokens)):
        nodes = [j for j in range(int(tree.num_nodes[r])) if keep[r, j]]
        count = int(cut.num_nodes[r])
        assert nodes[0] == 0 and count == len(nodes)
        assert cut.tokens[r].tolist() == tree.tokens[r, nodes].tolist() + [-1] * (cut.width - count)
        parents = [-1] + [nodes.index(int(tree.parents[r, j])) for j in nodes[1:]]  # closed under ancestors
        assert cut.parents[r].tolist() == parents + [-1] * (cut.width - count)


def ordered(tree: DraftTree) -> list[tuple[float, int, int]]:
    """All drafts that can be accepted as (survival, node, row), best first."""
    alive = survival(tree, tree.confidence).tolist()
    drafts = [(x, j, r) for r, line in enumerate(alive) for j, x in enumerate(line) if j and x]
    return sorted(drafts, key=lambda d: (-d[0], d[1], d[2]))


@given(drafted())
@settings(max_examples=150, deadline=None)
def test_survival_never_rises_along_a_path(tree: DraftTree) -> None:
    alive = survival(tree, tree.confidence)
    for r, line in enumerate(alive.tolist()):
        want = [1.0]
        for j in range(1, int(tree.num_nodes[r])):
            c, above = float(tree.confidence[r, j]), int(tree.parents[r, j])
            want.append(want[above] * (0.0 if c != c else min(max(c, 0.0), 1.0)))
            assert line[j] <= line[above]
        assert line == pytest.approx(want + [0.0] * (tree.width - len(want)), rel=1e-6, abs=1e-37)
    assert not torch.signbit(alive).any()


@given(drafted(), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_a_budget_takes_the_best_drafts_and_ties_go_by_index(tree: DraftTree, spare: int) -> None:
    rows = len(tree.tokens)
    cut = started(Budget(rows + spare), tree).schedule(tree, batch(rows))
    keep = torch.zeros(tree.tokens.shape, dtype=torch.bool)
    keep[:, 0] = True
    for _, j, r in ordered(tree)[:spare]:
        keep[r, j] = True
    check_trimmed(tree, cut, keep)
    assert cut.num_nodes.sum() <= rows + spare and (cut.num_nodes <= tree.num_nodes).all()


@given(drafted(), st.floats(0, 1, width=32))
@settings(max_examples=100, deadline=None)
def test_a_threshold_cuts_every_path_where_survival_falls_below_it(tree: DraftTree, least: float) -> None:
    rows = len(tree.tokens)
    cut = started(Threshold(least), tree).schedule(tree, batch(rows))
    keep = survival(tree, tree.confidence) >= least
    assert keep[:, 0].all()
    check_trimmed(tree, cut, keep)


@given(drafted(), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_a_fixed_length_cuts_by_depth(tree: DraftTree, k: int) -> None:
    k = min(k, tree.width - 1 if tree.is_chain or tree.width == 1 else 1)
    tree.confidence = None  # it needs none
    cut = started(FixedLength(k), tree).schedule(tree, batch(len(tree.tokens)))
    check_trimmed(tree, cut, tree.depths() <= k)


def milliseconds(draw) -> list[float]:
    """Costs by tokens a request, with jumps up and down."""
    return draw(st.lists(st.floats(1, 30), min_size=9, max_size=9))


@given(drafted(), st.data(), st.sampled_from(["linear", "step"]))
@settings(max_examples=150, deadline=None)
def test_early_stop_is_algorithm_1(tree: DraftTree, data, between: str) -> None:
    rows = len(tree.tokens)
    made = costs(milliseconds(data.draw), (1, 4), between)
    policy = EarlyStop(made)
    cut = started(policy, tree).schedule(tree, batch(rows))
    ms = policy.costs.ms(batch(rows).context_lens).tolist()
    tokens, emitted = rows, float(rows)
    keep = torch.zeros(tree.tokens.shape, dtype=torch.bool)
    keep[:, 0] = True
    for a, j, r in ordered(tree):
        if not (emitted + a) / ms[tokens + 1 - rows] > emitted / ms[tokens - rows]:
            break
        tokens, emitted = tokens + 1, emitted + a
        keep[r, j] = True
    check_trimmed(tree, cut, keep)


@given(drafted(), st.data(), st.sampled_from(["linear", "step"]))
@settings(max_examples=150, deadline=None)
def test_async_fills_the_budget_of_two_steps_ago_with_today_s_best(tree: DraftTree, data, between: str) -> None:
    rows = len(tree.tokens)
    policy = Lagged(costs(milliseconds(data.draw), (1, 4), between))
    s = started(policy, tree)
    ms = policy.costs.ms(batch(rows).context_lens).tolist()
    seen = [[1.0] * (tree.width * rows)] * 2
    for _ in range(4):
        sure = torch.rand(tree.tokens.shape) if len(seen) < 4 else tree.confidence
        here = replace(tree, confidence=sure)
        best = sorted(seen[-2], reverse=True)
        rates = [sum(best[: rows + i]) / ms[i] for i in range(len(best) - rows + 1)]
        budget = max(range(len(rates)), key=lambda i: (rates[i], -i))
        near = [i for i, rate in enumerate(rates) if rate > max(rates) * (1 - 1e-9)]
        cut = s.schedule(here, batch(rows))
        keep = torch.zeros(tree.tokens.shape, dtype=torch.bool)
        keep[:, 0] = True
        for _, j, r in ordered(here)[:budget]:
            keep[r, j] = True
        if len(near) == 1:
            check_trimmed(here, cut, keep)
        seen.append(survival(here, sure).flatten().tolist())


def test_a_pass_costs_what_the_curve_says() -> None:
    points = [
        point(b, t, t - 1, 10 * b + t * t + c / 64, draft=0.5 * b, context=c)
        for b in (1, 4) for t in (1, 2, 4) for c in (64, 256)
    ]  # fmt: skip
    table = StepCosts(curve(points), TreeSpec.chain(3), 4, CPU)

    def ms(rows: int, context: int) -> list[float]:
        return table.ms(torch.full((rows,), context)).tolist()

    assert ms(1, 64) == pytest.approx([0.5 + 10 + x + 1 for x in (1, 4, 10, 16)])
    assert ms(1, 256) == pytest.approx([0.5 + 10 + x + 4 for x in (1, 4, 10, 16)])
    assert ms(1, 160) == pytest.approx([0.5 + 10 + x + 2.5 for x in (1, 4, 10, 16)])
    assert ms(1, 9999) == ms(1, 256) and ms(1, 1) == ms(1, 64)
    # Four requests: a token for one of them is a quarter of the way from one token each to two.
    assert ms(4, 64)[:6] == pytest.approx([2 + 40 + 1 + x for x in (1, 1.75, 2.5, 3.25, 4, 5.5)])
    assert ms(2, 64)[0] == pytest.approx((ms(1, 64)[0] * 2 + ms(4, 64)[0]) / 3)
    jumps = StepCosts(curve(points, "step"), TreeSpec.chain(3), 4, CPU).ms(torch.full((4,), 64)).tolist()
    assert jumps[:6] == pytest.approx([2 + 41 + x for x in (1, 4, 4, 4, 4, 16)])


def test_small_parts_of_a_tree_cost_what_chains_cost() -> None:
    points = [point(1, t, t - 1, 10 + t) for t in range(1, 4)] + [point(1, t, 2, 20 + t) for t in (4, 8)]
    spec = TreeSpec((-1, 0, 0, 0, 1, 1))
    assert StepCosts(curve(points), spec, 1, CPU).ms(torch.tensor([64])).tolist() == [11, 12, 13, 24, 25, 26]


def test_a_curve_that_does_not_reach_is_refused() -> None:
    small = costs([1, 2, 3], (2, 8))
    for rows, k, what in ((8, 2, "num_requests: found 1"), (16, 2, "num_requests: found"), (8, 7, "num_speculative")):
        made = small if what != "num_speculative" else costs([1, 2, 3], (1, 8))
        line = f"scheduler: the curve must reach 1 to {rows} requests of {k + 1} tokens.*{what}"
        with pytest.raises(ConfigError, match=line):
            Scheduler(EarlyStop(made)).start(TreeSpec.chain(k), torch.zeros(rows, dtype=torch.int64), True)


# ------------------------------------------------------------------ requests that come, move and go


class Spy:
    """Verifies everything and writes down what it was shown."""

    needs_confidence, lag = True, 2

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def start(self, spec, max_num_requests, device) -> None:
        pass

    def drafts(self, context_lens: Tensor) -> bool:
        return True

    def keep(self, drafts: Drafts) -> Tensor:
        self.seen.append((drafts.survival.clone(), drafts.stale.clone()))
        return drafts.survival >= 0


class Sure:
    """A drafter with confidences: it says who drafts and how far the request has come."""

    temperatures = (1.0,)

    def __init__(self, drafts: Callable) -> None:
        self.inner = ScriptedDrafter(drafts)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        tree = self.inner.propose(state, spec, sample)
        sure = (1 + state.tokens[:, :1] % 7 + state.seq_lens[:, None] / 512) / 9
        return replace(tree, confidence=sure.expand_as(tree.tokens).clone())


def test_stale_confidences_are_the_request_s_own_of_this_stay() -> None:
    spy = Spy()
    e = Engine(
        target(), Sure(right_for(1)), spec=TreeSpec.chain(3), page_size=4, num_pages=20, max_num_requests=4,
        scheduler=Scheduler(spy),
    )  # fmt: skip
    ids = [e.submit([i + 1] * (3 + i), greedy(30)) for i in range(7)]
    history: dict[tuple[int, int], list[Tensor]] = {}
    fresh = known = 0
    preempted: dict[int, int] = {}
    for step in range(400):
        if not e.has_work:
            break
        if step == 9:
            e.abort(ids[1])
        before = len(spy.seen)
        waiting = {r.request_id for r in e._waiting}
        e._admit()
        for r in waiting - {r.request_id for r in e._waiting}:
            preempted[r] = preempted.get(r, -1) + 1
        running = [r.request_id for r in e._running]
        e.step()
        for r in {r.request_id for r in e._waiting} & set(running):  # put back before this step's pass
            running.remove(r)
        if len(spy.seen) == before:
            continue
        alive, stale = spy.seen[-1]
        assert len(running) == len(alive)
        for row, request in enumerate(running):
            mine = history.setdefault((request, preempted[request]), [])
            want = mine[-2] if len(mine) > 1 else torch.ones(4)
            fresh, known = fresh + (len(mine) < 2), known + (len(mine) > 1)
            assert torch.equal(stale[row, : len(want)], want)
            mine.append(torch.nn.functional.pad(alive[row], (0, 4 - alive.shape[1])))
    assert e.num_preemptions > 2 and all_free(e) and fresh > 14 and known > 30
    assert max(preempted.values()) > 0


def test_a_row_that_moves_takes_what_is_remembered_along() -> None:
    generations = torch.tensor([5, 6, 7])
    s = Scheduler(Lagged(costs([1, 2, 3], (1, 3))))
    s.start(TreeSpec.chain(2), generations, True)
    tree = DraftTree.from_spec(TreeSpec.chain(2), torch.zeros(3, 3, dtype=torch.int64), confidence=torch.rand(3, 3))
    s.schedule(tree, batch(3))
    alive = survival(tree, tree.confidence)
    for buffer in (generations, *s.rows):  # request 5 has ended
        buffer[0] = buffer[2]
    shown = []
    s.policy.keep = lambda drafts: shown.append(drafts.stale) or drafts.survival >= 0
    two = DraftTree.from_spec(TreeSpec.chain(2), torch.zeros(2, 3, dtype=torch.int64), confidence=torch.rand(2, 3))
    s.schedule(two, batch(2))
    generations[1] = 8  # another request in the second row
    s.schedule(two, batch(2))
    assert torch.equal(shown[0], torch.ones(2, 3))  # of two steps ago there is nothing yet
    s2 = survival(two, two.confidence)
    assert torch.equal(shown[1][0], alive[2]) and torch.equal(shown[1][1], torch.ones(3))
    s.schedule(two, batch(2))
    assert torch.equal(shown[2][0], s2[0]) and torch.equal(shown[2][1], torch.ones(3))


def test_what_was_learned_survives_a_start_and_a_new_engine_begins_anew() -> None:
    s = Scheduler(Threshold(0.5))
    drafter = ScriptedDrafter(right_for(2))
    e = Engine(target(), drafter, spec=TreeSpec.chain(4), scheduler=s)
    e.generate([[7], [9]], greedy(40))
    counts = s._estimator.counts.clone()
    assert counts.sum() > 10
    e.configure(TreeSpec.chain(4), scheduler=s)
    assert torch.equal(s._estimator.counts, counts)
    e.configure(TreeSpec.chain(3), scheduler=s)
    assert s._estimator.counts.sum() == 0
    e.generate([[7]], greedy(20))
    Engine(target(), drafter, spec=TreeSpec.chain(3), scheduler=s)
    assert s._estimator.counts.sum() == 0


# ------------------------------------------------------------------ the estimator


def watch(estimator: OnlineEstimator, tree: DraftTree, rates: list[float], steps: int) -> None:
    """Steps in which draft i is accepted with rates[i - 1], if those before were."""
    r, n = tree.tokens.shape
    for _ in range(steps):
        estimator.estimate(tree, torch.arange(n))
        kept = (torch.rand(r, n - 1) < torch.tensor(rates)).cumprod(1).sum(1).minimum(tree.num_nodes - 1)
        estimator.observe(tree, Accepted(chain_path(tree, kept), tree.tokens, kept + 1))


def chain(rows: int, k: int, **extra: Tensor) -> DraftTree:
    return DraftTree.from_spec(TreeSpec.chain(k), torch.zeros(rows, k + 1, dtype=torch.int64), **extra)


def test_it_learns_the_conditional_rates_by_depth() -> None:
    estimator, tree = OnlineEstimator(TreeSpec.chain(3), torch.arange(64)), chain(64, 3)
    assert torch.equal(estimator.estimate(tree, torch.arange(4)), torch.ones(64, 4))  # worth a try
    rates = [0.9, 0.6, 0.2]
    watch(estimator, tree, rates, 200)
    assert torch.allclose(estimator.estimate(tree, torch.arange(4)).mean(0)[1:], torch.tensor(rates), atol=0.06)


def test_it_tells_requests_apart_and_a_new_one_is_nobody() -> None:
    generations = torch.arange(8)
    estimator, tree = OnlineEstimator(TreeSpec.chain(2), generations), chain(8, 2)
    for _ in range(60):
        estimator.estimate(tree, torch.arange(3))
        kept = torch.tensor([2] * 4 + [0] * 4)
        estimator.observe(tree, Accepted(chain_path(tree, kept), tree.tokens, kept + 1))
    got = estimator.estimate(tree, torch.arange(3))
    assert (got[:4, 1:] > 0.9).all() and (got[4:, 1] < 0.1).all()
    generations[4] = 99
    assert estimator.estimate(tree, torch.arange(3))[4, 1] > 0.3  # half of the first steps were good ones


def test_a_draft_that_is_no_longer_tried_is_tried_again() -> None:
    estimator, tree = OnlineEstimator(TreeSpec.chain(1), torch.arange(4)), chain(4, 1)
    watch(estimator, tree, [0.0], 30)
    assert estimator.estimate(tree, torch.arange(2))[0, 1] < 0.05
    watch(estimator, tree.limit(torch.zeros(4, dtype=torch.int64)), [0.0], 500)
    assert estimator.estimate(tree, torch.arange(2))[0, 1] > 0.6


def test_a_stated_confidence_is_the_prior_and_is_calibrated() -> None:
    stated = torch.tensor([0.2, 0.5, 0.8, 0.97]).repeat(16)[:, None].expand(-1, 2).contiguous()
    estimator, tree = OnlineEstimator(TreeSpec.chain(1), torch.arange(64)), chain(64, 1, confidence=stated)
    assert torch.allclose(estimator.estimate(tree, torch.arange(2)), stated)
    for _ in range(150):
        estimator.estimate(tree, torch.arange(2))
        kept = (torch.rand(64) < stated[:, 1] ** 2).long()  # it is too sure
        estimator.observe(tree, Accepted(chain_path(tree, kept), tree.tokens, kept + 1))
    assert torch.allclose(estimator.estimate(tree, torch.arange(2))[:, 1], stated[:, 1] ** 2, atol=0.05)


def test_in_a_tree_children_of_accepted_nodes_are_judged() -> None:
    spec = TreeSpec((-1, 0, 0, 1, 1, 2))
    estimator = OnlineEstimator(spec, torch.arange(1))
    tree = DraftTree.from_spec(spec, torch.arange(6)[None])
    depths = tree.depths()
    estimator.estimate(tree, depths)
    keep = torch.tensor([[True, True, True, True, False, True]])
    estimator.trim(keep)
    path = torch.tensor([[0, 1, -1]])  # node 1 accepted, its only kept child rejected
    estimator.observe(tree.prune(keep), Accepted(path, path, torch.tensor([2])))
    assert estimator.counts.view(3, -1, 2).sum(1).tolist() == [[0, 0], [2, 1], [1, 0]]


def test_sampled_drafts_are_judged_by_the_law_they_were_drawn_from() -> None:
    """Never by the drawn token: two draws from one law have one estimate."""
    probs = (4 * torch.randn(6, 4, 5)).softmax(2)
    probs[3:] = probs[:3]
    tokens = torch.randint(5, (6, 4))
    estimator = OnlineEstimator(TreeSpec.chain(3), torch.arange(6))
    estimator.counts[:, 0].uniform_(1, 9)
    estimator.counts[:, 1] = estimator.counts[:, 0] * torch.rand(len(estimator.counts))
    got = estimator.estimate(DraftTree.from_spec(TreeSpec.chain(3), tokens, probs=probs), torch.arange(4))
    assert torch.equal(got[:3, 1:], got[3:, 1:]) and len(got[:3, 1:].unique()) > 3


# ------------------------------------------------------------------ no host reads


@pytest.mark.parametrize("spec", [TreeSpec.chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_a_schedule_reads_nothing_back_and_is_the_host_s(monkeypatch, name, calibrated, spec) -> None:
    line = costs([10 + t * t for t in range(10)], (1, 3), contexts=(64, 128, 256))
    made = {"budget": lambda: Budget(7), "early stop": lambda: EarlyStop(line), "async": lambda: Lagged(line)}
    make = made.get(name.removesuffix(" on steps"), POLICIES[name])
    sides = []
    steps = [torch.rand(3, spec.num_nodes) for _ in range(4)]
    for host in (True, False):
        monkeypatch.setattr(policies, "on_host", lambda x, host=host: host)
        monkeypatch.setattr(scheduler, "on_host", lambda x, host=host: host)
        s = Scheduler(make())
        s.start(spec, torch.arange(3), calibrated)
        state, got = batch(3, 100), []

        def step(sure: Tensor) -> None:
            tree = DraftTree.from_spec(spec, torch.ones(3, spec.num_nodes, dtype=torch.int64), confidence=sure)
            tree = s.schedule(tree, state)
            path = torch.where(torch.arange(tree.depth + 1) < 2, torch.arange(tree.depth + 1), -1).expand(3, -1)
            kept = (tree.num_nodes > 1).long()
            path = torch.where(kept[:, None] >= torch.arange(tree.depth + 1), path, -1)
            s.observe(tree, Accepted(path, path, kept + 1))
            got.append(tree.num_nodes)

        step(steps[0])
        if host:
            for sure in steps[1:]:
                step(sure)
        else:
            with NoHostReads():
                for sure in steps[1:]:
                    step(sure)
        sides.append(torch.stack(got))
    assert torch.equal(*sides)


# ------------------------------------------------------------------ the engine


def engine_policies(rows: int) -> dict[str, Policy]:
    # Costs that make every policy leave something out.
    line = costs([10 + 1.5 * t * (1 + (t > 3)) for t in range(10)], (1, rows))
    return {
        "fixed": FixedLength(2), "threshold": Threshold(0.5), "budget": Budget(rows + 6),
        "early-stop": EarlyStop(line), "async": Lagged(line),
    }  # fmt: skip


@pytest.mark.parametrize("spec,drafts", [(TreeSpec.chain(5), right_for(2)), (TREE, bushy)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", engine_policies(6))
def test_greedy_tokens_are_plain_decoding_s_through_preemption_and_abort(name, spec, drafts) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(8)]
    want = [Engine(target()).generate([p], greedy(30))[0].token_ids for p in prompts]
    s = Scheduler(engine_policies(6)[name])
    e = Engine(
        target(), ScriptedDrafter(drafts), spec=spec, page_size=4, num_pages=32, max_num_requests=6, scheduler=s
    )
    for _ in range(2):  # the second time with what the first one taught
        ids = [e.submit(p, greedy(30)) for p in prompts]
        done: dict[int, list[int]] = {}
        for step in itertools.count():
            if not e.has_work:
                break
            if step == 7:
                e.abort(ids[2])
            for out in e.step():
                assert out.token_ids == want[ids.index(out.request_id)][: len(out.token_ids)]
                if out.finish_reason:
                    done[out.request_id] = out.token_ids
        assert done == {i: w for i, w in zip(ids, want) if i != ids[2]}
        assert all_free(e)
    assert e.num_preemptions > 0
    drafted = [d for r in e.records for d in r.drafted]
    assert sum(drafted) < spec.num_drafts * len(drafted) and max(drafted) <= spec.num_drafts
    if name == "budget":
        assert all(r.verified_tokens <= 12 for r in e.records)


@pytest.fixture(scope="module")
def tiny():
    return load_target(str(ROOT / "configs/models/tiny.yaml"), dtype="float32", device="cpu", weights="dummy").model


@pytest.fixture(scope="module")
def tiny_plain(tiny) -> list[list[int]]:
    return [o.token_ids for o in Engine(tiny, max_num_requests=4).generate(PROMPTS, greedy(24, ignore_eos=True))]


PROMPTS = [[(7 * i + j * j) % 120 + 1 for j in range(4 + 3 * i)] for i in range(6)]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["ngram", "draft"])
@pytest.mark.parametrize("name", engine_policies(4))
def test_greedy_tokens_of_the_tiny_target_are_plain_decoding_s(tiny, tiny_plain, name, drafter, tree) -> None:
    made = NgramDrafter() if drafter == "ngram" else DraftModel(tiny)
    e = Engine(
        tiny, made, spec=TREE if tree else TreeSpec.chain(5), page_size=4, num_pages=24, max_num_requests=4,
        max_model_len=64, scheduler=Scheduler(engine_policies(4)[name]),
    )  # fmt: skip
    outs = e.generate(PROMPTS, greedy(24, ignore_eos=True))
    assert [o.token_ids for o in outs] == tiny_plain
    assert e.num_preemptions > 0 and sum(o.num_accepted for o in outs) > 0 and all_free(e)


@pytest.mark.parametrize("name", engine_policies(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_confidence_head_drives_the_schedule(tmp_path: Path, name, temperature) -> None:
    """The planted pair: its drafts are right, its confidences near one half."""
    model = planted.target()
    drafter = load_drafter(str(planted.drafter(tmp_path / "d", model)), model)
    drafter.temperatures = (1.0,) * drafter.max_depth
    spec = TreeSpec.chain(drafter.max_depth)
    s = Scheduler(engine_policies(4)[name])
    e = Engine(model, drafter, spec=spec, max_num_requests=4, page_size=8, scheduler=s)
    assert s._estimator is None  # calibrated: taken at its word
    prompts = [[(5 * i + 3 * j) % 40 + 4 for j in range(9)] for i in range(4)]
    params = [SamplingParams(temperature=temperature, max_tokens=24, seed=i) for i in range(4)]
    outs = e.generate(prompts, params)
    assert all(o.error is None and len(o.token_ids) == 24 for o in outs)
    if not temperature:
        assert [o.token_ids for o in outs] == [o.token_ids for o in Engine(model).generate(prompts, params)]
    full = [d for r in e.records if r.num_requests == 4 for d in r.drafted]
    if name != "fixed":
        assert sum(full) < spec.num_drafts * len(full)


def test_seldom_accepted_drafts_are_left_out_and_good_ones_are_not() -> None:
    """One request's drafts are right, the other's wrong; a token costs as much as a quarter of a step."""

    def drafts(prefix: tuple[int, ...], count: int) -> list[int]:
        return right_for(99 if prefix[0] == 7 else 0)(prefix, count)

    points = [point(b, t, t - 1, 10 + 2.5 * b * t) for b in (1, 2) for t in range(1, 6)]
    for policy in (EarlyStop(curve(points)), Lagged(curve(points))):
        spec, s = TreeSpec.chain(4), Scheduler(policy)
        e = Engine(target(), ScriptedDrafter(drafts), spec=spec, max_num_requests=2, scheduler=s)
        e.generate([[7], [9]], [greedy(120, ignore_eos=True), greedy(40, ignore_eos=True)])
        late = [r for r in e.records if r.num_requests == 2][12:]
        assert len(late) > 5
        good, bad = (sum(r.drafted[i] for r in late) / len(late) for i in (0, 1))
        assert good > 3 and bad < 1


def test_what_is_not_built_says_so() -> None:
    law = SyntheticLaw.make(4, acceptance_length=3.0)
    drafter = ScriptedDrafter(right_for(2))
    with pytest.raises(ConfigError, match="scheduler: found with a synthetic law, allowed: real acceptance"):
        Engine(target(), drafter, spec=TreeSpec.chain(4), synthetic=law, scheduler=Scheduler(FixedLength(2)))
    model = target()
    e = Engine(model, drafter, spec=TreeSpec.chain(4))
    model.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="scheduler: found device cuda, allowed: cpu"):
        e.configure(TreeSpec.chain(4), scheduler=Scheduler(FixedLength(2)))
    model.device = CPU
    with pytest.raises(ConfigError, match="scheduler: found 5 drafts, allowed: at most 4, the depth that is drafted"):
        e.configure(TreeSpec.chain(4), scheduler=Scheduler(FixedLength(5)))
    with pytest.raises(ConfigError, match="scheduler: found a budget of 7 tokens, allowed: 8 or more, one a request"):
        e.configure(TreeSpec.chain(4), scheduler=Scheduler(Budget(7)))


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("best", "found 'best', allowed: none, fixed:DRAFTS or a file"),
        ("fixed", "found 'fixed', allowed: none, fixed:DRAFTS"),
        ("fixed:many", "found 'fixed:many', allowed: 0 to 63 drafts"),
        ("fixed:64", "found 'fixed:64', allowed: 0 to 63 drafts"),
        ("threshold:1.5", "found 'threshold:1.5', allowed: a probability, 0 to 1"),
        ("threshold:nan", "found 'threshold:nan', allowed: a probability, 0 to 1"),
        ("budget:0", "found 'budget:0', allowed: 1 or more tokens"),
        ("async:7", "found 'async:7', allowed: async:FILE.json, a curve"),
    ],
)
def test_a_bad_name_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        split(text)
    assert str(error.value).startswith(f"scheduler: {line}") and "\n" not in str(error.value)


def test_names_make_policies(tmp_path: Path) -> None:
    made = chain_curve({1: 1.0, 2: 2.0})
    file = tmp_path / "curve.json"
    file.write_text(made.model_dump_json())
    assert make_policy("fixed:3").depth == 3 and make_policy("threshold:0.25").threshold == 0.25
    assert make_policy("budget:64").tokens == 64
    assert make_policy(f"early-stop:{file}").curve == made == make_policy(f"async:{file}").curve
    assert label(f"async:{file}") == "async:curve.json"

    def refuse(curve: Curve, where: str) -> None:
        raise ConfigError(f"{where} {curve.target}")

    with pytest.raises(ConfigError, match="curve.json tiny"):
        make_policy(f"async:{file}", refuse)
    rows = [
        dict(num_requests=1, best_chain=dict(num_speculative_tokens=5), confidence=dict(k=6, threshold=0.2, pays=True)),
        dict(num_requests=8, best_chain=dict(num_speculative_tokens=2), confidence=dict(k=6, threshold=0, pays=False)),
    ]
    tuning = tmp_path / "tune.json"
    tuning.write_text(json.dumps(dict(kind="tuning", choices=rows)))
    assert make_policy(f"fixed:{tuning}").depth == {1: 5, 8: 2}
    assert make_policy(f"threshold:{tuning}").threshold == {1: (6, 0.2), 8: (2, 0.0)}
    rows[0]["confidence"] = None
    tuning.write_text(json.dumps(dict(kind="tuning", choices=rows)))
    assert make_policy(f"fixed:{tuning}").depth == {1: 5, 8: 2}
    for bad, line in (
        (f"threshold:{tuning}", "confidence: missing, allowed: a tuning on a trace"),
        (f"fixed:{file}", "not a tuning"),
        (f"async:{tuning}", "not a step-cost curve"),
        (f"async:{tmp_path / 'none.json'}", "No such file"),
    ):
        with pytest.raises(ConfigError, match=line):
            make_policy(bad)


def test_a_load_between_two_tuned_ones_takes_the_larger_one_s() -> None:
    assert [policies.at_load({2: "a", 8: "b"}, b) for b in (1, 2, 3, 8, 99)] == ["a", "a", "b", "b", "b"]
