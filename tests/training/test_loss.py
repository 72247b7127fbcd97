"""The fused losses behind every head, values and gradients, against float64 autograd over the formulas one slot at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.dspark.heads import ConfidenceHead, MarkovHead
from tests.drafters import dspark_reference as reference
from training.loss import block_losses
from training.passes import Step, heads_pass

V, D, R, ROWS, LENGTH, ANCHORS, SLOTS = 40, 12, 6, 2, 20, 3, 4
SHAPES = {"vanilla": {}, "gated": {"gate_proj": (R, D + R)}, "rnn": {"joint_proj": (3 * R, 2 * R + D)}}


def heads(kind: str, seed: int) -> dict[str, Tensor]:
    """Tensors under DeepSpec's names, float64, all of them away from zero."""
    shapes = {"markov_head.markov_w1.weight": (V, R), "markov_head.markov_w2.weight": (V, R)}
    for name, shape in SHAPES[kind].items():
        shapes |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    shapes |= {"confidence_head.proj.weight": (1, D + R), "confidence_head.proj.bias": (1,), "lm_head.weight": (V, D)}
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).double() for name, shape in shapes.items()}


def network(kind: str, w: dict[str, Tensor]) -> SimpleNamespace:
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
    markov = MarkovHead(
        kind, w["markov_head.markov_w1.weight"].clone(), w["markov_head.markov_w2.weight"].clone(),
        *(w[f"markov_head.{extra}.{x}"].clone() for x in ("weight", "bias") if extra),
    )  # fmt: skip
    confidence = ConfidenceHead(*(w[f"confidence_head.proj.{x}"].clone() for x in ("weight", "bias")))
    return SimpleNamespace(markov=markov, confidence=confidence)


def step(seed: int) -> Step:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (ROWS, LENGTH), generator=draw)
    anchors = torch.stack([torch.randperm(LENGTH - SLOTS - 1, generator=draw)[:ANCHORS].sort().values for _ in range(ROWS)])
    labels = torch.stack([torch.stack([row[a + 1 : a + 1 + SLOTS] for a in at]) for row, at in zip(tokens, anchors.tolist())])
    whole = torch.ones(ROWS, ANCHORS, SLOTS, dtype=torch.bool)
    return Step(tokens, torch.zeros_like(tokens), torch.arange(LENGTH).expand(ROWS, -1), anchors, labels, whole)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_every_head_learns_by_the_gradient_of_the_formulas(kind: str, chunk: int) -> None:
    w, data = heads(kind, 3), step(4)
    draw = torch.Generator().manual_seed(5)
    n = ROWS * ANCHORS
    hidden = torch.randn(n, SLOTS, D, generator=draw).double().requires_grad_()
    other = torch.randn(ROWS * LENGTH, V, generator=draw).double() * 2
    rows = torch.randint(ROWS * LENGTH, (n * SLOTS,), generator=draw)
    a, b, c = (torch.rand(n * SLOTS, generator=draw) for _ in range(3))
    own = network(kind, w)

    z, confidence = heads_pass(own, data, hidden)
    loss, ce, tv = block_losses(
        hidden.flatten(0, 1), z.flatten(0, 1), w["lm_head.weight"], own.markov.w2, other, rows,
        data.labels.flatten(), a, b, chunk,
    )  # fmt: skip
    (loss + (c * confidence.flatten()).sum()).backward()

    leaves = {name: x.clone().requires_grad_() for name, x in w.items()}
    net = reference.Net(dict(leaves), markov=kind)
    twin = hidden.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n):
        state, before = None, int(data.tokens[i // ANCHORS, data.anchors[i // ANCHORS, i % ANCHORS]])
        for k in range(SLOTS):
            at, h = i * SLOTS + k, twin[i, k]
            # The confidence head reads the token before the slot, as the Markov head does.
            e = leaves["markov_head.markov_w1.weight"][before]
            sure = leaves["confidence_head.proj.weight"][0] @ torch.cat((h, e)) + leaves["confidence_head.proj.bias"][0]
            assert float(confidence[i, k].detach()) == pytest.approx(float(sure.detach()), rel=1e-5)
            bias, state = reference.markov(net, h, before, state)
            q, p = (leaves["lm_head.weight"] @ h + bias).softmax(0), other[rows[at]].softmax(0)
            before = int(data.labels[i // ANCHORS, i % ANCHORS, k])
            distance = (q - p).abs().sum()
            assert float(ce[at]) == pytest.approx(-float(q[before].detach().log()), rel=1e-5)
            assert float(tv[at]) == pytest.approx(float(distance.detach()), rel=1e-5)
            total = total - a[at] * q[before].log() + b[at] * distance + c[at] * sure
    total.backward()

    pairs = {"hidden": (hidden.grad, twin.grad)}
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
    names = {"markov_head.markov_w1.weight": own.markov.w1, "markov_head.markov_w2.weight": own.markov.w2}
    if extra:
        names |= {f"markov_head.{extra}.weight": own.markov.weight, f"markov_head.{extra}.bias": own.markov.bias}
    names |= {"confidence_head.proj.weight": own.confidence.weight, "confidence_head.proj.bias": own.confidence.bias}
    pairs |= {name: (p.grad, leaves[name].grad) for name, p in names.items()}
    for name, (mine, theirs) in pairs.items():
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 1000), st.booleans())
def test_chunks_change_nothing_and_the_head_without_tokens_is_the_plain_one(n: int, chunk: int, seed: int, bare: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    h, head, other = (torch.randn(*shape, generator=draw).double() for shape in ((n, D), (V, D), (7, V)))
    z, w2 = (None, None) if bare else (torch.randn(n, R, generator=draw).double(), torch.randn(V, R, generator=draw).double())
    rows, labels = torch.randint(7, (n,), generator=draw), torch.randint(V, (n,), generator=draw)
    weights = torch.rand(2, n, generator=draw)
    results = []
    for size in (chunk, n):
        leaves = [x.clone().requires_grad_() for x in (h, z, w2) if x is not None]
        again = leaves if not bare else [leaves[0], None, None]
        loss, ce, tv = block_losses(again[0], again[1], head, again[2], other, rows, labels, *weights, size)
        results.append([loss.detach(), ce, tv, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_drafter_that_is_the_target_has_no_distance_and_no_gradient_of_it() -> None:
    h, head = torch.randn(9, D).double().requires_grad_(), torch.randn(V, D).double()
    rows, labels = torch.arange(9), torch.randint(V, (9,))
    loss, _, tv = block_losses(h, None, head, None, (h @ head.T).detach(), rows, labels, torch.zeros(9), torch.ones(9))
    assert tv.abs().max() < 1e-6 and float(loss.detach()) < 1e-5
    assert torch.autograd.grad(loss, h)[0].abs().max() < 1e-5


def test_half_precision_tables_lose_what_their_digits_lose() -> None:
    """bf16 logits, as on the GPU: the gradient points where the float64 one does."""
    n = 64
    h, z, head, w2 = (torch.randn(*shape) for shape in ((n, D), (n, R), (V, D), (V, R)))
    other, rows, labels = torch.randn(20, V) * 2, torch.randint(20, (n,)), torch.randint(V, (n,))
    weights = torch.rand(2, n)
    found = []
    for kind in (torch.bfloat16, torch.float64):
        leaves = [x.clone().to(torch.float64 if kind == torch.float64 else torch.float32).requires_grad_() for x in (h, z, w2)]
        loss, *_ = block_losses(leaves[0], leaves[1], head.to(kind), leaves[2], other.to(kind), rows, labels, *weights)
        assert all(g.dtype == x.dtype for g, x in zip(torch.autograd.grad(loss, leaves, retain_graph=True), leaves))
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert float(found[0][0].detach()) == pytest.approx(float(found[1][0].detach()), rel=1e-2)
    for mine, gold in zip(found[0][1:], found[1][1:]):
        assert float(torch.cosine_similarity(mine.double().flatten(), gold.flatten(), dim=0)) > 0.999
