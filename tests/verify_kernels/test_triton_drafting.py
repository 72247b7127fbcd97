"""The drafting kernels against the reference on random shapes that no block divides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.triton_cases import DEVICE, kernels, on_device, poisoned, same  # noqa: F401
from verify_kernels.markov import Markov
from verify_kernels.reference import drafting

OURS = kernels()


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=g).to(dtype)


def markov(g: torch.Generator, kind: str, vocab: int, rank: int, d: int, draft_vocab: int = 0) -> Markov:
    extra = {"gated": [(rank, d + rank), (rank,)], "rnn": [(3 * rank, 2 * rank + d), (3 * rank,)]}.get(kind, [])
    shapes = [(vocab, rank), (draft_vocab or vocab, rank), *extra]
    return Markov(kind, *(normal(g, *shape) * 0.7 for shape in shapes))


@pytest.mark.parametrize("n, layers, heads, dim, norms, dtype", [
    (1, 1, 1, 2, True, torch.float32), (5, 3, 3, 16, True, torch.float32), (4, 2, 2, 12, False, torch.float32),
    (3, 2, 2, 8, True, torch.float16),
])  # fmt: skip
def test_append_context(n: int, layers: int, heads: int, dim: int, norms: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(n)
    kv = normal(g, n, layers, 2, heads, dim, dtype=dtype)
    pages, size = 7, 4
    cache = torch.full((2, layers, pages, size, heads, dim), float("nan"), dtype=dtype)
    slots = torch.randperm(pages * size, generator=g)[:n]
    angles = torch.rand(30, dim // 2, generator=g) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norm = normal(g, layers, dim, dtype=dtype) if norms else None
    args = (slots, torch.randint(30, (n,), generator=g), cos_sin, norm, 1e-5)
    ours = cache.to(DEVICE).clone()
    drafting.append_context(kv, *cache, *args)
    OURS["append_context"](on_device(kv), *ours, *map(on_device, args))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours.cpu(), cache, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert int((~cache.isnan()).sum()) == 2 * kv[:, :, 0].numel()


@pytest.mark.parametrize("rows, vocab, count", [
    (1, 1, 1), (3, 48, 32), (2, 65, 5), (2, 2500, 32), (1, 5000, 33), (2, 700, 1),
])  # fmt: skip
def test_top(rows: int, vocab: int, count: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    x = normal(g, rows, vocab + 3)[:, :vocab]
    same(OURS["top"](on_device(x), count), drafting.top(x, count))
    x = x.to(torch.float16).clamp(-1, 1)  # equal entries everywhere: values as torch's, ids the lowest
    values, ids = (y.cpu() for y in OURS["top"](on_device(x), count))
    order = x.float().sort(dim=1, descending=True, stable=True)
    same((values, ids), (order.values[:, :count], order.indices[:, :count]))


def test_top_of_broken_rows() -> None:
    """NaN and infinities give indices that exist."""
    x = torch.full((3, 300), float("-inf"))
    x[1] = float("nan")
    x[2, 7] = float("inf")
    values, ids = OURS["top"](on_device(x), 4)
    assert ids[0].tolist() == ids[1].tolist() == [0, 1, 2, 3] and ids[2, 0] == 7 and values[1].isnan().all()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("r, slots, m, rank, sure, pruned", [
    (3, 4, 8, 5, "markov", False), (2, 7, 32, 40, "none", True), (1, 1, 3, 16, "hidden", False),
    (4, 3, 5, 33, "markov", True),
])  # fmt: skip
def test_draft_chain(kind: str | None, r: int, slots: int, m: int, rank: int, sure: str, pruned: bool) -> None:
    """Tokens, and their confidence where they agree: a near tie may fall either way."""
    g = torch.Generator().manual_seed(r * slots + rank)
    vocab, d = 90, 24
    drafted = 60 if pruned else vocab
    head = None if kind is None else markov(g, kind, vocab, rank, d, drafted)
    sure = "hidden" if kind is None and sure == "markov" else sure
    ids = torch.stack([torch.randperm(drafted, generator=g)[:m] for _ in range(r * slots)]).view(r, slots, m)
    wide = d + rank if sure == "markov" else d
    args = (
        normal(g, r, slots, m), ids, normal(g, r, slots, d), torch.randint(vocab, (r,), generator=g),
        torch.randint(0, slots + 3, (r,), generator=g), torch.tensor([0.0, 0.7, 1.0, 2.0])[:r], head,
        torch.randperm(vocab, generator=g)[:drafted] if pruned else None,
        None if sure == "none" else (normal(g, 1, wide) * 0.3, normal(g, 1)),
        None if sure == "none" else torch.rand(slots, generator=g) + 0.5,
    )  # fmt: skip
    moved = [Markov(x[0], *map(on_device, x[1:])) if isinstance(x, Markov) else
             tuple(map(on_device, x)) if isinstance(x, tuple) else on_device(x) for x in args]  # fmt: skip
    found, wanted = OURS["draft_chain"](*moved), drafting.draft_chain(*args)
    same(found[:3], wanted[:3])
    torch.testing.assert_close(found[3].cpu(), wanted[3], rtol=1e-4, atol=1e-5)


def test_markov_is_the_published_recurrence() -> None:
    """Each kind of head in float64, one product over the concatenated inputs (drafters fact sheet §1.3)."""
    g = torch.Generator().manual_seed(3)
    for kind in ("vanilla", "gated", "rnn"):
        head = markov(g, kind, 20, 6, 10)
        head = Markov(kind, *(None if x is None else x.double() for x in head[1:]))
        state = torch.zeros(2, 6).double()
        found = None
        for _ in range(3):
            e, hidden = normal(g, 2, 6).double(), normal(g, 2, 10).double()
            z, found = head.step(e, head.of_hidden(hidden), found)
            if kind == "vanilla":
                want = e
            elif kind == "gated":
                want = torch.sigmoid(torch.cat((hidden, e), 1) @ head.weight.T + head.bias) * e
            else:
                gate, c, o = (torch.cat((state, e, hidden), 1) @ head.weight.T + head.bias).chunk(3, 1)
                state, want = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * c.tanh(), o.tanh()
                torch.testing.assert_close(found, state)
            torch.testing.assert_close(z, want)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("r, slots, vocab, rank", [(3, 4, 300, 12), (17, 2, 129, 40), (1, 3, 70, 72)])
def test_draw_chain(kind: str, r: int, slots: int, vocab: int, rank: int) -> None:
    """The same draws and their laws; padded rows of base, NaN behind them, and one broken row."""
    g = torch.Generator().manual_seed(r * vocab + rank)
    d = 24
    padded = torch.full((r, slots, vocab + 5), float("nan"))
    base = padded[..., :vocab]
    base[:] = normal(g, r, slots, vocab) * 2
    temperature = torch.linspace(0, 1.5, r) if r > 1 else torch.tensor([0.8])
    if r > 3:
        base[3] = float("nan")
    seeds = torch.randint(-(2**62), 2**62, (r,), generator=g)
    args = (
        base, normal(g, r, slots, d), torch.randint(vocab, (r,), generator=g), markov(g, kind, vocab, rank, d),
        temperature, seeds, torch.randint(99, (r,), generator=g),
    )  # fmt: skip
    moved = [Markov(x[0], *map(on_device, x[1:])) if isinstance(x, Markov) else on_device(x) for x in args]
    found, wanted = OURS["draw_chain"](*moved), drafting.draw_chain(*args)
    sound = torch.arange(r) != 3
    same(found[0].cpu()[sound], wanted[0][sound])
    torch.testing.assert_close(found[1].cpu()[sound], wanted[1][sound], rtol=1e-4, atol=1e-6)
    assert ((found[0] >= 0) & (found[0] < vocab)).all() and (found[1][:, :slots].sum(-1) > 0.999).all()


def test_draws_follow_their_law() -> None:
    """Chi-square of the first draft over many seeds, and every draft has its own draw."""
    from scipy import stats

    g = torch.Generator().manual_seed(4)
    n, vocab = 4000, 6
    head = markov(g, "vanilla", vocab, 4, 8)
    base, hidden = normal(g, 1, 2, vocab).expand(n, -1, -1).contiguous(), normal(g, 1, 2, 8).expand(n, -1, -1)
    args = (base, hidden, torch.zeros(n).long(), head, torch.full((n,), 0.7), torch.arange(n), torch.arange(n) % 5)
    moved = [Markov(x[0], *map(on_device, x[1:])) if isinstance(x, Markov) else on_device(x) for x in args]
    tokens, probs = (x.cpu() for x in OURS["draw_chain"](*moved))
    expected = probs[0, 0].double() * n
    counts = tokens[:, 0].bincount(minlength=vocab).numpy()
    assert stats.chisquare(counts, (expected / expected.sum() * n).numpy()).pvalue > 1e-3
    for first in range(vocab):
        of = tokens[:, 0] == first
        want = probs[of][0, 1].double()
        if of.sum() > 200:
            counts = tokens[of, 1].bincount(minlength=vocab).numpy()
            assert stats.chisquare(counts, (want / want.sum() * of.sum()).numpy()).pvalue > 1e-3
