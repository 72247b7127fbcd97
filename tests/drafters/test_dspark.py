"""Every dialect, loaded from disk and run in the engine, against the fact sheet's formulas; and its traps, sprung."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dspark import calibration
from drafters.dspark.config import DrafterConfig
from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.eagle3 import Eagle3Drafter
from drafters.dspark.load import build, load_drafter, read_config, read_tensors
from drafters.dspark.dialects import parse
from drafters.tree import TreeSpec
from drafters.tree_search import drawn_tree
from dspark_runtime.engine import Engine
from dspark_runtime.sampling import SamplingParams
from tests.dspark_runtime.passes import Pages
from tests.dspark_runtime.test_capturable import NoHostReads
from tests.drafters import dspark_reference as reference
from tests.drafters.dspark_cases import (
    DEEPSPEC, DIMS, H, HEADS, LAYERS, TAPS, V, block_tensors, eagle_tensors, pruned, target, write,
)  # fmt: skip
from verify_kernels import ops

PROMPTS = [[1], [5, 6], list(range(1, 20)), [9, 9, 9], [3] * 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
TREE = TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))


@dataclass
class Case:
    """A checkpoint and what the formulas need to know of it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    net: reference.Net
    taps: list[int] = field(default_factory=lambda: TAPS)
    first_slot: int = 0
    drafts: int = 4
    ids: Tensor = field(default_factory=lambda: torch.arange(V))
    rename: Any = lambda name: name  # noqa: E731
    shared: bool = False  # embedding and head are the target's


def speculators(**changes: Any) -> dict[str, Any]:
    base = dict(
        speculators_model_type="dspark", speculators_version="0.3", architectures=["DSparkSpeculator"],
        transformer_layer_config=DIMS, draft_vocab_size=V, block_size=4, target_hidden_size=H,
        aux_hidden_state_layer_ids=[i + 1 for i in TAPS], mask_token_id=3, sample_from_anchor=True,
        speculators_config=dict(algorithm="dspark", default_proposal_method="greedy"), **HEADS,
    )  # fmt: skip
    return base | changes


def make(name: str) -> Case:
    own = block_tensors(DEEPSPEC)
    dflash = {k: v for k, v in own.items() if not k.startswith(("markov_head", "confidence_head"))}
    bare = {k: v for k, v in dflash.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    if name in ("gated", "rnn"):
        config = DEEPSPEC | dict(markov_head_type=name)
        tensors = block_tensors(config)
        return Case(config, tensors, reference.Net(tensors, markov=name))
    if name == "deepspec":
        return Case(DEEPSPEC, own, reference.Net(own))
    if name == "deepspec dflash":
        off = dict(markov_rank=0, enable_confidence_head=False)
        return Case(DEEPSPEC | off, dflash, reference.Net(dflash, markov=None))
    if name == "embedding tap":
        return Case(DEEPSPEC | dict(target_layer_ids=[-1, 1, 5]), own, reference.Net(own), taps=[-1, 1, 5])
    if name == "sliding":
        config = DEEPSPEC | dict(layer_types=["sliding_attention"] * 2, sliding_window=9)
        return Case(config, own, reference.Net(own, window=9))
    nested = dict(attention_mode="full", mask_token_id=3, target_layer_ids=TAPS, projector_type="dspark")
    if name == "specforge":
        config = DIMS | dict(architectures=["DSparkDraftModel"], block_size=4, dflash_config=nested | HEADS)
        return Case(config, own, reference.Net(own), rename=lambda n: f"model.{n}" if n != "lm_head.weight" else n)
    if name == "z-lab":
        config = DIMS | dict(architectures=["DFlashDraftModel"], block_size=5,
                             dflash_config=dict(mask_token_id=3, target_layer_ids=TAPS))  # fmt: skip
        return Case(config, bare, reference.Net(own, block=5, markov=None), first_slot=1, shared=True)
    if name == "speculators anchor":
        return Case(speculators(), own, reference.Net(own))
    ids, tables = pruned(30)
    if name == "speculators pruned":
        tensors = block_tensors(speculators(draft_vocab_size=30))
        config = speculators(draft_vocab_size=30)
        del config["sample_from_anchor"]
        return Case(config, tensors | tables, reference.Net(tensors), first_slot=1, drafts=3, ids=ids)
    if name == "speculators dflash":
        config = speculators(speculators_model_type="dflash", architectures=["DFlashSpeculator"])
        del config["sample_from_anchor"]
        return Case(config, dflash, reference.Net(dflash, markov=None), first_slot=1, drafts=3)
    if name == "deepspec eagle3":
        tensors = eagle_tensors(3)
        config = DIMS | dict(architectures=["Qwen3Eagle3Model"], target_layer_ids=TAPS, num_hidden_layers=1)
        return Case(config, tensors, reference.Net(tensors))
    tensors = eagle_tensors(3, 30, norms=False)
    if name == "eagle3":
        config = DIMS | dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1,
                             draft_vocab_size=30)  # fmt: skip
        return Case(config, tensors | tables, reference.Net(tensors), taps=[1, LAYERS // 2 - 1, LAYERS - 4],
                    ids=ids, rename=lambda n: n.replace("layers.0.", "midlayer."))  # fmt: skip
    assert name == "speculators eagle3"
    config = speculators(speculators_model_type="eagle3", draft_vocab_size=30, norm_before_residual=False)
    config["transformer_layer_config"] = DIMS | dict(model_type="llama", num_hidden_layers=1)
    return Case(config, tensors | tables, reference.Net(tensors), ids=ids)


BLOCKS = ["deepspec", "gated", "rnn", "deepspec dflash", "embedding tap", "sliding", "specforge", "z-lab",
          "speculators anchor", "speculators pruned", "speculators dflash"]  # fmt: skip
EAGLES = ["deepspec eagle3", "eagle3", "speculators eagle3"]


def layer_outputs(model: Any, tokens: list[int]) -> dict[int, Tensor]:
    """Output of every decoder layer (-1: embeddings) at every token, from one pass."""
    pages = Pages(model, 1, len(tokens), 8)
    layers = tuple(range(-1, model.num_layers))
    _, features = model.forward(pages.batch([0], [0], [tokens]), pages.cache, layers)
    return dict(zip(layers, features.chunk(len(layers), dim=-1)))


def agreement(case: Case, drafter: Any, model: Any, **engine: Any) -> float:
    """Share of the proposals, over a greedy run of several requests, that are the formulas' own chains."""
    right: list[bool] = []
    propose = drafter.propose
    spec = TreeSpec.chain(min(case.drafts, drafter.max_depth))

    def watched(state: Any, spec: TreeSpec, sample: bool) -> Any:
        tree = propose(state, spec, sample)
        for r in range(state.num_requests):
            tokens = state.tokens[r, : int(state.seq_lens[r])].tolist()
            count = int(tree.num_nodes[r]) - 1
            assert count == int(state.max_drafts[r]) or (isinstance(drafter, Eagle3Drafter) and len(tokens) == 1)
            outputs = layer_outputs(model, tokens)
            features = torch.cat([outputs[i] for i in case.taps], -1)[:-1]
            if isinstance(drafter, Eagle3Drafter):
                want = reference.eagle_chain(case.net, features, tokens, count, case.ids)
            else:
                want = reference.greedy_chain(case.net, features, tokens[-1], count, case.first_slot, case.ids)
            right.append(tree.tokens[r, 1 : count + 1].tolist() == want)
        return tree

    drafter.propose = watched
    settings = dict(max_num_requests=3, page_size=4, max_prefill_tokens=7) | engine
    outputs = Engine(model, drafter, spec=spec, **settings).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    assert len(right) > 60
    return sum(right) / len(right)


def loaded(case: Case, folder: Path, model: Any) -> Any:
    if case.shared:
        case.net.w["embed_tokens.weight"], case.net.w["lm_head.weight"] = model.embed.double(), model.lm_head.double()
    return load_drafter(write(folder, case.config, case.tensors, case.rename), model)


@pytest.mark.parametrize("name", BLOCKS + EAGLES)
def test_every_dialect_drafts_what_the_formulas_say(name: str, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    assert drafter.taps == tuple(case.taps) and (name in EAGLES or drafter.max_depth == case.drafts)
    assert agreement(case, drafter, model) == 1.0


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_other_targets(architecture: str, tmp_path: Path) -> None:
    case, model = make("deepspec"), target(architecture)
    assert agreement(case, loaded(case, tmp_path, model), model) == 1.0


def test_preempted_and_resumed_requests_draft_the_same(tmp_path: Path) -> None:
    for name in ("deepspec", "deepspec eagle3"):
        case, model = make(name), target()
        drafter = loaded(case, tmp_path / name, model)
        pages = 30 if name == "deepspec" else 34
        original = Engine._preempt_newest
        count = []
        Engine._preempt_newest = lambda self: (count.append(1), original(self))[1]  # type: ignore[method-assign]
        try:
            assert agreement(case, drafter, model, page_size=2, num_pages=pages, max_num_requests=4) == 1.0
        finally:
            Engine._preempt_newest = original  # type: ignore[method-assign]
        assert count


# ------------------------------------------------------------------------------------------------ traps


def sprung(case: Case, folder: Path, model: Any, **changes: Any) -> Any:
    """The case's drafter with another reading of its config."""
    write(folder, case.config, case.tensors, case.rename)
    config = parse(read_config(folder), "x", model.num_layers)
    config = DrafterConfig.model_validate(config.model_dump() | changes)
    network = build(config, read_tensors(folder), model, "x")
    return (Eagle3Drafter if config.kind == "eagle3" else BlockDrafter)(network, model, "sprung")


@pytest.mark.parametrize("name", ["deepspec", "speculators anchor", "specforge", "deepspec eagle3", "eagle3"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_are_seen(name: str, shift: int, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = sprung(case, tmp_path, model, taps=[i + shift for i in case.taps])
    assert agreement(case, drafter, model) < 0.7


@pytest.mark.parametrize("name", ["deepspec", "speculators pruned", "speculators dflash"])
def test_slots_off_by_one_are_seen(name: str, tmp_path: Path) -> None:
    case, model = make(name), target()
    case.drafts = 3
    drafter = sprung(case, tmp_path, model, sample_from_anchor=case.first_slot == 1)
    assert agreement(case, drafter, model) < 0.7


def test_d2t_read_as_absolute_ids_is_seen(tmp_path: Path) -> None:
    case, model = make("speculators pruned"), target()
    drafter = loaded(case, tmp_path, model)
    assert torch.equal(drafter.network.target_ids, case.ids)
    drafter.network.target_ids = case.tensors["d2t"]
    assert agreement(case, drafter, model) < 0.5


def test_confidence_reads_the_hidden_state_after_the_final_norm(tmp_path: Path) -> None:
    for name in ("deepspec", "hidden"):
        case, model = make("deepspec"), target()
        if name == "hidden":
            case.config = case.config | dict(confidence_head_with_markov=False)
            case.tensors = block_tensors(case.config)
            case.net = reference.Net(case.tensors)
        drafter = loaded(case, tmp_path / name, model)
        tokens = list(range(1, 20))
        state, spec = one_request(model, drafter, tokens), TreeSpec.chain(4)
        tree = drafter.propose(state, spec, sample=True)
        outputs = layer_outputs(model, tokens)
        h, _ = reference.block(case.net, torch.cat([outputs[i] for i in TAPS], -1)[:-1], tokens[-1])
        path = tree.tokens[0].tolist()
        want = [reference.confidence(case.net, h[k], path[k]) for k in range(4)]
        assert tree.confidence[0, 1:].tolist() == pytest.approx(want, abs=1e-4)


def test_temperatures_scale_each_slots_confidence(tmp_path: Path) -> None:
    """Survival against the formulas in float64, for drawn and for best drafts."""
    case, model, temperatures = make("deepspec"), target(), [1.7, 0.6, 2.5, 1.0]
    folder = write(tmp_path / "scaled", case.config, case.tensors)
    found = calibration.Calibration(
        temperatures=temperatures, dataset="x", num_samples=1, ece_before=0.2, ece_after=0.1
    )
    (folder / calibration.FILE).write_text(found.model_dump_json())
    drafter = load_drafter(folder, model)
    assert drafter.temperatures == tuple(temperatures)
    tokens = list(range(1, 20))
    outputs = layer_outputs(model, tokens)
    h, _ = reference.block(case.net, torch.cat([outputs[i] for i in TAPS], -1)[:-1], tokens[-1])
    for sample in (True, False):
        tree = drafter.propose(one_request(model, drafter, tokens), TreeSpec.chain(4), sample=sample)
        path, survival = tree.tokens[0].tolist(), 1.0
        for k, t in enumerate(temperatures):
            c = reference.confidence(case.net, h[k], path[k])
            survival *= 1 / (1 + math.exp(-math.log(c / (1 - c)) / t))
            assert float(tree.confidence[0, 1 : k + 2].double().prod()) == pytest.approx(survival, abs=1e-4)


def test_a_calibration_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    case, model = make("deepspec"), target()
    text = calibration.Calibration(
        temperatures=[1.0], dataset="x", num_samples=1, ece_before=0, ece_after=0
    ).model_dump_json()
    for name, changes, words in (
        ("deepspec", {}, "calibration.json: temperatures: found 1, expected 4, one for each draft"),
        ("headless", dict(enable_confidence_head=False), "temperatures: found 1, expected 0: this drafter has no c"),
    ):
        config = case.config | changes
        folder = write(tmp_path / name, config, block_tensors(config))
        (folder / calibration.FILE).write_text(text)
        with pytest.raises(ValueError, match=words):
            load_drafter(folder, model)
    (folder / calibration.FILE).write_text("{")
    with pytest.raises(ValueError, match="calibration.json: Invalid JSON"):
        load_drafter(folder, model)


def test_step_records_hold_the_confidences_when_asked(tmp_path: Path) -> None:
    case, model = make("deepspec"), target()
    drafter = loaded(case, tmp_path, model)
    proposed: list[Any] = []
    propose = drafter.propose
    drafter.propose = lambda *a: proposed.append(propose(*a)) or proposed[-1]
    for asked in (True, False):
        for spec in (TreeSpec.chain(4), TREE):
            engine = Engine(model, drafter, spec=spec, max_model_len=128, record_confidence=asked)
            proposed.clear()
            engine.generate(PROMPTS[1:4], GREEDY)
            assert len(proposed) == len(engine.records)
            for tree, record in zip(proposed, engine.records):
                if not asked:
                    assert record.confidence is None
                    continue
                assert list(map(len, record.confidence)) == record.drafted
                for row, line in enumerate(record.confidence):
                    assert line == tree.confidence[row, 1 : len(line) + 1].tolist()
    assert Engine(model, spec=TreeSpec.chain(0), max_model_len=64, record_confidence=True).generate([[1]], GREEDY)


def one_request(model: Any, drafter: Any, tokens: list[int], rows: int = 1, temperature: float = 1.0) -> Any:
    """State of `rows` equal requests whose context is in the drafter's cache."""
    from drafters.base import BatchState

    width = 8
    drafter.allocate(rows * width + 1, 8, torch.device("cpu"))
    table = torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width)
    outputs = layer_outputs(model, tokens)
    features = torch.cat([outputs[i] for i in drafter.taps], -1)[:-1]
    pages = Pages(model, 1, len(tokens), 8)
    for r in range(rows):
        pages.table = table[r : r + 1]
        drafter.prefill(pages.batch([0], [0], [tokens[:-1]]), features)
    return BatchState(
        tokens=torch.tensor([tokens + [0] * 40]).repeat(rows, 1),
        seq_lens=torch.full((rows,), len(tokens)),
        page_table=table,
        max_drafts=torch.full((rows,), 9),
        temperature=torch.full((rows,), temperature),
        seeds=torch.arange(rows),
        num_outputs=torch.zeros(rows, dtype=torch.int64),
        max_seq_len=len(tokens),
    )


# ------------------------------------------------------------------------------------------------ trees and sampling


@pytest.mark.parametrize("name", ["deepspec", "gated", "rnn", "z-lab", "speculators pruned"])
@pytest.mark.parametrize("grow", [True, False])
def test_tree_nodes_are_the_best_children_under_their_own_paths(name: str, grow: bool, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    drafter.grow, drafter.candidates = grow, 30
    tokens = list(range(1, 20))
    tree = drafter.propose(one_request(model, drafter, tokens), TREE, sample=False)
    assert int(tree.num_nodes[0]) == TREE.num_nodes
    outputs = layer_outputs(model, tokens)
    h, u = reference.block(case.net, torch.cat([outputs[i] for i in TAPS], -1)[:-1], tokens[-1])
    paths = {0: [tokens[-1]]}
    for i in range(1, TREE.num_nodes):
        parent = int(tree.parents[0, i])
        logits = reference.path_logits(case.net, h, u, case.first_slot, paths[parent], case.ids)
        ranked = case.ids[logits.argsort(descending=True)].tolist()
        rank = [int(p) for p in tree.parents[0, 1:i]].count(parent)
        assert int(tree.tokens[0, i]) == ranked[rank]
        paths[i] = paths[parent] + [int(tree.tokens[0, i])]
    assert grow or tree.parents[0].tolist() == list(TREE.parents)


@pytest.mark.parametrize("name", ["deepspec", "rnn", "speculators pruned", "z-lab"])
@pytest.mark.parametrize("grow", [True, False])
def test_sampled_trees_carry_the_law_of_their_draws(name: str, grow: bool, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    drafter.grow = grow
    tokens, temperature = list(range(1, 20)), 0.7
    state = one_request(model, drafter, tokens, rows=2, temperature=temperature)
    tree = drafter.propose(state, TREE, sample=True)
    spec = drawn_tree(TREE.num_nodes, TREE.depth) if grow else TREE
    assert torch.equal(tree.depths(), torch.tensor([spec.depths] * 2))
    adapts = grow and drafter.network.confidence is not None
    assert adapts or tree.parents.tolist() == [list(spec.parents)] * 2
    outputs = layer_outputs(model, tokens)
    h, u = reference.block(case.net, torch.cat([outputs[i] for i in TAPS], -1)[:-1], tokens[-1])
    for r in range(2):
        paths = {0: [tokens[-1]]}
        seen: set[tuple[int, ...]] = set()
        for i in range(1, spec.num_nodes):
            parent = int(tree.parents[r, i])
            logits = reference.path_logits(case.net, h, u, case.first_slot, paths[parent], case.ids)
            law = torch.zeros(V, dtype=torch.float64).index_add(0, case.ids, (logits / temperature).softmax(0))
            torch.testing.assert_close(tree.probs[r, parent].double(), law, atol=1e-5, rtol=1e-3)
            assert law[int(tree.tokens[r, i])] > 0
            paths[i] = paths[parent] + [int(tree.tokens[r, i])]
            assert tuple(paths[i]) not in seen  # siblings differ
            seen.add(tuple(paths[i]))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("spec", [TreeSpec.chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["deepspec", "rnn", "deepspec eagle3"])
def test_proposing_and_observing_read_nothing_back(name: str, spec: TreeSpec, sample: bool, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = loaded(case, tmp_path, model)
    drafter.suffix = 2
    if not isinstance(drafter, Eagle3Drafter):
        drafter.confidence = "match"
    state = one_request(model, drafter, list(range(1, 20)), rows=2)
    features = torch.randn(2, 3, 3 * H)
    kept = torch.tensor([1, 3])
    ops.use("reference")  # whose operations a CUDA graph could hold
    try:
        drafter.propose(state, spec, sample)  # constants are made once
        with NoHostReads():
            drafter.propose(state, spec, sample)
            drafter.observe(state, features, kept)
    finally:
        ops.use("auto")


@pytest.mark.parametrize("options", [{}, {"suffix": 3}, {"confidence": "weight"}, {"confidence": "match"},
                                     {"confidence": "stop", "stop_below": 0.05}, {"grow": False}], ids=str)  # fmt: skip
def test_greedy_output_equals_plain_decoding(options: dict[str, Any], tmp_path: Path) -> None:
    case, model = make("deepspec"), target("llama")
    drafter = load_drafter(write(tmp_path, case.config, case.tensors), model, **options)
    want = [o.token_ids for o in Engine(model).generate(PROMPTS, GREEDY)]
    for spec in (TREE, TreeSpec.chain(2)):
        engine = Engine(model, drafter, spec=spec, max_num_requests=3, page_size=4, max_prefill_tokens=7)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [o.token_ids for o in outputs] == want
        assert sum(o.num_drafted for o in outputs)


@pytest.mark.parametrize("name, spec, method", [
    ("deepspec", TreeSpec.chain(2), "standard"), ("deepspec", TreeSpec.chain(2), "block"),
    ("deepspec", TreeSpec((-1, 0, 0, 1)), "tree"), ("deepspec", TreeSpec((-1, 0, 0, 1)), "node"),
    ("deepspec", TreeSpec((-1, 0, 0, 0, 1, 1, 2)), "tree"), ("rnn", TreeSpec((-1, 0, 0, 0, 1, 1, 2)), "auto"),
    ("deepspec eagle3", TreeSpec.chain(2), "standard"), ("deepspec eagle3", TreeSpec((-1, 0, 0, 1)), "tree"),
    ("deepspec eagle3", TreeSpec((-1, 0, 0, 1)), "node"),
])  # fmt: skip
def test_sampled_output_has_the_targets_law(name: str, spec: TreeSpec, method: str, tmp_path: Path) -> None:
    """The first two tokens after a prompt against exact enumeration with top_k 3: 9 outcomes."""
    from scipy import stats

    case, model = make(name), target(scale=0.25)
    drafter = loaded(case, tmp_path, model)
    prompt, draws = [4, 7, 11], 2000
    params = [SamplingParams(temperature=1.0, top_k=3, max_tokens=2, ignore_eos=True, seed=i) for i in range(draws)]
    engine = Engine(model, drafter, spec=spec, max_num_requests=500, max_model_len=16, page_size=8,
                    rejection_sample_method=method)  # fmt: skip
    pairs = [tuple(o.token_ids) for o in engine.generate([prompt] * draws, params)]

    def law(tokens: list[int]) -> dict[int, float]:
        pages = Pages(model, 1, len(tokens), 8)
        hidden, _ = model.forward(pages.batch([0], [0], [tokens]), pages.cache)
        best, ids = model.logits(hidden[-1:])[0].double().topk(3)
        return dict(zip(ids.tolist(), best.softmax(0).tolist()))

    want = {(a, b): p * q for a, p in law(prompt).items() for b, q in law([*prompt, a]).items()}
    assert set(pairs) <= set(want)
    assert stats.chisquare([pairs.count(pair) for pair in want], [p * draws for p in want.values()]).pvalue > 1e-3


def test_past_its_trained_range_a_drafter_goes_on(tmp_path: Path) -> None:
    """Positions follow the target's limit, not the drafter's max_position_embeddings."""
    case, model = make("deepspec"), target()
    case.config = case.config | dict(max_position_embeddings=20)
    assert agreement(case, loaded(case, tmp_path, model), model) == 1.0


def test_network_tensors_round_trip(tmp_path: Path) -> None:
    for name in BLOCKS + EAGLES:
        case, model = make(name), target()
        drafter = loaded(case, tmp_path / name, model)
        for key, tensor in drafter.network.tensors().items():
            assert torch.equal(tensor, case.tensors[key]), key


def test_the_network_trains() -> None:
    """The same module under autograd, with a dense attention passed in."""
    case, model = make("gated"), target()
    config = parse(case.config, "x")
    network = build(config, case.tensors, model, "x").requires_grad_(True)
    features = torch.randn(7, 3 * H)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = network.layers[i]
        ck, cv = layer.context(network.fuse(features))
        k, v = torch.cat((ck, k)), torch.cat((cv, v))
        q, k = ops.rms_norm(q, layer.q_norm, 1e-6), ops.rms_norm(k, layer.k_norm, 1e-6)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

    hidden = network.block(torch.tensor([5]), attend).flatten(0, 1)
    e = network.markov.embed(torch.tensor([5, 1, 2, 3]))
    z, _ = network.markov(e, hidden, None)
    logits = network.logits(hidden) + ops.logits(z, network.markov.w2)
    (logits.logsumexp(-1).sum() + network.confidence(hidden, e).sum()).backward()
    without = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []
    assert not network.lm_head.requires_grad
