"""Kimi-K3's two DSpark drafters behind a small target of its form: against formulas in float64, and in the engine."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.dspark.dialects import parse
from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.latent_drafter import LatentBlockDrafter
from drafters.dspark.load import block_drafter, build, load_drafter, read_config, read_tensors
from drafters.taps import Mixed
from drafters.tree import TreeSpec
from drafters.tree_search import drawn_profile
from dspark_runtime.engine import Engine
from dspark_runtime.models.kimi_k3 import KimiK3
from dspark_runtime.sampling import SamplingParams
from tests.drafters import dspark_reference, mla_reference
from tests.drafters.dspark_cases import noise, write
from tests.dspark_runtime import kimi_k3_cases as cases
from tests.dspark_runtime.test_capturable import NoHostReads
from verify_kernels import ops
from verify_kernels.batch import PassBatch

V, H, LAYERS, BLOCK, MASK, TAPS = 128, 64, 4, 4, 3, [0, 2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [[1], [5, 6], list(range(1, 20)), [9, 9, 9], [3] * 33]
TREE = TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
MLA = dict(
    architectures=["K3DSparkModel"], model_type="k3_dspark", vocab_size=V, draft_vocab_size=V, hidden_size=H,
    intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, rms_norm_eps=1e-5, max_position_embeddings=128,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14, num_target_layers=2,
    target_hidden_size=H, target_num_hidden_layers=LAYERS, target_layer_ids=TAPS, mask_token_id=MASK, block_size=BLOCK,
    markov_rank=5, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
    rope_parameters=YARN | dict(rope_theta=100.0),
)  # fmt: skip
GQA = dict(
    architectures=["DSparkDraftModel"], model_type="qwen3", vocab_size=V, hidden_size=H, intermediate_size=40,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
    max_position_embeddings=128, num_target_layers=LAYERS, block_size=BLOCK, rope_parameters=dict(rope_theta=100.0),
    dflash_config=dict(
        attention_mode="gqa", projector_type="dspark", target_layer_ids=TAPS, mask_token_id=MASK, markov_rank=5,
        markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
    ),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Operations of a few microseconds: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def target(dtype: torch.dtype = torch.float64) -> KimiK3:
    return cases.model(dtype, max_model_len=128)


def shared(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}input_layernorm.weight": (H,), f"{prefix}post_attention_layernorm.weight": (H,),
        f"{prefix}mlp.gate_proj.weight": (40, H), f"{prefix}mlp.up_proj.weight": (40, H),
        f"{prefix}mlp.down_proj.weight": (H, 40),
    }  # fmt: skip


HEADS = {
    "markov_head.markov_w1.weight": (V, 5), "markov_head.markov_w2.weight": (V, 5),
    "confidence_head.proj.weight": (1, H + 5), "confidence_head.proj.bias": (1,),
}  # fmt: skip


def mla_tensors() -> dict[str, Tensor]:
    """A checkpoint as Inferact's: embedding stored, no LM head."""
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (H, 2 * H), "context_norm.weight": (H,), "final_norm.weight": (H,), **HEADS,
        "embed_tokens.weight": (V, H),
    }  # fmt: skip
    for i in range(2):
        a = f"layers.{i}.self_attn."
        shapes |= shared(f"layers.{i}.") | {
            a + "q_a_proj.weight": (20, H), a + "q_a_layernorm.weight": (20,), a + "q_b_proj.weight": (3 * 18, 20),
            a + "kv_a_proj_with_mqa.weight": (32, H), a + "kv_a_layernorm.weight": (24,),
            a + "kv_b_proj.weight": (3 * 24, 24), a + "o_proj.weight": (H, 3 * 14),
        }  # fmt: skip
    return noise(shapes, 0.25, 11)


def gqa_tensors() -> dict[str, Tensor]:
    """A checkpoint as RadixArk's: no tables."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,), **HEADS,
    }  # fmt: skip
    for i in range(2):
        a = f"layers.{i}.self_attn."
        shapes |= shared(f"layers.{i}.") | {
            a + "q_proj.weight": (32, H), a + "k_proj.weight": (16, H), a + "v_proj.weight": (16, H),
            a + "o_proj.weight": (H, 32), a + "q_norm.weight": (8,), a + "k_norm.weight": (8,),
        }  # fmt: skip
    return noise(shapes, 0.25, 12)


class Streams(cases.WrittenModel):
    """The written target, with what each layer reads before its norm."""

    def mix(self, since: np.ndarray, blocks: list[np.ndarray], name: str, out_norm: str) -> np.ndarray:
        norm, score = self.w[f"{name}_norm.weight"], self.w[f"{name}_proj.weight"][0]
        sources = [*blocks, since]
        scores = np.array([score @ cases.normed(s, norm, self.c.facts.rms_norm_eps) for s in sources])
        shares = np.exp(scores) / np.exp(scores).sum()
        self.read[name] = sum(share * s for share, s in zip(shares, sources))
        return super().mix(since, blocks, name, out_norm)

    def taps(self, token: int, stream: str) -> dict[int, np.ndarray]:
        self.read: dict[str, np.ndarray] = {}
        _, after = self.step(token)
        if stream == "sum":
            return after
        names = [f"model.layers.{i}.self_attention_res" for i in range(LAYERS)] + ["model.output_attn_res"]
        return {i - 1: self.read[name] for i, name in enumerate(names)}


@functools.cache
def features(tokens: tuple[int, ...], stream: str, taps: tuple[int, ...]) -> Tensor:
    """[tokens, taps * H] of the written target."""
    line = Streams(cases.config(), cases.weights(cases.config()))
    found = [line.taps(token, stream) for token in tokens]
    return torch.from_numpy(np.stack([np.concatenate([after[i] for i in taps]) for after in found]))


@dataclass
class Case:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    stream: str

    def load(self, folder: Path, model: KimiK3, **options: Any) -> Any:
        return load_drafter(write(folder, self.config, self.tensors), model, **options)

    @functools.cached_property
    def net(self) -> Any:
        model = target()
        if "kv_lora_rank" not in self.config:
            tables = {"embed_tokens.weight": model.embed, "lm_head.weight": model.lm_head}
            return dspark_reference.Net(self.tensors | tables, eps=1e-5, mask_id=MASK)
        return mla_reference.Net(
            self.tensors, self.tensors["embed_tokens.weight"], model.lm_head, heads=3, nope=10, rope=8, value=14,
            theta=100.0, eps=1e-5, layers=2, block=BLOCK, mask_id=MASK, yarn=(8.0, 16, 1.0, 1.0),
        )  # fmt: skip

    def block(self, seen: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        of = mla_reference if isinstance(self.net, mla_reference.Net) else dspark_reference
        return of.block(self.net, seen, anchor)

    def chain(self, seen: Tensor, anchor: int, count: int) -> list[int]:
        if isinstance(self.net, mla_reference.Net):
            return mla_reference.greedy_chain(self.net, seen, anchor, count)
        return dspark_reference.greedy_chain(self.net, seen, anchor, count, 0, torch.arange(V))


def make(name: str) -> Case:
    if name == "mla":
        return Case(MLA, mla_tensors(), "sum")
    if name == "mla attn_res":
        return Case(MLA | dict(aux_hidden_stream="attn_res"), mla_tensors(), "mixture")
    return Case(GQA, gqa_tensors(), "mixture")


NAMES = ["mla", "mla attn_res", "gqa"]


def state_of(model: KimiK3, drafter: Any, tokens: list[int], stream: str, **changes: Any) -> BatchState:
    """One request whose context features, the written target's, the drafter has seen; in two pages of 16."""
    drafter.allocate(9, 16, model.device)
    drafter.cache.k.fill_(float("nan"))
    seen = features(tuple(tokens[:-1]), stream, tuple(map(int, drafter.taps))).to(drafter.network.fc.dtype)
    n, table = len(seen), torch.tensor([[5, 2, 7, 1]], dtype=torch.int32)
    at = torch.arange(n)
    drafter.prefill(
        PassBatch(
            token_ids=torch.tensor(tokens[:-1]), positions=at, request_offsets=torch.tensor([0, n], dtype=torch.int32),
            context_lens=torch.zeros(1, dtype=torch.int32), page_table=table,
            slot_mapping=table[0].long()[at // 16] * 16 + at % 16, ancestor_masks=None, max_query_len=n, max_kv_len=n,
        ),
        seen,
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.int64)
    state = BatchState(
        tokens=torch.tensor([tokens]), seq_lens=one * len(tokens), page_table=table, max_drafts=one * 30,
        temperature=torch.zeros(1), seeds=one * 7, num_outputs=one * 0, max_seq_len=len(tokens),
    )  # fmt: skip
    return replace(state, **changes)


# ------------------------------------------------------------------------------------------------------ the target


def test_the_target_hands_over_sums_and_mixtures() -> None:
    from tests.dspark_runtime.test_kimi_k3 import Rows

    model, tokens = target(), list(range(3, 20))
    for stream, kind in (("sum", int), ("mixture", Mixed)):
        pages = Rows(model, 1, len(tokens), 4)
        taps = tuple(map(kind, range(-1, LAYERS)))
        _, found = model.forward(pages.batch([0], [0], [tokens]), pages.cache, taps)
        want = features(tuple(tokens), stream, tuple(range(-1, LAYERS)))
        torch.testing.assert_close(found, want, atol=1e-10, rtol=1e-10)
    assert not torch.allclose(want, features(tuple(tokens), "sum", tuple(range(-1, LAYERS))), atol=0.1)


# ----------------------------------------------------------------------------------------------------- the drafters


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("context", [0, 1, 19])
def test_a_block_pass_is_what_the_formulas_say(name: str, context: int, tmp_path: Path) -> None:
    case, model = make(name), target()
    drafter = case.load(tmp_path, model)
    assert drafter.max_depth == BLOCK and list(map(int, drafter.taps)) == TAPS
    assert isinstance(drafter, LatentBlockDrafter) == name.startswith("mla")
    tokens = [7, *range(1, context + 1)][: context + 1]
    if not context:
        drafter.allocate(9, 16, model.device)
        seen = torch.zeros(0, 2 * H, dtype=torch.float64)
        one = torch.ones(1, dtype=torch.int64)
        state = BatchState(torch.tensor([tokens]), one, torch.tensor([[5, 2]], dtype=torch.int32), one, torch.zeros(1),
                           one, one, 1)  # fmt: skip
    else:
        state = state_of(model, drafter, tokens, case.stream)
        seen = features(tuple(tokens[:-1]), case.stream, tuple(TAPS))
    h, _ = case.block(seen, tokens[-1])
    found = drafter._block(state, state.roots)[0]
    torch.testing.assert_close(found, h, atol=3e-6, rtol=3e-6)  # angles are float32


def agreement(case: Case, drafter: Any, model: KimiK3, **engine: Any) -> float:
    """Share of the proposals, over a greedy run of several requests, that are the formulas' own chains on the written
    target's features. The tokens are those of plain decoding."""
    right: list[bool] = []
    propose = drafter.propose

    def watched(state: Any, spec: TreeSpec, sample: bool) -> Any:
        tree = propose(state, spec, sample)
        for r in range(state.num_requests):
            tokens = state.tokens[r, : int(state.seq_lens[r])].tolist()
            count = int(tree.num_nodes[r]) - 1
            seen = torch.zeros(0, 2 * H, dtype=torch.float64)
            if len(tokens) > 1:
                seen = features(tuple(tokens), case.stream, tuple(TAPS))[:-1]
            right.append(tree.tokens[r, 1 : count + 1].tolist() == case.chain(seen, tokens[-1], count))
        return tree

    drafter.propose = watched
    settings = dict(max_num_requests=3, page_size=4, max_prefill_tokens=7, max_model_len=64) | engine
    outputs = Engine(model, drafter, spec=TreeSpec.chain(BLOCK), **settings).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == plain(model)
    assert len(right) > 40
    return sum(right) / len(right)


@functools.cache
def plain(model: KimiK3) -> list[list[int]]:
    return [o.token_ids for o in Engine(model, max_num_requests=2, max_model_len=64).generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", NAMES)
def test_every_chain_in_the_engine_is_the_formulas(name: str, tmp_path: Path) -> None:
    case = make(name)
    assert agreement(case, case.load(tmp_path, target()), target()) == 1.0


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_preempted_and_resumed_requests_draft_the_same(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    case, count = make(name), []
    original = Engine._preempt_newest
    monkeypatch.setattr(Engine, "_preempt_newest", lambda self: (count.append(1), original(self))[1])
    drafter = case.load(tmp_path, target())
    assert agreement(case, drafter, target(), page_size=2, num_pages=30, max_num_requests=4) == 1.0
    assert count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("spec", [TREE, TreeSpec.chain(2), TreeSpec.chain(BLOCK)], ids=["tree", "chain-2", "chain-4"])
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_greedy_tokens_equal_plain_decoding(name: str, spec: TreeSpec, dtype: torch.dtype, tmp_path: Path) -> None:
    case, model = make(name), target(dtype)
    for i, options in enumerate(({}, dict(confidence="match", suffix=2), dict(grow=False))):
        drafter = case.load(tmp_path / str(i), model, **options)
        sizes = dict(max_num_requests=3, page_size=4, max_prefill_tokens=7, max_model_len=64)
        engine = Engine(model, drafter, spec=spec, **sizes)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [o.token_ids for o in outputs] == plain(model)
        assert sum(o.num_drafted for o in outputs)


def test_an_oracle_of_a_drafter_is_accepted() -> None:
    """With the target's own head and a Markov head that knows the text's bigrams, drafts pass: what is accepted goes
    through the drafter's cache."""
    model = target()
    text = plain(model)[4]
    tensors = mla_tensors()
    for key in tensors:
        if key.startswith("layers.") and key.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[key] = tensors[key] * 0
    bigrams = torch.zeros(V, V)
    for a, b in zip([3, *text], text):
        bigrams[a, b] = 1e4
    tensors["markov_head.markov_w1.weight"] = torch.eye(V)
    tensors["markov_head.markov_w2.weight"] = bigrams.T.contiguous()
    tensors["confidence_head.proj.weight"] = torch.zeros(1, H + V)
    config = parse(MLA | dict(markov_rank=V), "x", LAYERS)
    renamed = {k.replace("context_proj", "fc").replace("context_norm", "hidden_norm").replace("final_norm", "norm"): v
               for k, v in tensors.items()}  # fmt: skip
    drafter = block_drafter(build(config, renamed, model, "x"), model, "oracle", candidates=V)
    for spec in (TreeSpec.chain(BLOCK), TREE):
        engine = Engine(model, drafter, spec=spec, max_num_requests=3, page_size=4, max_model_len=64)
        output = engine.generate([PROMPTS[4]], GREEDY)[0]
        assert output.token_ids == text and output.num_accepted >= 0.5 * len(text)


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_confidence_and_laws_of_drawn_drafts(name: str, tmp_path: Path) -> None:
    case, model, tokens = make(name), target(), list(range(1, 20))
    drafter = case.load(tmp_path, model)
    state = state_of(model, drafter, tokens, case.stream, temperature=torch.full((1,), 0.7))
    tree = drafter.propose(state, TREE, sample=True)
    seen = features(tuple(tokens[:-1]), case.stream, tuple(TAPS))
    h, u = case.block(seen, tokens[-1])
    w1, w2 = (case.tensors[f"markov_head.markov_w{i}.weight"].double() for i in (1, 2))
    head, bias = case.tensors["confidence_head.proj.weight"].double()[0], case.tensors["confidence_head.proj.bias"]
    depth, parents = tree.depths()[0].tolist(), tree.parents[0].tolist()  # the shape is the drafter's own
    assert tree.num_nodes[0] > 2
    for i in range(1, int(tree.num_nodes[0])):
        parent = parents[i]
        k, previous = depth[parent], int(tree.tokens[0, parent])
        law = ((u[k] + w2 @ w1[previous]) / 0.7).softmax(0)
        torch.testing.assert_close(tree.probs[0, parent].double(), law, atol=1e-5, rtol=1e-3)
        sure = torch.sigmoid(head @ torch.cat((h[k], w1[previous])) + bias.double())
        rank = parents[:i].count(parent)  # of a later draw: given that the ones before it were refused
        assert float(tree.confidence[0, i]) == pytest.approx(float(drawn_profile(sure, rank + 1)[rank]), abs=1e-5)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("spec", [TreeSpec.chain(BLOCK), TREE], ids=["chain", "tree"])
def test_proposing_and_observing_read_nothing_back(spec: TreeSpec, sample: bool, tmp_path: Path) -> None:
    case, model = make("mla"), target(torch.float32)
    drafter = case.load(tmp_path, model)
    state = state_of(model, drafter, list(range(1, 20)), "sum")
    seen, kept = torch.randn(1, 3, 2 * H), torch.tensor([2])
    ops.use("reference")  # whose operations a CUDA graph could hold
    try:
        drafter.propose(state, spec, sample)  # constants are made once
        with NoHostReads():
            drafter.propose(state, spec, sample)
            drafter.observe(state, seen, kept)
    finally:
        ops.use("auto")


def test_tensors_round_trip(tmp_path: Path) -> None:
    case = make("mla")
    network = case.load(tmp_path, target(torch.float32)).network
    names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    names = {f"{name}.weight": f"{own}.weight" for name, own in names.items()}
    found = {names.get(key, key): tensor for key, tensor in network.tensors().items()}
    assert found.keys() == case.tensors.keys() - {"embed_tokens.weight"}
    for key, tensor in found.items():
        assert torch.equal(tensor, case.tensors[key]), key


def test_kernels_that_do_not_exist_are_not_listed() -> None:
    from drafters.dspark.network import products
    from dspark_runtime.errors import ConfigError
    from eval.kernels import variants

    with pytest.raises(ConfigError, match="kimi-k3-dspark-inferact has mla layers, allowed: qwen3 and llama"):
        variants(["qwen3-8b"], "kimi-k3-dspark-inferact", "bfloat16", 16)
    with pytest.raises(ValueError, match="found mla layers"):
        products(parse(MLA, "x", LAYERS))


# -------------------------------------------------------------------------------------------- checkpoints that are off


def without(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {k: v for k, v in tensors.items() if k != key}


KV_B = "layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("config, tensors, message", [
    (MLA, without(mla_tensors(), "context_proj.weight"), r"context_proj.weight: missing, expected shape \[64, 128\]"),
    (MLA, without(mla_tensors(), "context_norm.weight"), r"context_norm.weight: missing, expected shape \[64\]"),
    (MLA, without(mla_tensors(), "final_norm.weight"), r"final_norm.weight: missing, expected shape \[64\]"),
    (MLA, without(mla_tensors(), KV_B), rf"{KV_B}: missing, expected shape \[72, 24\]"),
    (MLA, mla_tensors() | {KV_B: torch.zeros(72, 20)}, rf"{KV_B}: found shape \[72, 20\], expected \[72, 24\]"),
    (MLA, mla_tensors() | {"context_proj.weight": torch.zeros(H, H)}, r"context_proj.weight: found shape \[64, 64\]"),
    (MLA, mla_tensors() | {"layers.0.self_attn.g_proj.weight": torch.zeros(42, H)},
     "layers.0.self_attn.g_proj.weight: not a tensor of a dspark drafter in the k3 dialect"),
    (MLA, mla_tensors() | {"layers.2.input_layernorm.weight": torch.ones(H)},
     "layers.2.input_layernorm.weight: not a tensor"),
    (MLA | dict(target_layer_ids=[1, 4]), mla_tensors(), r"target layers: found \[1, 4\] .*allowed: up to 3"),
    (MLA | dict(target_num_hidden_layers=93), mla_tensors(), "num_target_layers: found 93, expected 4"),
    (MLA | dict(target_hidden_size=32), mla_tensors(), "target_hidden_size: found 32, expected 64"),
    (MLA | dict(vocab_size=256, draft_vocab_size=256), mla_tensors(), "vocab_size: found 256, expected 128"),
    (GQA, without(gqa_tensors(), "fc.weight"), r"fc.weight: missing, expected shape \[64, 128\]"),
    (GQA | dict(num_target_layers=5), gqa_tensors(), "num_target_layers: found 5, expected 4"),
])  # fmt: skip
def test_a_wrong_checkpoint_is_one_line(config: Any, tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(write(tmp_path, config, tensors), target())
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_a_confidence_head_that_the_config_does_not_name_is_left_unread(tmp_path: Path) -> None:
    config = {k: v for k, v in MLA.items() if k != "enable_confidence_head"}
    assert load_drafter(write(tmp_path, config, mla_tensors()), target()).network.confidence is None


# ------------------------------------------------------------------------------------------------------------ traps


def sprung(case: Case, folder: Path, **changes: Any) -> BlockDrafter:
    """The case's drafter with another reading of its config."""
    write(folder, case.config, case.tensors)
    c = parse(read_config(folder), "x", LAYERS)
    if "score_factor" in changes:
        changes = dict(mla=c.mla.model_copy(update=changes))
    network = build(c.model_copy(update=changes), read_tensors(folder), target(), "x")
    return block_drafter(network, target(), "sprung")


@pytest.mark.parametrize("name, changes", [
    ("mla", dict(taps=(1, 3))), ("mla", dict(taps=(-1, 1))), ("mla", dict(taps=(2, 0))),
    ("mla", dict(stream="mixture")), ("mla", dict(sample_from_anchor=False)), ("mla", dict(mask_token_id=4)), ("mla", dict(score_factor=1.0)),
    ("gqa", dict(taps=(1, 3))), ("gqa", dict(taps=(-1, 1))), ("gqa", dict(stream="sum")),
    ("gqa", dict(sample_from_anchor=False)),
], ids=str)  # fmt: skip
def test_another_reading_is_seen(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A drafter that is read as it was written drafts the formulas' chains everywhere, read otherwise it does not."""
    case = make(name)
    assert matched(case, sprung(case, tmp_path)) == 1.0
    assert matched(case, sprung(case, tmp_path, **changes)) < 0.9


def test_rotation_of_halves_is_seen(tmp_path: Path) -> None:
    """Channels are neighbours in the checkpoint; a reordered one, read as such, is another drafter."""
    case = make("mla")
    drafter = case.load(tmp_path, target())
    for layer in drafter.network.layers:
        layer.q_b.copy_(layer.tensors()["self_attn.q_b_proj.weight"])
        layer.in_proj[20:].copy_(layer.tensors()["self_attn.kv_a_proj_with_mqa.weight"])
    assert matched(case, drafter) < 0.9


def test_features_pass_the_keys_norm_and_skip_the_layers(tmp_path: Path) -> None:
    case = make("mla")
    drafter = case.load(tmp_path, target())
    network, latents = drafter.network, drafter.network.latents

    def unnormed(fused: Tensor) -> tuple[Tensor, Tensor]:
        raw = [ops.linear(fused, layer.in_proj[20:44]) for layer in network.layers]
        return torch.stack(raw, dim=1), latents(fused)[1]

    for wrong in (unnormed, lambda x: latents(ops.rms_norm(x, network.layers[0].input_norm, 1e-5))):
        network.latents = wrong
        assert matched(case, drafter) < 0.9


@pytest.mark.parametrize("name, other", [("mla", "mixture"), ("gqa", "sum")])
def test_dspark_check_tries_the_other_stream(name: str, other: str, tmp_path: Path) -> None:
    from eval.check_drafter import neighbours
    from tests.drafters.dspark_cases import target as llama

    drafter = make(name).load(tmp_path, target())
    found = {line: near.taps for line, _, near in neighbours(target(), drafter)}
    assert found[f"stream {other}"] == drafter.taps == (0, 2)
    assert all(isinstance(tap, Mixed) == (other == "mixture") for tap in found[f"stream {other}"])
    assert all(isinstance(tap, Mixed) == (other == "sum") for tap in found["taps +1"])
    assert not any(line.startswith("stream") for line, _, _ in neighbours(llama(), drafter))


def matched(case: Case, drafter: Any) -> float:
    """Share of first drafts and the ones after them that the formulas draft too, over a few contexts."""
    right = []
    for first, n in ((1, 19), (40, 30), (77, 7), (3, 50), (60, 12), (90, 25)):
        line = list(range(first, first + n))
        stream = "mixture" if isinstance(drafter.taps[0], Mixed) else "sum"
        found = drafter.propose(state_of(target(), drafter, line, stream), TreeSpec.chain(drafter.max_depth), False)
        want = case.chain(features(tuple(line[:-1]), case.stream, tuple(TAPS)), line[-1], drafter.max_depth)
        right += [a == b for a, b in zip(found.tokens[0, 1:].tolist(), want)]
    return sum(right) / len(right)
