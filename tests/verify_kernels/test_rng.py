from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from verify_kernels import rng

MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _uniform(seed: int, counter: int, stream: int, index: int) -> float:
    """The same draw in unsigned Python integers."""
    gamma = 0x9E3779B97F4A7C15
    key = _mix((_mix((seed + gamma) & MASK) + counter * gamma + stream + 1) & MASK)
    return (_mix((key + (index + 1) * 0x94D049BB133111EB) & MASK) >> 11) * 2.0**-53


def test_draws_equal_an_unsigned_transcription():
    for seed in (0, 1, 17, -1, 2**63 - 1, -(2**63)):
        for counter, stream, index in ((0, 0, 0), (5, 2, 3), (10**6, 4, 63)):
            u = rng.uniform(torch.tensor([seed]), torch.tensor([counter]), stream, index)
            assert u.dtype == torch.float64 and u.item() == _uniform(seed, counter, stream, index)


def test_arguments_broadcast_and_a_draw_depends_on_its_key_alone():
    seeds, counters = torch.arange(4) * 1000, torch.arange(4) * 7
    grid = rng.uniform(seeds[:, None], counters[:, None], rng.ACCEPT, torch.arange(3))
    assert grid.shape == (4, 3)
    for r in range(4):
        for i in range(3):
            assert grid[r, i] == rng.uniform(seeds[r : r + 1], counters[r : r + 1], rng.ACCEPT, i)


def test_every_part_of_the_key_gives_a_uniform_and_uncorrelated_draw():
    n = 100_000
    vary, fixed = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    draws = [
        rng.uniform(vary, fixed, rng.TARGET),
        rng.uniform(fixed, vary, rng.TARGET),
        rng.uniform(fixed, fixed, rng.TARGET, vary),
        rng.uniform(vary, fixed, rng.DRAFT),
        rng.uniform(vary, fixed + 1, rng.TARGET),
        rng.uniform(vary, fixed, rng.TARGET, 1),
    ]
    for u in draws:
        assert 0 <= u.min() and u.max() < 1
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / n**0.5
    for i in range(len(draws)):
        for j in range(i):
            assert abs(np.corrcoef(draws[i], draws[j])[0, 1]) < 5 / n**0.5


def test_sample_inverts_the_cumulative_sum_and_never_returns_an_impossible_id():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    u = torch.tensor([0.0, 0.499, 0.5, 0.749, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    for scale in (1.0, 3.7, 1e-20):
        assert rng.sample((probs * scale).expand(6, 6), u).tolist() == [1, 1, 3, 3, 4, 4]
    one_hot = torch.nn.functional.one_hot(torch.tensor([2, 0, 5]), 6).float()
    assert rng.sample(one_hot, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [2, 0, 5]


def test_distinct_draws_are_draws_from_what_the_earlier_ones_left():
    vocab, count = 300, 5
    probs = torch.rand(40, vocab, generator=torch.Generator().manual_seed(0)) ** 8
    probs[0, 2:] = 0  # two ids only
    probs[1] = 0
    u = torch.rand(40, count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, ids = probs.clone(), rng.sample_distinct(probs, u)
    assert torch.equal(probs, before)
    left = probs.clone()
    for j in range(count):
        some = left.sum(-1) > 0
        assert torch.equal(ids[:, j] >= 0, some)
        assert torch.equal(ids[some, j], rng.sample(left, u[:, j])[some])
        left[some] = left[some].scatter(1, ids[some, j : j + 1], 0.0)
    assert sorted(ids[0].tolist()) == [-1, -1, -1, 0, 1] and ids[1].tolist() == [-1] * 5


def test_distinct_draws_have_the_law_of_drawing_without_replacement():
    probs, n = torch.tensor([0.5, 0.3, 0.15, 0.05]), 50_000
    u = rng.uniform(torch.arange(n)[:, None], torch.zeros(n, 1, dtype=torch.int64), rng.DRAFT, torch.arange(2))
    first, second = rng.sample_distinct(probs.expand(n, 4), u).unbind(-1)
    law = probs.double()[:, None] * probs.double() / (1 - probs.double()[:, None])
    off = ~torch.eye(4, dtype=torch.bool)
    counts = (first * 4 + second).bincount(minlength=16).view(4, 4)
    assert counts.diagonal().sum() == 0
    assert stats.chisquare(counts[off].double(), (law * n)[off], sum_check=False).pvalue > 1e-3
