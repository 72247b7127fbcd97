"""The sequential stage by itself. Without vLLM but for the Triton kernels, which run in the interpreter of its
environment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dspark_runtime.vllm import markov
from tests.vllm import cases
from verify_kernels.markov import Markov


def head(kind: str, v: int = 29, r: int = 6, d: int = 10, seed: int = 0, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = {"gated": [(r, d + r), (r,)], "rnn": [(3 * r, 2 * r + d), (3 * r,)]}.get(kind, [])
    return Markov(kind, *(torch.randn(s, generator=g, dtype=dtype) for s in [(v, r), (v, r), *shapes]))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_chain_is_the_published_recurrence(kind: str) -> None:
    """Slot by slot in numpy, one product over the concatenated inputs."""
    h, (r, k, v, d) = head(kind), (3, 5, 29, 10)
    g = torch.Generator().manual_seed(1)
    base, hidden = torch.randn(r, k, v, generator=g).double(), torch.randn(r, k, d, generator=g).double()
    anchors = torch.tensor([3, 0, 28])
    seen: list[torch.Tensor] = []

    def pick(logits: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    found = markov.chain(h, base, hidden, anchors, pick)
    w1, w2 = h.w1.numpy(), h.w2.numpy()
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for i in range(r):
        token, state = int(anchors[i]), np.zeros(6)
        for j in range(k):
            e, x = w1[token], hidden[i, j].numpy()
            if kind == "vanilla":
                z = e
            elif kind == "gated":
                z = sigmoid(h.weight.numpy() @ np.concatenate((x, e)) + h.bias.numpy()) * e
            else:
                gate, c, o = np.split(h.weight.numpy() @ np.concatenate((state, e, x)) + h.bias.numpy(), 3)
                state, z = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(c), np.tanh(o)
            logits = base[i, j].numpy() + w2 @ z
            np.testing.assert_allclose(seen[j][i].numpy(), logits, rtol=1e-10)
            token = int(logits.argmax())
            assert token == found[i, j]


def test_without_a_head_slots_are_independent() -> None:
    base = torch.randn(2, 3, 7)
    found = markov.chain(None, base, torch.randn(2, 3, 4), torch.tensor([1, 2]), lambda logits, _: logits.argmax(-1))
    assert torch.equal(found, base.argmax(-1))


def murmur3(words: list[int]) -> int:
    """The published 32-bit hash of four words, in Python's integers."""
    rotate = lambda x, by: ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF  # noqa: E731
    h = 0
    for word in words:
        k = rotate((word & 0xFFFFFFFF) * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 4 * len(words)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def test_noise_is_murmur3() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789]
    positions, tokens = [0, 5, 2**30 + 7], [0, 1, 151935]
    found = markov.murmur3(*(torch.tensor(x).view(s) for x, s in
                             ((seeds, (-1, 1, 1)), (positions, (1, -1, 1)), (tokens, (1, 1, -1)))))  # fmt: skip
    expected = [[[murmur3([s, s >> 32, p, t]) for t in tokens] for p in positions] for s in seeds]
    assert found.tolist() == expected


def test_draws_follow_softmax_and_are_the_argmax_at_temperature_0() -> None:
    n, logits = 40_000, torch.tensor([1.0, 0.0, -1.0, 2.0, -4.0, 0.5])
    rows = logits.expand(n, -1)
    seeds, positions = torch.arange(n), torch.arange(n) % 7
    warm = markov.draw(rows, torch.full((n,), 0.7), seeds, positions, step=2)
    expected = (logits.double() / 0.7).softmax(-1) * n
    assert stats.chisquare(warm.bincount(minlength=6).numpy(), expected.numpy()).pvalue > 1e-3
    other = markov.draw(rows, torch.full((n,), 0.7), seeds, positions, step=3)
    table = torch.zeros(6, 6).index_put_((warm, other), torch.ones(n), accumulate=True)
    table = table[[0, 1, 2, 3, 5]][:, [0, 1, 2, 3, 5]]  # 4 is too rare
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3  # steps draw independently
    assert torch.equal(markov.draw(rows[:5], torch.zeros(5), seeds[:5], positions[:5], 0), torch.full((5,), 3))


TRITON = """
import json, sys, types
import torch
from dspark_runtime.vllm import markov, markov_triton
from verify_kernels.markov import Markov
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

out = []
for kind, rows, vocab, rank, dtype, warm in json.loads(sys.argv[1]):
    k, d, slots = 3, 24, rows + 3
    dtype = getattr(torch, dtype)
    g = torch.Generator().manual_seed(rows * vocab)
    rand = lambda *s: torch.randn(s, generator=g).to(dtype)
    extra = dict(gated=[(rank, d + rank), (rank,)], rnn=[(3 * rank, 2 * rank + d), (3 * rank,)]).get(kind, [])
    head = Markov(kind, *(rand(*s) * 0.5 for s in [(vocab, rank), (vocab, rank), *extra]))
    padded = torch.full((rows * k, vocab + 16), float("nan"), dtype=dtype)  # as vLLM pads
    padded[:, :vocab] = rand(rows * k, vocab) * 2
    base, hidden = padded[:, :vocab].view(rows, k, vocab), rand(rows, k, d)
    anchors = torch.randint(vocab, (rows,), generator=g)
    request = torch.randperm(slots, generator=g)[:rows]
    if rows > 2:
        request[1] = -1  # padding of a CUDA graph
    make = lambda: types.SimpleNamespace(
        draft_logits=torch.full((slots, k, vocab), float("nan"), dtype=dtype) if warm else None,
        sample_idx_mapping=request[:, None].expand(-1, k).flatten().contiguous(),
        sample_pos=torch.randint(1000, (rows * k,), generator=torch.Generator().manual_seed(5)),
        temperature=torch.linspace(0, 1.5, slots), seeds=torch.arange(slots) * 2654435761 - 2**40,
    )
    ours, theirs = make(), make()
    found = markov_triton.chain(head, base, hidden, anchors, ours)
    live, lines, worst = request >= 0, [], 0.0

    def pick(logits, step):
        # vLLM's own sampler, and what each token is worth to it: near ties may fall either way.
        if not warm:
            lines.append(logits.float())
            return found[:, step]
        cached = theirs.draft_logits[:, step]
        at = lambda x: x.view(rows, k)[:, step].contiguous()
        token = gumbel_sample(logits, at(theirs.sample_idx_mapping), theirs.temperature, theirs.seeds,
            at(theirs.sample_pos) - 1, apply_temperature=True, is_drafting=True, logits_cache=theirs.draft_logits,
            logits_cache_col=torch.tensor(step, dtype=torch.int32))
        slot = request.clamp(min=0)
        t = theirs.temperature[slot]
        own = markov.draw(logits, t * live, theirs.seeds[slot], at(theirs.sample_pos) - 1, step)
        lines.append((token, own))
        return found[:, step]  # so that both see one prefix

    markov.chain(head, base, hidden, anchors, pick)
    if warm:
        same = torch.stack([(a == found[:, i])[live].float().mean() for i, (a, _) in enumerate(lines)])
        torch_too = torch.stack([(a == b)[live].float().mean() for a, b in lines])
        x, y = (s.draft_logits[request[live]].float() for s in (ours, theirs))
        untouched = torch.ones(slots, dtype=torch.bool)
        untouched[request[live]] = False
        out.append(dict(same=same.mean().item(), torch_too=torch_too.mean().item(),
            error=((x - y).abs().max() / y.abs().max()).item(),
            written_elsewhere=not ours.draft_logits[untouched].isnan().all().item()))
    else:
        logits = torch.stack(lines, 1)
        gap = logits.max(-1).values - logits.gather(2, found[..., None])[..., 0]
        out.append(dict(gap=(gap.max() / logits.abs().max()).item(), same=(gap == 0).float().mean().item()))
print(json.dumps(out))
"""


def test_triton_kernels_draft_as_torch_and_draw_as_vllm(tmp_path: Path) -> None:
    """In the interpreter (whose products know no bfloat16): vocabularies and ranks that no block divides, padded rows,
    NaN around everything."""
    asked = [
        ("vanilla", 5, 300, 12, "float32", True),
        ("gated", 17, 129, 40, "float32", True),
        ("rnn", 3, 130, 72, "float32", True),
        ("vanilla", 2, 257, 64, "float16", True),
        ("rnn", 2, 300, 12, "float32", False),
        ("gated", 33, 70, 5, "float16", False),
    ]
    done = cases.python(["-c", TRITON, json.dumps(asked)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, found in zip(asked, json.loads(done.stdout.splitlines()[-1])):
        exact = case[4] == "float32"
        assert found["same"] > (0.999 if exact else 0.7), (case, found)
        if case[5]:
            assert found["torch_too"] == 1 and found["error"] < (1e-5 if exact else 2e-2), (case, found)
            assert not found["written_elsewhere"], case
        else:
            assert found["gap"] < (1e-5 if exact else 2e-2), (case, found)


