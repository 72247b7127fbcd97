"""Every rule against the target's exact law: by enumeration where thresholds lie on a grid, else by chi-square."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from drafters.tree import DraftTree, TreeSpec
from dspark_runtime import acceptance
from dspark_runtime.acceptance import RULES, Accepted, choose_rule, greedy
from dspark_runtime.errors import ConfigError
from verify_kernels import rng

LENGTH = 4  # emitted tokens that are compared: a block of depth 3 and its bonus
CHAIN = TreeSpec.chain(3)
BUSHY = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3, 5))
P, Q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.4, 0.2, 0.3, 0.1])  # fixture P


def tables(vocab: int, parts: int | None, seed: int) -> list[torch.Tensor]:
    """A next-token distribution for every prefix shorter than LENGTH: [V^d, V] for d = 0, 1, ...

    parts: entries are multiples of 1 / parts (some are 0); None: any, at least 0.05.
    """
    generator = torch.Generator().manual_seed(seed)
    out = []
    for d in range(LENGTH):
        if parts is None:
            x = torch.rand(vocab**d, vocab, generator=generator) ** 2 + 0.1
        else:
            ids = torch.randint(vocab, (vocab**d, parts), generator=generator)
            x = torch.zeros(vocab**d, vocab).scatter_add(1, ids, torch.ones(ids.shape))
        out.append(x / x.sum(1, keepdim=True))
    return out


def joint(p: list[torch.Tensor]) -> torch.Tensor:
    """Exact law of LENGTH tokens under autoregressive decoding, [V^LENGTH] float64."""
    law = torch.ones(1, dtype=torch.float64)
    for table in p:
        law = (law[:, None] * table.double()).flatten()
    return law


def rows_of(tree: DraftTree, p: list[torch.Tensor], q: list[torch.Tensor] | None):
    """probs [R * n, V], rows [R, n] and (with q) tree.probs of each node's own prefix."""
    r, n = tree.tokens.shape
    vocab = p[0].shape[1]
    code, depths = torch.zeros_like(tree.tokens), tree.depths()
    for j in range(1, n):
        parent = tree.parents[:, j].clamp(min=0)
        code[:, j] = code.gather(1, parent[:, None]).squeeze(1) * vocab + tree.tokens[:, j].clamp(min=0)

    def look_up(table):
        out = torch.full((r, n, vocab), torch.nan)
        for d in range(LENGTH):
            here = (depths == d) & (tree.tokens >= 0)
            out[here] = table[d][code[here]]
        return out

    if q is not None:
        tree.probs = look_up(q)
    return look_up(p).flatten(0, 1), torch.arange(r * n).view(r, n)


def draft(spec: TreeSpec, q: list[torch.Tensor], seeds: torch.Tensor) -> DraftTree:
    """Drafts drawn from q, siblings without replacement and in index order."""
    r, vocab = seeds.shape[0], q[0].shape[1]
    tokens = torch.zeros(r, spec.num_nodes, dtype=torch.int64)
    code = torch.zeros_like(tokens)
    for j in range(1, spec.num_nodes):
        parent = spec.parents[j]
        law = q[spec.depths[parent]][code[:, parent]].clone()
        for sibling in range(1, j):
            if spec.parents[sibling] == parent:
                law.scatter_(1, tokens[:, sibling : sibling + 1], 0.0)
        tokens[:, j] = rng.sample(law, rng.uniform(seeds, torch.zeros_like(seeds), rng.DRAFT, j))
        code[:, j] = code[:, parent] * vocab + tokens[:, j]
    return DraftTree.from_spec(spec, tokens)


def deterministic(spec: TreeSpec, vocab: int, r: int) -> DraftTree:
    """Drafts that depend on the parent's token only; siblings differ."""
    tokens = torch.zeros(r, spec.num_nodes, dtype=torch.int64)
    for j in range(1, spec.num_nodes):
        tokens[:, j] = (2 * tokens[:, spec.parents[j]] + 1 + spec.ranks[j] + spec.depths[j]) % vocab
    return DraftTree.from_spec(spec, tokens)


def check_form(tree: DraftTree, got: Accepted) -> None:
    """The emitted drafts are those of a real path from the root, and padding is -1 everywhere."""
    width = tree.depth + 1
    assert got.path.shape == got.tokens.shape == (tree.tokens.shape[0], width)
    inside = torch.arange(width) < got.num_emitted[:, None]
    assert torch.equal(got.path >= 0, inside) and torch.equal(got.tokens >= 0, inside)
    assert (got.path[:, 0] == 0).all() and got.num_emitted.min() >= 1
    for i in range(1, width):
        on = inside[:, i]
        nodes = got.path[on, i, None]
        assert torch.equal(tree.parents[on].gather(1, nodes).squeeze(1), got.path[on, i - 1])
        assert torch.equal(tree.tokens[on].gather(1, nodes).squeeze(1), got.tokens[on, i - 1])


def completed(got: Accepted, p: list[torch.Tensor], seeds: torch.Tensor) -> torch.Tensor:
    """Codes [R] of LENGTH tokens: the emitted ones, then plain sampling with the same seeds."""
    vocab = p[0].shape[1]
    code = torch.zeros_like(seeds)
    for i in range(LENGTH):
        plain = rng.sample(p[i][code], rng.uniform(seeds, torch.full_like(seeds, i), rng.TARGET))
        token = torch.where(i < got.num_emitted, got.tokens[:, min(i, got.tokens.shape[1] - 1)], plain)
        code = code * vocab + token
    return code


def p_value(code: torch.Tensor, law: torch.Tensor) -> float:
    counts = code.bincount(minlength=law.shape[0]).double()
    expected = law * code.shape[0]
    assert counts[law == 0].sum() == 0 and expected[law > 0].min() > 5
    return stats.chisquare(counts[law > 0], expected[law > 0], sum_check=False).pvalue


# --- exact enumeration -------------------------------------------------------------------------------------------


class Enumerated:
    """Stands in for verify_kernels.rng: row r's draws are read from tables, and its drawn token is a given one, whose
    probability is recorded as a weight."""

    ACCEPT, TARGET = rng.ACCEPT, rng.TARGET

    def __init__(self, accept: torch.Tensor, drawn: torch.Tensor):
        self.accept, self.drawn, self.weights = accept, drawn, None

    def uniform(self, seeds, counters, stream, index=0):
        if stream == rng.TARGET:
            return seeds
        return self.accept[torch.broadcast_tensors(seeds, torch.as_tensor(index))]

    def sample(self, probs, rows):
        probs = probs[rows].double()
        self.weights = probs.gather(1, self.drawn[:, None]).squeeze(1) / probs.sum(1)
        return self.drawn


def enumerated_law(monkeypatch, rule, spec, p, q, grids: dict[int, int], share=None) -> torch.Tensor:
    """Exact law of LENGTH tokens. grids: accept index -> number of midpoints; share: index -> index with its draw."""
    vocab = p[0].shape[1]
    n = spec.num_nodes
    siblings = [[i for i in range(1, j) if spec.parents[i] == spec.parents[j]] for j in range(n)]
    if q is None:
        tokens = deterministic(spec, vocab, 1).tokens
    else:
        tokens = [
            (0, *t)
            for t in itertools.product(range(vocab), repeat=n - 1)
            if all(t[j - 1] != t[i - 1] for j in range(1, n) for i in siblings[j])
        ]
        tokens = torch.tensor(tokens)
    draws = list(itertools.product(*[[(i + 0.5) / g for i in range(g)] for g in grids.values()], range(vocab)))
    draws = torch.tensor(draws, dtype=torch.float64)
    r, m = tokens.shape[0], draws.shape[0]
    tree = DraftTree.from_spec(spec, tokens.repeat_interleave(m, 0))
    probs, rows = rows_of(tree, p, q)
    weights = torch.full((r * m,), vocab / m, dtype=torch.float64)
    if q is not None:
        for j in range(1, n):
            law = tree.probs[:, spec.parents[j]].double().clone()
            for i in siblings[j]:
                law.scatter_(1, tree.tokens[:, i : i + 1], 0.0)
            mass = law.sum(1)
            weights *= law.gather(1, tree.tokens[:, j : j + 1]).squeeze(1) / mass.masked_fill(mass == 0, 1.0)
        possible = weights > 0
        tree = DraftTree.from_spec(spec, tree.tokens[possible], probs=tree.probs[possible])
        probs, rows = probs.view(r * m, n, vocab)[possible].flatten(0, 1), rows[: int(possible.sum())]
        draws, weights = draws.repeat(r, 1)[possible], weights[possible]
    accept = torch.full((draws.shape[0], n), torch.nan, dtype=torch.float64)
    for column, index in enumerate(grids):
        accept[:, index] = draws[:, column]
    for index, source in (share or {}).items():
        accept[:, index] = accept[:, source]
    fake = Enumerated(accept, draws[:, -1].long())
    monkeypatch.setattr(acceptance, "rng", fake)
    count = draws.shape[0]
    got = rule(tree, probs, rows, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    monkeypatch.undo()
    check_form(tree, got)
    assert got.num_emitted.max() > 2
    weights = weights * fake.weights
    law = torch.zeros(1, dtype=torch.float64)
    code = torch.zeros_like(got.num_emitted)
    for i in range(LENGTH):  # emitted sequences so far, extended by plain decoding where they have ended
        law = (law[:, None] * p[i].double()).flatten()
        code = code * vocab + (got.tokens[:, i] if i < got.tokens.shape[1] else -1)
        ended = got.num_emitted == i + 1
        law.scatter_add_(0, code[ended], weights[ended])
    return law


def total_variation(a, b) -> float:
    return 0.5 * (a - b).abs().sum().item()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampled", [True, False])
def test_standard_is_exact(monkeypatch, seed, sampled):
    p, q = tables(3, 4, seed), tables(3, 4, 100 + seed)
    grids = {0: 12, 1: 12, 2: 12}
    law = enumerated_law(monkeypatch, acceptance.chain_rejection, CHAIN, p, q if sampled else None, grids)
    assert total_variation(law, joint(p)) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_tree_rule_on_sampled_siblings_is_exact(monkeypatch, seed):
    # Thirds: first children accept at multiples of 1/6, second ones at multiples of 1/12.
    p, q = tables(3, 3, seed), tables(3, 3, 100 + seed)
    law = enumerated_law(
        monkeypatch, acceptance.tree_rejection, TreeSpec((-1, 0, 0, 1, 2)), p, q, {1: 6, 2: 12, 3: 6}, share={4: 3}
    )
    assert total_variation(law, joint(p)) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_tree_rule_on_deterministic_siblings_is_exact(monkeypatch, seed):
    p = tables(3, 4, seed)
    spec = TreeSpec((-1, 0, 0, 1, 2, 3))
    law = enumerated_law(
        monkeypatch, acceptance.tree_rejection, spec, p, None, {1: 12, 2: 12, 3: 12, 5: 12}, share={4: 3}
    )
    assert total_variation(law, joint(p)) < 1e-6


def test_the_enumeration_fails_a_rule_that_keeps_the_rejected_token(monkeypatch):
    def unmasked(tree, probs, rows, seeds, counters):  # users' report: resample from p itself after a rejection
        fake = acceptance.rng
        ids = tree.tokens[:, 1:]
        u = fake.uniform(seeds[:, None], 0, rng.ACCEPT, torch.arange(3))
        kept = (u < probs[rows[:, :3], ids]).cumprod(1).sum(1)
        token = fake.sample(probs[rows.gather(1, kept[:, None]).squeeze(1)], seeds)
        return acceptance.emit(tree, acceptance.chain_path(tree, kept), kept, token)

    p = tables(3, 4, 0)
    law = enumerated_law(monkeypatch, unmasked, CHAIN, p, None, {0: 12, 1: 12, 2: 12})
    assert law.sum() == pytest.approx(1) and total_variation(law, joint(p)) > 0.01


@pytest.mark.parametrize("spec", [CHAIN, BUSHY])
@pytest.mark.parametrize("seed", range(3))
def test_node_sampling_is_exact(monkeypatch, spec, seed):
    p = tables(3, 4, seed)
    draws = torch.tensor(list(itertools.product([0.125, 0.375, 0.625, 0.875], repeat=LENGTH)), dtype=torch.float64)
    r = draws.shape[0]
    monkeypatch.setattr(rng, "uniform", lambda seeds, counters, *_: draws[torch.broadcast_tensors(seeds, counters)])
    tree = deterministic(spec, 3, r)
    seeds, start = torch.arange(r), torch.zeros(r, dtype=torch.int64)
    got = RULES["node"].accept(tree, *rows_of(tree, p, None), seeds, start)
    check_form(tree, got)
    assert got.num_emitted.max() > 1
    law = completed(got, p, seeds).bincount(minlength=3**LENGTH).double() / r
    assert total_variation(law, joint(p)) < 1e-6


def block_enumerated(p, q, cut: int):
    """Exact law and mean accepted drafts of block verification with `cut` drafts, from the code's own h and w."""
    vocab = p[0].shape[1]
    drafts = torch.tensor(list(itertools.product(range(vocab), repeat=cut)), dtype=torch.int64)
    code, possible = torch.zeros(len(drafts), dtype=torch.int64), torch.ones(len(drafts), dtype=torch.bool)
    for j in range(cut):
        possible &= q[j][code, drafts[:, j]] > 0
        code = code * vocab + drafts[:, j]
    drafts = drafts[possible]
    tokens = torch.cat([torch.zeros(len(drafts), 1, dtype=torch.int64), drafts], 1)
    padded = torch.nn.functional.pad(tokens, (0, 3 - cut), value=-1)
    parents = torch.where(padded >= 0, torch.arange(-1, 3), -1)
    tree = DraftTree(padded, parents, torch.full((len(drafts),), cut + 1), 3, True)
    probs, rows = rows_of(tree, p, q)
    w, h = acceptance.block_stops(tree, probs, rows)
    stop = torch.zeros_like(h)
    left = torch.ones(len(drafts), dtype=torch.float64)
    for i in range(3, -1, -1):
        stop[:, i] = left * h[:, i]
        left = left - stop[:, i]
    assert left.abs().max() < 1e-12 and (stop[:, cut + 1 :] == 0).all()
    weight = torch.ones(len(drafts), dtype=torch.float64)
    for j in range(cut):
        weight *= tree.probs[:, j].gather(1, drafts[:, j : j + 1]).squeeze(1).double()
    laws = [torch.zeros(vocab**i, dtype=torch.float64) for i in range(LENGTH + 1)]
    code = torch.zeros(len(drafts), dtype=torch.int64)
    for i in range(cut + 1):
        here = probs[rows[:, i]].double()
        residual = here if i == cut else (w[:, i : i + 1] * here - tree.probs[:, i].double()).clamp(min=0)
        mass = residual.sum(1, keepdim=True)
        residual = torch.where(mass > 0, residual / mass.clamp(min=1e-300), here)
        for y in range(vocab):
            laws[i + 1].scatter_add_(0, code * vocab + y, weight * stop[:, i] * residual[:, y])
        if i < cut:
            code = code * vocab + drafts[:, i]
    law = laws[0]
    for i in range(LENGTH):
        law = (law[:, None] * p[i].double()).flatten() + laws[i + 1]
    return law, (weight[:, None] * stop * torch.arange(4)).sum().item()


def standard_accepted(p, q) -> float:
    """Mean accepted drafts of token-level rejection: sums of products of min(p, q)."""
    total, mass = 0.0, torch.ones(1, dtype=torch.float64)
    for pd, qd in zip(p[:3], q[:3]):
        mass = (mass[:, None] * torch.minimum(pd, qd).double()).flatten()
        total += mass.sum().item()
    return total


@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("seed", range(6))
def test_block_stops_give_the_exact_law_and_accept_no_less_than_standard(seed, cut):
    p, q = tables(3, 4 if seed % 2 else None, seed), tables(3, 4 if seed % 2 else None, 100 + seed)
    law, accepted = block_enumerated(p, q, cut)
    assert total_variation(law, joint(p)) < 1e-6
    if cut == 3:
        gain = accepted - standard_accepted(p, q)
        assert gain > (0.01 if seed == 0 else -1e-6)


def test_block_verification_of_the_target_itself_accepts_everything():
    p = tables(3, None, 0)
    law, accepted = block_enumerated(p, p, 3)
    assert accepted == pytest.approx(3, abs=1e-6) and total_variation(law, joint(p)) < 1e-6


# --- chi-square over vectorised draws ------------------------------------------------------------------------------

DRAWS = 200_000


def run(rule, spec, p, q, seeds, cut=False):
    r, vocab = seeds.shape[0], p[0].shape[1]
    tree = draft(spec, q, seeds) if q is not None else deterministic(spec, vocab, r)
    if cut:  # blocks of every length, chosen without looking at the drafts
        tree = tree.limit(torch.arange(r) % (spec.depth + 1))
    probs, rows = rows_of(tree, p, q)
    return tree, rule(tree, probs, rows, seeds, torch.zeros_like(seeds))


CASES = [
    ("standard", CHAIN, True),
    ("standard", CHAIN, False),
    ("block", CHAIN, True),
    ("block", CHAIN, False),
    ("node", CHAIN, True),
    ("node", BUSHY, False),
    ("tree", CHAIN, True),
    ("tree", BUSHY, True),
    ("tree", BUSHY, False),
    ("tree", TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 6)), True),  # all of V = 3 below the root: q runs out
]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("name", "spec", "sampled"), CASES)
def test_rules_sample_the_target(name, spec, sampled, cut):
    p, q = tables(3, None, 10), tables(3, None, 110) if sampled else None
    seeds = torch.arange(DRAWS) + 10**6
    tree, got = run(RULES[name].accept, spec, p, q, seeds, cut)
    check_form(tree, got)
    assert (got.num_emitted > 2).any()
    assert p_value(completed(got, p, seeds), joint(p)) > 1e-3


def test_a_child_that_q_cannot_produce_is_a_point_mass():
    # Child 1 is always token 0; child 2 is drawn from q, which has no mass there.
    p, q = torch.tensor([0.3, 0.3, 0.4]), torch.tensor([0.0, 0.75, 0.25])
    seeds = torch.arange(DRAWS)
    tokens = torch.zeros(DRAWS, 3, dtype=torch.int64)
    tokens[:, 2] = rng.sample(q.expand(DRAWS, 3), rng.uniform(seeds, torch.zeros_like(seeds), rng.DRAFT))
    tree = DraftTree.from_spec(TreeSpec((-1, 0, 0)), tokens, probs=q.expand(DRAWS, 3, 3))
    rows = torch.arange(DRAWS * 3).view(DRAWS, 3)
    got = acceptance.tree_rejection(tree, p.expand(DRAWS * 3, 3), rows, seeds, torch.zeros_like(seeds))
    assert p_value(got.tokens[:, 0], p.double()) > 1e-3
    assert {1, 2} <= set(got.path[:, 1].tolist())


def test_wrong_rules_fail_the_chi_square(monkeypatch):
    p, q, seeds = tables(3, None, 10), tables(3, None, 110), torch.arange(DRAWS)

    end = acceptance._end_chain
    monkeypatch.setattr(acceptance, "_end_chain", lambda *args: end(*args[:-1], None))  # p - q without the weight
    _, got = run(acceptance.block_verification, CHAIN, p, q, seeds)
    assert p_value(completed(got, p, seeds), joint(p)) < 1e-6
    monkeypatch.undo()

    def point_mass_of_a_draw_without_removal(tree, probs, rows, seeds, counters):
        tree.probs = None
        monkeypatch.setattr(acceptance, "_TINY", 2.0)  # always "no residual": resample from unmasked p
        return acceptance.chain_rejection(tree, probs, rows, seeds, counters)

    _, got = run(point_mass_of_a_draw_without_removal, CHAIN, p, q, seeds)
    assert p_value(completed(got, p, seeds), joint(p)) < 1e-6
    monkeypatch.undo()

    def siblings_out_of_order(tree, probs, rows, seeds, counters):
        tree.tokens[:, 1:3] = tree.tokens[:, 1:3].sort(1).values
        return acceptance.tree_rejection(tree, probs, rows, seeds, counters)

    _, got = run(siblings_out_of_order, TreeSpec((-1, 0, 0)), p, q, seeds)
    assert p_value(completed(got, p, seeds), joint(p)) < 1e-6


# --- known numbers -------------------------------------------------------------------------------------------------


def one_position(rule, with_probs: bool, k: int = 1):
    seeds = torch.arange(DRAWS)
    laws = [Q.expand(4**d, 4) for d in range(LENGTH)]
    tree = draft(TreeSpec.chain(k), laws, seeds)
    if with_probs:
        tree.probs = Q.expand(DRAWS, k + 1, 4)
    rows = torch.arange(DRAWS * (k + 1)).view(DRAWS, k + 1)
    return rule(tree, P.expand(DRAWS * (k + 1), 4), rows, seeds, torch.zeros_like(seeds))


def test_knowing_q_accepts_080_and_a_point_mass_031_and_both_emit_p():
    for with_probs, rate in ((True, 0.80), (False, 0.31)):
        got = one_position(acceptance.chain_rejection, with_probs)
        assert (got.num_emitted - 1).double().mean() == pytest.approx(rate, abs=4 * 0.5 / DRAWS**0.5)
        assert p_value(got.tokens[:, 0], P.double()) > 1e-3


def test_resampling_without_removal_gives_the_known_wrong_law(monkeypatch):
    monkeypatch.setattr(acceptance, "_TINY", 2.0)
    got = one_position(acceptance.chain_rejection, False)
    wrong = torch.tensor([0.545, 0.267, 0.1485, 0.0395], dtype=torch.float64)
    assert p_value(got.tokens[:, 0], wrong) > 1e-3
    assert p_value(got.tokens[:, 0], P.double()) < 1e-12


def test_block_verification_of_two_positions_gives_pairs_and_accepts_more():
    block, standard = (one_position(RULES[name].accept, True, k=2) for name in ("block", "standard"))
    for got in (block, standard):
        code = completed(got, [P.expand(4**d, 4) for d in range(LENGTH)], torch.arange(DRAWS)) // 16
        assert p_value(code, (P[:, None] * P).flatten().double()) > 1e-3
    assert standard.num_emitted.double().mean() == pytest.approx(1 + 0.8 + 0.64, abs=0.01)
    assert block.num_emitted.double().mean() > standard.num_emitted.double().mean() + 0.005


@pytest.mark.parametrize("spec", [CHAIN, BUSHY])
@pytest.mark.parametrize("cut", [False, True])
def test_node_sampling_emits_the_tokens_of_plain_sampling(spec, cut):
    p, seeds = tables(4, None, 5), torch.arange(500) * 7
    tree, got = run(acceptance.node_sampling, spec, p, None, seeds, cut)
    plain_tree = deterministic(TreeSpec.chain(0), 4, 500)
    plain = acceptance.node_sampling(plain_tree, *rows_of(plain_tree, p, None), seeds, torch.zeros_like(seeds))
    assert (plain.num_emitted == 1).all() and got.num_emitted.max() == 4
    assert torch.equal(completed(got, p, seeds), completed(plain, p, seeds))


@pytest.mark.parametrize("name", RULES)
def test_without_drafts_every_rule_is_plain_sampling(name):
    p, seeds = tables(3, None, 3), torch.arange(64)
    tree = deterministic(TreeSpec.chain(0), 3, 64)
    probs, rows = rows_of(tree, p, p if name == "tree" else None)
    got = RULES[name].accept(tree, probs, rows, seeds, seeds * 3)
    assert torch.equal(got.tokens[:, 0], rng.sample(probs, rng.uniform(seeds, seeds * 3, rng.TARGET)))
    assert got.path.tolist() == [[0]] * 64 and got.num_emitted.tolist() == [1] * 64


# --- greedy, padding, batches ----------------------------------------------------------------------------------------


@st.composite
def padded_trees(draw, distinct: bool = False):
    """Trees of different shapes in one batch: (tree, target_ids)."""
    r, n, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 9)), 3
    parents, tokens, counts = [], [], []
    for _ in range(r):
        count = draw(st.integers(1, n))
        par, tok = [-1], [draw(st.integers(0, vocab - 1))]
        for i in range(1, count):
            options = [
                (a, x)
                for a in range(i)
                for x in range(vocab)
                if not distinct or all((a, x) != (par[j], tok[j]) for j in range(1, i))
            ]
            a, x = draw(st.sampled_from(options))
            par.append(a)
            tok.append(x)
        parents.append(par + [-1] * (n - count))
        tokens.append(tok + [-1] * (n - count))
        counts.append(count)
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(counts), n - 1)
    targets = draw(st.lists(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n), min_size=r, max_size=r))
    return tree, torch.tensor(targets)


def walk(parents, tokens, targets):
    path = [0]
    while True:
        y = targets[path[-1]]
        child = next((j for j in range(1, len(parents)) if parents[j] == path[-1] and tokens[j] == y), None)
        if child is None:
            return path, [tokens[j] for j in path[1:]] + [y]
        path.append(child)


@given(padded_trees())
@settings(max_examples=150, deadline=None)
def test_greedy_follows_the_reference_walk(case):
    tree, targets = case
    got = greedy(tree, targets)
    for r in range(tree.tokens.shape[0]):
        path, tokens = walk(tree.parents[r].tolist(), tree.tokens[r].tolist(), targets[r].tolist())
        pad = [-1] * (tree.depth + 1 - len(path))
        assert got.path[r].tolist() == path + pad and got.tokens[r].tolist() == tokens + pad
        assert got.num_emitted[r] == len(path)


@given(st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_greedy_chains_take_the_short_way_to_the_same_answer(k, data):
    ids = st.lists(st.integers(0, 1), min_size=k + 1, max_size=k + 1)
    tree = DraftTree.from_spec(TreeSpec.chain(k), torch.tensor([data.draw(ids) for _ in range(3)]))
    tree = tree.limit(torch.tensor(data.draw(st.lists(st.integers(0, k), min_size=3, max_size=3))))
    targets = torch.tensor([data.draw(ids) for _ in range(3)])
    fast = greedy(tree, targets)
    tree.is_chain = False
    slow = greedy(tree, targets)
    for a, b in zip(vars(fast).values(), vars(slow).values()):
        assert torch.equal(a, b)


@given(padded_trees(distinct=True), st.booleans())
@settings(max_examples=100, deadline=None)
def test_at_temperature_zero_tree_rules_are_greedy(case, with_probs):
    tree, targets = case
    r, n = tree.tokens.shape
    probs = torch.nn.functional.one_hot(targets.flatten(), 3).float()
    rows, seeds = torch.arange(r * n).view(r, n), torch.arange(r)
    if with_probs:  # one-hot at each node's first child
        best = torch.zeros(r, n, dtype=torch.int64)
        for j in range(n - 1, 0, -1):
            real = tree.parents[:, j] >= 0
            best[real, tree.parents[real, j]] = tree.tokens[real, j]
        tree.probs = torch.nn.functional.one_hot(best, 3).float()
    want = greedy(tree, targets)
    for name in ("node", "tree"):
        got = RULES[name].accept(tree, probs, rows, seeds, seeds)
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.path, want.path)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("with_probs", [True, False])
def test_at_temperature_zero_chain_rules_are_greedy(name, with_probs):
    blocks = torch.tensor(list(itertools.product(range(2), repeat=6)))
    tokens, targets = torch.nn.functional.pad(blocks[:, :2], (1, 0)), blocks[:, 3:]
    tree = DraftTree.from_spec(TreeSpec.chain(2), tokens).limit(torch.arange(64) % 3)
    if with_probs:
        drafts = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        tree.probs = torch.nn.functional.one_hot(drafts, 2).float()
    probs = torch.nn.functional.one_hot(targets.flatten(), 2).float()
    got = RULES[name].accept(tree, probs, torch.arange(192).view(64, 3), torch.arange(64), torch.arange(64))
    want = greedy(tree, targets)
    for a, b in zip(vars(got).values(), vars(want).values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["greedy", *RULES])
@pytest.mark.parametrize("cut_parents", [True, False])
def test_padding_is_never_accepted_nor_used_as_an_index(name, cut_parents):
    tokens = torch.tensor([[0, 1, -1, -1]])
    parents = torch.tensor([[-1, 0, -1, -1] if cut_parents else [-1, 0, 1, 2]])
    tree = DraftTree(tokens, parents, torch.tensor([2]), 3, True)
    targets = torch.tensor([[1, 2, 2, 2]])
    probs = torch.nn.functional.one_hot(targets[0], 3).float()
    if name == "tree":
        tree.probs = torch.nn.functional.one_hot(torch.tensor([[1, 0, 0, 0]]), 3).float()
    zero = torch.zeros(1, dtype=torch.int64)
    if name == "greedy":
        got = greedy(tree, targets)
    else:
        got = RULES[name].accept(tree, probs, torch.arange(4)[None], zero, zero)
    assert got.tokens.tolist() == [[1, 2, -1, -1]] and got.path.tolist() == [[0, 1, -1, -1]]
    assert got.num_emitted.tolist() == [2]


def test_counting_stops_at_the_first_rejection():
    # Drafts match, differ, match, match.
    tree = DraftTree.from_spec(TreeSpec.chain(4), torch.tensor([[0, 1, 2, 3, 4]]))
    got = greedy(tree, torch.tensor([[1, 9, 3, 4, 5]]))
    assert got.num_emitted.tolist() == [2] and got.tokens.tolist() == [[1, 9, -1, -1, -1]]
    # The first draft is wrong: it must not be committed.
    got = greedy(DraftTree.from_spec(TreeSpec.chain(1), torch.tensor([[1, 1]])), torch.tensor([[2, 7]]))
    assert got.tokens.tolist() == [[2, -1]]


@pytest.mark.parametrize(("name", "spec"), [("standard", CHAIN), ("block", CHAIN), ("node", BUSHY), ("tree", BUSHY)])
def test_a_request_gets_the_same_tokens_in_any_batch(name, spec):
    p, q, seeds = tables(3, None, 1), tables(3, None, 2), torch.arange(40) ** 3
    tree = draft(spec, q, seeds)
    probs, rows = rows_of(tree, p, q)
    counters = torch.arange(40) * 5
    whole = RULES[name].accept(tree, probs, rows, seeds, counters)
    pick = torch.tensor([31, 2, 17])
    part = DraftTree(
        tree.tokens[pick], tree.parents[pick], tree.num_nodes[pick], tree.depth, tree.is_chain, tree.probs[pick]
    )
    got = RULES[name].accept(part, probs, rows[pick], seeds[pick], counters[pick])
    for a, b in zip(vars(got).values(), vars(whole).values()):
        assert torch.equal(a, b[pick])
    later = RULES[name].accept(tree, probs, rows, seeds, counters + 1)
    assert not torch.equal(later.tokens, whole.tokens)  # each step draws anew


# --- choice of the rule ----------------------------------------------------------------------------------------------


def test_auto_takes_the_rule_that_fits():
    assert choose_rule("auto", CHAIN, True) == "standard"
    assert choose_rule("auto", CHAIN, False) == choose_rule("auto", BUSHY, False) == "node"
    assert choose_rule("auto", BUSHY, True) == "tree"
    for name in RULES:
        assert choose_rule(name, CHAIN, True) == name
    for name in ("standard", "block", "node"):
        assert choose_rule(name, CHAIN, False) == name


@pytest.mark.parametrize(
    ("method", "spec", "samples", "message"),
    [
        ("standard", BUSHY, True, "found 'standard' with a tree that branches, allowed: auto, node, tree"),
        ("block", BUSHY, False, "found 'block' with a tree that branches, allowed: auto, node$"),
        ("tree", BUSHY, False, "found 'tree' with drafts that carry no probabilities, allowed: auto, node"),
        ("tree", CHAIN, False, "found 'tree' .* allowed: auto, standard, block, node"),
        ("typical", CHAIN, True, "found 'typical', allowed: auto, standard, block, node, tree"),
    ],
)
def test_what_a_shape_or_drafter_cannot_support_is_refused_by_name(method, spec, samples, message):
    with pytest.raises(ConfigError, match=f"rejection_sample_method: {message}"):
        choose_rule(method, spec, samples)
