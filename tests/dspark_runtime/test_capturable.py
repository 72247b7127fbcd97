"""Nothing in sampling or acceptance reads the device or copies from the host, so that a step fits in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.base import BatchState
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime import acceptance, synthetic
from dspark_runtime.sampling import SamplingParams, SamplingState, logprobs_of, target_probs

aten = torch.ops.aten
CHAIN, BUSHY = TreeSpec.chain(3), TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3, 5))


class NoHostReads(TorchDispatchMode):
    """Refuses what a capturing stream refuses: reading a value, value-dependent sizes, constants from the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        assert packet not in (aten._local_scalar_dense, aten.nonzero, aten.masked_select), func
        # A scalar is a kernel argument; a list is a copy.
        assert packet is not aten.lift_fresh or args[0].dim() == 0, "a tensor made from a list"
        if packet in (aten.index, aten.index_put, aten.index_put_):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean mask as an index"
        return func(*args, **(kwargs or {}))


def step(name: str, device: str):
    """A function of no arguments that does one step's sampling and acceptance in a mixed batch."""
    spec = CHAIN if name in ("standard", "block", "chain law", "trace") else BUSHY
    r, n, vocab = 3, spec.num_nodes, 11
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(r * n, vocab, generator=generator).to(device)
    tokens = torch.randint(vocab, (r, n), generator=generator).to(device)
    tree = DraftTree.from_spec(spec, tokens, probs=torch.rand(r, n, vocab, generator=generator).softmax(2).to(device))
    history = torch.randint(vocab, (r, 6), generator=generator).to(device)
    zeros = torch.zeros(r, dtype=torch.int64, device=device)
    seeds = torch.arange(r, device=device)
    state = BatchState(history, zeros + 5, zeros[:, None].int(), zeros + 9, zeros.float(), seeds, zeros + 2, 6)
    everything = dict(frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={1: 2.0}, min_tokens=4)
    params = [
        SamplingParams(top_k=5, top_p=0.9, min_p=0.01, **everything),
        SamplingParams(temperature=0, **everything),
        SamplingParams(),
    ]
    sampling = SamplingState.build(params, [3] * r, [(0, 2), (), (5,)], vocab, device)
    rows = torch.arange(r * n, device=device).view(r, n)
    laws = {
        "chain law": synthetic.SyntheticLaw.make(3, acceptance_length=2.5),
        "tree law": synthetic.SyntheticLaw.make(3, acceptance_length=2.5, law="geometric", rank_frequencies=[2, 1]),
        "trace": synthetic.SyntheticLaw("trace", (0.5, 0.5, 0.5), (0, 3)),
    }

    def run():
        cut = tree.limit(zeros + torch.arange(r, device=device) + 1)
        probs = target_probs(logits, sampling, state, cut, rows)
        if name in laws:
            got = synthetic.accept(cut, probs.argmax(1)[rows], laws[name], seeds, state.num_outputs)
        elif name == "greedy":
            got = acceptance.greedy(cut, probs.argmax(1)[rows])
        else:
            got = acceptance.RULES[name].accept(cut, probs, rows, seeds, state.num_outputs)
        chosen = logits[rows.gather(1, got.path.clamp(min=0)).flatten()]
        return [*vars(got).values(), *logprobs_of(chosen, got.tokens.clamp(min=0).flatten(), 2)]

    return run


NAMES = ["greedy", *acceptance.RULES, "chain law", "tree law", "trace"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_nothing_back(name, monkeypatch):
    run = step(name, "cpu")
    want = run()  # a law's tables are made on the first call, before any capture
    monkeypatch.setattr(acceptance, "_worth_trying", lambda trial: slice(None))  # as on a GPU: all requests at each node
    with NoHostReads():
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_the_guard_sees_host_reads():
    x = torch.arange(3)
    for read in (lambda: x.sum().item(), lambda: x[x > 1], lambda: x.nonzero(), lambda: torch.tensor([1])):
        with pytest.raises(AssertionError), NoHostReads():
            read()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_replays_to_the_same_tokens_as_on_the_cpu(name):
    run = step(name, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.fill_(-7)
    graph.replay()
    torch.cuda.synchronize()
    want = step(name, "cpu")()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], want[:3]))
    assert torch.allclose(got[3].cpu(), want[3], atol=1e-5) and torch.allclose(got[5].cpu(), want[5], atol=1e-5)
