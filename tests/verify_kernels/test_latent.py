"""Latent attention, attention residuals and the latent mixture of experts against float64 transcriptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.verify_kernels.test_reference import make_batch
from verify_kernels import ops
from verify_kernels.quantized import Mxfp4


def near(found: torch.Tensor, want: np.ndarray, limit: float = 1e-12) -> None:
    assert found.shape == want.shape
    assert np.abs(found.double().numpy() - want).max() < limit * max(1.0, np.abs(want).max())


def normed(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    contexts=st.lists(st.integers(0, 11), min_size=3, max_size=3),
    page=st.sampled_from([1, 4]),
    tree=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_latent_attention(counts, contexts, page, tree, seed) -> None:
    """Against expanded keys and values: what absorption computes, without it."""
    contexts = contexts[: len(counts)]
    batch, pages = make_batch(seed, page, counts, contexts, tree)
    heads, nope, rope, rank, dim = 3, 4, 2, 6, 5
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n = batch.num_tokens
    q, up_k, up_v = random(n, heads, nope + rope), random(heads, nope, rank), random(heads, dim, rank)
    cache = torch.full((pages, page, 1, rank + rope), float("nan"), dtype=torch.float64)
    stored = []  # latents of every request, context first
    for r, (context, count) in enumerate(zip(contexts, counts)):
        line = random(context + count, rank + rope)
        for at in range(context):
            cache[int(batch.page_table[r, at // page]), at % page, 0] = line[at]
        stored.append(line)
    fresh = torch.cat([line[context:] for line, context in zip(stored, contexts)])
    ops.append_latents(fresh, cache, batch)
    plan = ops.plan_latent_attention(batch, page)
    absorbed = torch.cat((ops.head_linear(q[..., :nope], up_k.transpose(1, 2)), q[..., nope:]), dim=-1)
    out = ops.head_linear(ops.latent_attention(absorbed, cache, plan, rank, 0.3), up_v)

    want, row = np.zeros((n, heads, dim)), 0
    for line, context, count in zip(stored, contexts, counts):
        for own in range(count):
            mask = (2 << own) - 1 if batch.ancestor_masks is None else int(batch.ancestor_masks[row])
            seen = line[[*range(context), *(context + j for j in range(count) if mask >> j & 1)]]
            for h in range(heads):
                keys = torch.cat((seen[:, :rank] @ up_k[h].T, seen[:, rank:]), dim=1)
                weights = (keys @ q[row, h] * 0.3).softmax(0)
                want[row, h] = (weights @ (seen[:, :rank] @ up_v[h].T)).numpy()
            row += 1
    near(out, want)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_attention_residual(blocks: int) -> None:
    g = torch.Generator().manual_seed(blocks)
    sources = [torch.randn(4, 6, generator=g, dtype=torch.float64) * 2 for _ in range(blocks + 1)]
    norm, score, out_norm = (torch.randn(6, generator=g, dtype=torch.float64) for _ in range(3))
    found = ops.attention_residual(sources[-1], sources[:-1], norm, score, 1e-3, out_norm)
    for t in range(4):
        rows = np.stack([s[t].numpy() for s in sources])
        scores = [(normed(row, 1e-3) * norm.numpy()) @ score.numpy() for row in rows]
        weights = np.exp(scores) / np.exp(scores).sum()
        near(found[t], normed((weights[:, None] * rows).sum(0), 1e-3) * out_norm.numpy())


def e2m1(code: int) -> float:
    """A 4-bit value by its definition: sign, two bits of exponent (bias 1), one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code >> 3 else size


def mxfp4(shape: tuple[int, ...], seed: int) -> tuple[Mxfp4, np.ndarray]:
    """(weights, values) at random."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape)
    exponents = rng.integers(120, 130, (*shape[:-1], shape[-1] // 32))
    values = np.vectorize(e2m1)(codes) * np.repeat(2.0 ** (exponents - 127.0), 32, axis=-1)
    packed = torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))
    return Mxfp4(packed, torch.from_numpy(exponents.astype(np.uint8))), values


def situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear_beta * np.tanh(up / linear_beta)


def test_situ() -> None:
    x = torch.randn(3, 10, dtype=torch.float64) * 30
    near(ops.situ_and_mul(x, 4.0, 25.0), situ(x[:, :5].numpy(), x[:, 5:].numpy(), 4.0, 25.0))
    x = x.bfloat16()  # one rounding
    want = torch.from_numpy(situ(*(t.double().numpy() for t in x.chunk(2, -1)), 4.0, 25.0))
    assert (ops.situ_and_mul(x, 4.0, 25.0).double() - want).abs().max() <= want.abs().max() * 2.0**-8


def test_experts() -> None:
    experts, latent, inner, tokens = 5, 64, 32, 7
    (w1, a), (w2, b) = mxfp4((experts, 2 * inner, latent), 1), mxfp4((experts, latent, inner), 2)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, latent, generator=g, dtype=torch.float64) * 0.1
    ids = torch.stack([torch.randperm(experts, generator=g)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=g)
    found = ops.situ_experts(x, w1, w2, weights, ids, 4.0, 25.0)
    want = np.zeros((tokens, latent))
    for t in range(tokens):
        for e, w in zip(ids[t].tolist(), weights[t].tolist()):
            gate, up = np.split(a[e] @ x[t].numpy(), 2)
            want[t] += w * (b[e] @ situ(gate, up, 4.0, 25.0))
    near(found, want)
