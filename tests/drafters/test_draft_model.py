"""A draft model: its drafts are those of plain decoding with it, whatever was accepted before."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from drafters.base import BatchState
from drafters.draft_model import DraftModel
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.targets import load_target
from tests.dspark_runtime.test_capturable import NoHostReads
from verify_kernels import ops
from verify_kernels.batch import PassBatch, slots_of

TREES = [
    TreeSpec.chain(1),
    TreeSpec.chain(4),
    TreeSpec((-1, 0, 0, 1, 1, 2, 3)),
    TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)),
]
V = 11


def noisy(salt: int):
    def logits(prefix: tuple[int, ...]) -> list[float]:
        g = torch.Generator().manual_seed(hash((salt, *prefix)) & 0xFFFFFFFF)
        return torch.randn(V, generator=g).tolist()

    return logits


def ranked(logits, prefix: tuple[int, ...]) -> list[int]:
    row = logits(prefix)
    return sorted(range(V), key=lambda i: (-row[i], i))


@pytest.mark.parametrize("spec", TREES, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_node_is_the_right_child_of_its_parent(spec: TreeSpec, page_size: int) -> None:
    """The draft model disagrees with the target half of the time, so paths of every kind are accepted."""
    ours, theirs = noisy(1), noisy(2)

    def drafts(prefix: tuple[int, ...]) -> list[float]:
        return ours(prefix) if sum(prefix) % 2 else theirs(prefix)

    class Watched(DraftModel):
        def propose(self, state, spec, sample):
            tree = super().propose(state, spec, sample)
            for r in range(state.num_requests):
                committed = tuple(state.tokens[r, : int(state.seq_lens[r])].tolist())
                path = {0: committed}
                for i in range(1, int(tree.num_nodes[r])):
                    parent = int(tree.parents[r, i])
                    rank = [int(p) for p in tree.parents[r, :i]].count(parent)
                    assert int(tree.tokens[r, i]) == ranked(drafts, path[parent])[rank]
                    path[i] = path[parent] + (int(tree.tokens[r, i]),)
                checked.append(int(tree.num_nodes[r]))
            return tree

    checked: list[int] = []
    drafter = Watched(ScriptedModel(V, drafts, max_model_len=128))
    engine = Engine(
        ScriptedModel(V, ours, max_model_len=128),
        drafter,
        spec=spec,
        max_num_requests=3,
        page_size=page_size,
        max_prefill_tokens=5,
    )
    prompts = [[1], [2, 3], [4] * 9, [5, 6, 7], [8]]
    params = SamplingParams(temperature=0.0, max_tokens=25)
    plain = Engine(ScriptedModel(V, ours, max_model_len=128)).generate(prompts, params)
    outs = engine.generate(prompts, params)
    assert [o.token_ids for o in outs] == [o.token_ids for o in plain]
    assert sum(o.num_accepted for o in outs) > 0 and max(checked) == spec.num_nodes


@pytest.mark.parametrize("spec", TREES, ids=str)
def test_twin_accepts_everything(spec: TreeSpec) -> None:
    model = load_target("tiny", weights="dummy", dtype="float32", device="cpu", max_model_len=128).model
    engine = Engine(model, DraftModel(model), spec=spec, max_num_requests=3, page_size=4, max_prefill_tokens=7)
    prompts = [[1], [5, 6], list(range(1, 20)), [9, 9, 9], [3] * 40]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=23, ignore_eos=True))
    for record in engine.records:
        for drafted, accepted in zip(record.drafted, record.accepted):
            assert accepted == spec.depth or drafted < spec.num_drafts
    assert sum(sum(r.accepted) for r in engine.records)


def test_nothing_is_drafted_past_the_draft_models_own_limit() -> None:
    ours = noisy(1)
    short = DraftModel(ScriptedModel(V, lambda p: ours(p) if len(p) <= 20 else [float("nan")] * V, max_model_len=20))
    engine = Engine(ScriptedModel(V, ours, max_model_len=64), short, spec=TreeSpec.chain(3))
    params = SamplingParams(temperature=0.0, max_tokens=40)
    outs = engine.generate([[1, 2, 3], [4] * 30], params)
    assert [o.token_ids for o in outs] == [
        o.token_ids for o in Engine(ScriptedModel(V, ours, max_model_len=64)).generate([[1, 2, 3], [4] * 30], params)
    ]
    long_only = [r for r in engine.records if r.request_ids == [1]]
    assert outs[0].num_accepted > 0 and outs[1].num_drafted == 0 and all(r.drafted == [0] for r in long_only)


def sampled_state(rows: int, temperature: float) -> BatchState:
    return BatchState(
        tokens=torch.full((rows, 8), 3),
        seq_lens=torch.full((rows,), 1),
        page_table=torch.arange(1, 2 * rows + 1, dtype=torch.int32).view(rows, 2),
        max_drafts=torch.full((rows,), 5),
        temperature=torch.full((rows,), temperature),
        seeds=torch.arange(rows),
        num_outputs=torch.zeros(rows, dtype=torch.int64),
        max_seq_len=1,
    )


def test_children_are_drawn_without_replacement() -> None:
    row = [1.0, 0.3, -0.5, 0.0]
    model = ScriptedModel(4, lambda prefix: row, max_model_len=16)
    drafter = DraftModel(model)
    rows, temperature = 4000, 0.8
    drafter.allocate(2 * rows + 1, 4, torch.device("cpu"))
    tree = drafter.propose(sampled_state(rows, temperature), TreeSpec((-1, 0, 0, 1)), True)
    q = (torch.tensor(row, dtype=torch.float64) / temperature).softmax(0)
    assert torch.allclose(tree.probs[:, :2].double(), q.expand(rows, 2, 4))
    counts = torch.zeros(4, 4, dtype=torch.float64)
    counts.index_put_((tree.tokens[:, 1], tree.tokens[:, 2]), torch.ones(rows, dtype=torch.float64), accumulate=True)
    law = q[:, None] * q / (1 - q[:, None])
    law.fill_diagonal_(0)
    off = ~torch.eye(4, dtype=torch.bool)
    assert counts.diagonal().sum() == 0
    assert stats.chisquare(counts[off].numpy(), (law[off] / law.sum() * rows).numpy()).pvalue > 1e-3
    # The grandchild is independent of its parent's draw.
    pairs = torch.bincount(tree.tokens[:, 1] * 4 + tree.tokens[:, 3], minlength=16)
    assert stats.chisquare(pairs.numpy(), ((q[:, None] * q).flatten().double() * rows).numpy()).pvalue > 1e-3


def test_same_seed_same_drafts_whatever_the_row() -> None:
    model = ScriptedModel(V, noisy(1), max_model_len=16)
    spec = TreeSpec((-1, 0, 0, 1))
    state = sampled_state(4, 1.0)
    drafter = DraftModel(model)
    drafter.allocate(9, 4, torch.device("cpu"))
    tree = drafter.propose(state, spec, True)
    state.seeds, state.page_table = state.seeds.flip(0), state.page_table.flip(0)
    assert torch.equal(drafter.propose(state, spec, True).tokens.flip(0), tree.tokens)


def test_greedy_rows_are_greedy_in_a_sampled_batch() -> None:
    model = ScriptedModel(V, noisy(1), max_model_len=16)
    spec = TreeSpec((-1, 0, 0, 1))
    drafter = DraftModel(model)
    drafter.allocate(9, 4, torch.device("cpu"))
    state = sampled_state(4, 1.0)
    state.temperature[2] = 0.0
    tree = drafter.propose(state, spec, True)
    best = ranked(noisy(1), (3,))
    assert tree.tokens[2, 1:3].tolist() == best[:2]
    assert tree.probs[2, 0].argmax() == best[0] and tree.probs[2, 0].sum() == tree.probs[2, 0].max() == 1


@pytest.mark.parametrize(
    "row, temperature", [([0.0, 30.0, 10.0, 20.0, 5.0], 0.02), ([0.0, float("nan"), 1.0, 2.0, 3.0], 1.0)]
)
def test_siblings_differ_and_probs_are_a_distribution_when_q_is_spent_or_broken(
    row: list[float], temperature: float
) -> None:
    drafter = DraftModel(ScriptedModel(5, lambda prefix: row, max_model_len=16))
    drafter.allocate(5, 4, torch.device("cpu"))
    tree = drafter.propose(sampled_state(2, temperature), TreeSpec((-1, 0, 0, 0, 0, 1)), True)
    # Here the first child has all the probability; the best tokens that are left follow it.
    rest = sorted({0, 2, 3, 4}, key=lambda i: -row[i])
    assert tree.tokens.tolist() == [[3, 1, *rest[:3], 1]] * 2
    assert tree.probs[:, :2].tolist() == [[[0.0, 1.0, 0.0, 0.0, 0.0]] * 2] * 2


@pytest.mark.parametrize("sample", [False, True])
def test_nodes_beyond_pages_and_table_are_written_to_nobody(sample: bool) -> None:
    """Rows whose pages, or whose whole page table, end among the deep nodes: other pages keep what they hold."""
    model = load_target("tiny", weights="dummy", dtype="float32", device="cpu", max_model_len=128).model
    spec, page_size, context = TreeSpec((-1, 0, 0, 1, 2, 3, 4)), 2, [0, 4, 7]
    wide = torch.tensor([[9, 4, 12, 13, 14, 15, 16], [2, 11, 7, 17, 18, 19, 20], [5, 1, 8, 3, 10, 21, 22]])
    narrow = wide[:, :5].clone()
    narrow[0, 2:] = narrow[1, 4:] = 0  # row 2 fills its table: its nodes 3 and later have no column
    state = sampled_state(3, 0.9)
    state.tokens = torch.arange(30).view(3, 10)
    state.seq_lens = torch.tensor(context) + 1
    state.max_drafts = torch.ones(3, dtype=torch.int64)
    state.max_seq_len = max(context) + 1
    found = []
    for table in (wide, narrow):
        drafter = DraftModel(model)
        drafter.allocate(30, page_size, torch.device("cpu"))
        state.page_table = table.to(torch.int32)
        for r, length in enumerate(context):
            if length:
                drafter.prefill(prompt_pass(state.tokens[r, :length], state.page_table[r], page_size), None)
        before = drafter.kv.k.clone()
        tree = drafter.propose(state, spec, sample)
        assert tree.num_nodes.tolist() == [3, 3, 3]
        own = [(r, n + i) for r, n in enumerate(context) for i in range(3)]
        kept = [drafter.kv.k[:, table[r, at // page_size], at % page_size] for r, at in own]
        found.append((tree.tokens, torch.stack(kept)))
        touched = (drafter.kv.k != before).flatten(2).any(2).any(0)
        assert {int(p) for p in touched.nonzero()} <= {0, *table.flatten().tolist()}
        for r, length in enumerate(context):  # the context itself is as the prompt left it
            for i in range(length - 1):
                page = table[r, i // page_size], i % page_size
                assert torch.equal(drafter.kv.k[:, page[0], page[1]], before[:, page[0], page[1]])
    # The nodes that are kept have the same tokens and the same keys as with room for all.
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-5)


def prompt_pass(ids: torch.Tensor, pages: torch.Tensor, page_size: int) -> PassBatch:
    n = len(ids)
    at = torch.arange(n)
    return PassBatch(
        token_ids=ids,
        positions=at,
        request_offsets=torch.tensor([0, n], dtype=torch.int32),
        context_lens=torch.zeros(1, dtype=torch.int32),
        page_table=pages[None],
        slot_mapping=slots_of(pages[None], at[None], page_size)[0],
        ancestor_masks=None,
        max_query_len=n,
        max_kv_len=n,
    )


@pytest.mark.parametrize("spec", TREES[1:3], ids=str)
@pytest.mark.parametrize("sample", [False, True])
def test_proposing_reads_nothing_back(spec: TreeSpec, sample: bool) -> None:
    model = load_target("tiny", weights="dummy", dtype="float32", device="cpu", max_model_len=128).model
    drafter = DraftModel(model)
    drafter.allocate(7, 4, torch.device("cpu"))
    state = sampled_state(3, 0.8)
    ops.use("reference")  # whose operations a CUDA graph could hold
    try:
        drafter.propose(state, spec, sample)  # constants are made once
        with NoHostReads():
            drafter.propose(state, spec, sample)
    finally:
        ops.use("auto")
