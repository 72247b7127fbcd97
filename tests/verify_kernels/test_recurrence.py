"""Kimi delta attention under speculation against its recurrence, token by token in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from drafters.topology import TreeSpec
from tests.dspark_runtime.test_capturable import NoHostReads
from tests.verify_kernels.kda_cases import Layer, Written, make_pass
from verify_kernels import ops
from verify_kernels.batch import Records
from verify_kernels.reference import recurrence

EXACT = 1e-12  # float64, of values around 1


def near(found: torch.Tensor, want: np.ndarray, limit: float = EXACT) -> None:
    assert found.shape == want.shape
    assert np.abs(found.double().numpy() - want).max() < limit * max(1.0, np.abs(want).max())


def poisoned(layer: Layer, rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """(state, window) of `rows` requests: what nobody wrote must not matter."""
    state = torch.full((rows, layer.heads, layer.dim, layer.dim), float("nan"), dtype=dtype)
    window = torch.full((rows, layer.conv.shape[1] - 1, layer.channels), float("nan"), dtype=dtype)
    return state, window


def prefill(layer, tokens, context, row, state, window) -> torch.Tensor:
    """A chain of committed tokens of one request."""
    batch = make_pass([len(tokens[0])], [context], [row], speculative=False)
    plan = ops.plan_recurrence(batch, layer.conv.shape[1])
    return ops.kda_prefill(*tokens, *layer.arguments(), state, window, plan)


def random_tree(rng: random.Random, nodes: int) -> TreeSpec:
    """A tree in breadth-first order, from chains to stars."""
    parents = [-1]
    for i in range(1, nodes):
        parents.append(rng.randint(parents[-1] if i > 1 else 0, i - 1))
    return TreeSpec(tuple(parents))


def line_of(tree: TreeSpec, node: int) -> list[int]:
    line = [node]
    while tree.parents[line[0]] >= 0:
        line.insert(0, tree.parents[line[0]])
    return line


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    contexts=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    nodes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    width=st.sampled_from([2, 4]),
    chain=st.booleans(),
)
def test_verify_and_commit_equal_the_recurrence(seed, contexts, nodes, width, chain) -> None:
    """Random trees of requests of any context: every node's output is its line's, nothing is written by the pass, and
    after the commit of any path the state is what the path alone would have made."""
    rng = random.Random(seed)
    layer = Layer.random(2, 4, width, seed)
    requests = len(contexts)
    state, window = poisoned(layer, requests + 1)
    rows = rng.sample(range(requests + 1), requests)
    written = []
    for r, (row, context) in enumerate(zip(rows, contexts)):
        own = Written.empty(layer)
        if context:
            tokens = layer.tokens(context, seed + r)
            found = prefill(layer, tokens, 0, row, state, window)
            near(found, np.stack([own.step(*t) for t in zip(*tokens)]))
            near(state[row], own.state)
        written.append(own)

    counts = nodes[:requests]
    trees = [TreeSpec.chain(n - 1) if chain else random_tree(rng, n) for n in counts]
    batch = make_pass(counts, contexts, rows, None if chain else trees)
    plan = ops.plan_recurrence(batch, width)
    tokens = layer.tokens(sum(counts), seed + 99)
    before = state.clone(), window.clone()
    found, records = ops.kda_verify(*tokens, *layer.arguments(), state, window, plan)
    for now, then in zip((state, window), before):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))

    first = 0
    paths, after = [], []
    for tree, own, count in zip(trees, written, counts):
        leaf = rng.randrange(count)
        for node in range(count):
            forked = own.fork()
            for at in line_of(tree, node):
                out = forked.step(*(t[first + at] for t in tokens))
            near(found[first + node], out)
            if node == leaf:
                after.append(forked)
        paths.append(line_of(tree, leaf))
        first += count
    depth = max(map(len, paths))
    path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths])
    ops.commit_states(state[None], window[None], [records], batch.state_rows, batch.context_lens, path)
    for row, own in zip(rows, after):
        near(state[row], own.state)
        assert np.array_equal(window[row].numpy(), own.window())
    idle = ({*range(requests + 1)} - {*rows}).pop()
    assert state[idle].isnan().all() and window[idle].isnan().all()


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [16, 16, 8], [3, 37], [17, 1, 22]])
def test_prompts_in_any_chunks(chunks) -> None:
    layer, own = Layer.random(2, 8, 4, 1), None
    state, window = poisoned(layer, 2)
    tokens = layer.tokens(40, 2)
    own = Written.empty(layer)
    want = np.stack([own.step(*t) for t in zip(*tokens)])
    start, found = 0, []
    for n in chunks:
        found.append(prefill(layer, tuple(t[start : start + n] for t in tokens), start, 1, state, window))
        start += n
    near(torch.cat(found), want)
    near(state[1], own.state)
    assert np.array_equal(window[1].numpy(), own.window())


def test_prompts_of_different_lengths_in_one_pass() -> None:
    layer = Layer.random(1, 4, 4, 3)
    state, window = poisoned(layer, 4)
    counts, rows = [5, 33, 1], [3, 0, 2]
    tokens = layer.tokens(sum(counts), 4)
    plan = ops.plan_recurrence(make_pass(counts, [0, 0, 0], rows, speculative=False), 4)
    found = ops.kda_prefill(*tokens, *layer.arguments(), state, window, plan)
    first = 0
    for n, row in zip(counts, rows):
        own = Written.empty(layer)
        near(found[first : first + n], np.stack([own.step(*(t[i] for t in tokens)) for i in range(first, first + n)]))
        near(state[row], own.state)
        assert np.array_equal(window[row].numpy(), own.window())
        first += n


def test_strongest_decay_neither_overflows_nor_vanishes_wrongly() -> None:
    """64 nodes in a line at the gate's bound: decays of exp(-320) beside neighbours of exp(-5)."""
    layer = Layer.random(1, 4, 4, 5, torch.float32)
    layer.dt_bias.fill_(100.0)
    state, window = poisoned(layer, 1, torch.float32)
    own = Written.empty(layer)
    context = layer.tokens(3, 6, torch.float32)
    prefill(layer, context, 0, 0, state, window)
    for t in zip(*context):
        own.step(*t)
    tokens = layer.tokens(64, 7, torch.float32)
    batch = make_pass([64], [3], [0], [TreeSpec.chain(63)])
    found, records = ops.kda_verify(*tokens, *layer.arguments(), state, window, ops.plan_recurrence(batch, 4))
    near(found, np.stack([own.step(*t) for t in zip(*tokens)]), 1e-5)
    path = torch.arange(64)[None]
    ops.commit_states(state[None], window[None], [records], batch.state_rows, batch.context_lens, path)
    near(state[0], own.state, 1e-5)


def test_a_thousand_events_leave_float32_states_at_rounding() -> None:
    """Accepted prefixes, rejected trees and aborted requests in any order, float32 against the plain recurrence."""
    rng = random.Random(8)
    layer = Layer.random(1, 8, 4, 9, torch.float32)
    state, window = poisoned(layer, 3, torch.float32)
    own = [Written.empty(layer) for _ in range(3)]
    contexts = [0, 0, 0]
    worst = 0.0
    for event in range(1000):
        rows = rng.sample(range(3), rng.randint(1, 3))
        counts = [rng.randint(1, 7) for _ in rows]
        trees = [random_tree(rng, n) for n in counts]
        batch = make_pass(counts, [contexts[r] for r in rows], rows, trees)
        tokens = layer.tokens(sum(counts), 1000 + event, torch.float32)
        _, records = ops.kda_verify(*tokens, *layer.arguments(), state, window, ops.plan_recurrence(batch, 4))
        what = rng.random()
        if what < 0.1:  # the whole step is dropped: nothing was written
            continue
        paths = [[0] if what < 0.3 else line_of(t, rng.randrange(n)) for t, n in zip(trees, counts)]
        depth = max(map(len, paths))
        path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths])
        ops.commit_states(state[None], window[None], [records], batch.state_rows, batch.context_lens, path)
        first = 0
        for r, line, n in zip(rows, paths, counts):
            for at in line:
                own[r].step(*(t[first + at] for t in tokens))
            own[r].inputs = own[r].inputs[-3:]
            contexts[r] += len(line)
            first += n
        if what > 0.9:  # aborted: the row goes to a new request
            gone = rng.choice(rows)
            own[gone], contexts[gone] = Written.empty(layer), 0
        for r in range(3):
            if contexts[r]:
                worst = max(worst, np.abs(state[r].numpy() - own[r].state).max())
                assert np.array_equal(window[r].numpy(), own[r].window())
    scale = max(np.abs(o.state).max() for o in own)
    assert worst < 2e-6 * max(1.0, scale)


def test_a_step_reads_nothing_back_to_the_host() -> None:
    """So that a verify pass and its commit fit in a CUDA graph."""
    layer = Layer.random(1, 4, 4, 0)
    state, window = poisoned(layer, 2)
    batch = make_pass([3, 3], [0, 4], [1, 0], [TreeSpec((-1, 0, 0))] * 2)
    tokens, path = layer.tokens(6, 1), torch.tensor([[0, 2], [0, -1]])
    state.zero_()
    window.zero_()
    with NoHostReads():
        _, records = ops.kda_verify(*tokens, *layer.arguments(), state, window, ops.plan_recurrence(batch, 4))
        args = (state[None], window[None], [records], batch.state_rows, batch.context_lens, path)
        ops.commit_states(*args)
    assert state.abs().sum((1, 2, 3)).min() > 0


def test_bytes_that_decided() -> None:
    """The record of a token against the state of a node, at Kimi-K3's heads of 128 channels (see `recurrence`)."""
    layer = Layer.random(1, 128, 4, 0, torch.float32)
    state, window = poisoned(layer, 1, torch.float32)
    batch = make_pass([2], [0], [0])
    tokens, plan = layer.tokens(2, 0, torch.float32), ops.plan_recurrence(batch, 4)
    _, records = ops.kda_verify(*tokens, *layer.arguments(), state, window, plan)
    assert isinstance(records, Records)
    token = sum(x[0, 0].numel() * x.element_size() for x in (records.keys, records.log_decay, records.updates))
    assert (token, state[0].numel() * state.element_size()) == (1536, 65536)


def test_passes_that_recurrent_layers_cannot_take() -> None:
    batch = make_pass([2], [0], [0])
    batch.state_rows = None
    with pytest.raises(ValueError, match="state_rows: found none"):
        ops.plan_recurrence(batch, 4)
    batch = make_pass([2], [0], [0])
    batch.first_query = 1
    with pytest.raises(ValueError, match="first_query: found 1, allowed: 0"):
        recurrence.plan_recurrence(batch, 4)
    plan = ops.plan_recurrence(make_pass([3], [0], [0], [TreeSpec((-1, 0, 0))]), 4)
    layer = Layer.random(1, 4, 4, 0)
    with pytest.raises(ValueError, match="ancestor_masks: found a tree of committed tokens"):
        ops.kda_prefill(*layer.tokens(3, 0), *layer.arguments(), *poisoned(layer, 1), plan)


def test_gated_norm() -> None:
    g = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 2, 8, generator=g, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(8, generator=g, dtype=torch.float64)
    a, b, w = x.numpy(), gate.numpy(), weight.numpy()
    want = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-3) * w / (1 + np.exp(-b))
    near(ops.gated_rms_norm(x, weight, gate, 1e-3), want)
