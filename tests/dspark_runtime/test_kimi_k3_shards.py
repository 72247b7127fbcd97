"""The ranks of a model of Kimi-K3's form together are the whole model."""

from __future__ import annotations

import math

import pytest
import torch

from drafters.ngram import NgramDrafter
from drafters.tree import TreeSpec
from dspark_runtime.configs import load_tree
from dspark_runtime.engine import Engine
from dspark_runtime.errors import CheckpointError, ConfigError
from dspark_runtime.models.kimi_k3 import (
    DummyTensors,
    KimiK3,
    KimiK3Config,
    kimi_k3_config,
    rank_tensors,
    tensor_shapes,
    weight_bytes,
)
from dspark_runtime.models.shards import Shard
from dspark_runtime.sampling import SamplingParams
from tests.dspark_runtime import kimi_k3_cases as cases
from tests.dspark_runtime.kimi_k3_ranks import divisible_config, ranks, together
from tests.dspark_runtime.test_kimi_k3 import GREEDY, PROMPTS, TREE, Rows, ids, near

WAYS = [(2, "tp"), (4, "tp"), (2, "ep"), (4, "ep")]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> KimiK3Config:
    return divisible_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tensors(config) -> dict[str, torch.Tensor]:
    return cases.weights(config)


@pytest.fixture(scope="module")
def whole(config, tensors) -> KimiK3:
    return KimiK3(config, tensors, name="whole", dtype=torch.float64, device="cpu")


def passes(model: KimiK3) -> list[torch.Tensor]:
    """Prompts in two chunks, a chain that is not kept, and trees: logits, features and arg-maxes of all of them."""
    pages, found = Rows(model, 2, 40, 4), []
    prompts, nodes = [ids(17, 1), ids(6, 2)], [ids(TREE.num_nodes, 50 + r) for r in range(2)]
    for batch in (
        pages.batch([1, 0], [0, 0], [prompts[0][:9], prompts[1][:2]]),
        pages.batch([1, 0], [9, 2], [prompts[0][9:], prompts[1][2:]]),
        pages.batch([1, 0], [17, 6], [ids(8, 7), ids(5, 8)], speculative=True),
        pages.batch([1, 0], [17, 6], nodes, TREE, speculative=True),
    ):
        hidden, features = model.forward(batch, pages.cache, (-1, 1, 3))
        best, value = model.greedy(hidden)
        found += [hidden, features, model.logits(hidden), best.double(), value]
    return found


@pytest.mark.parametrize("size,parallel", WAYS)
def test_ranks_together_are_the_whole_model(config, tensors, whole, size: int, parallel: str) -> None:
    want = passes(whole)
    made = ranks(config, tensors, size, parallel, torch.float64)
    for found in together(made, passes):
        for x, y in zip(found, want, strict=True):
            near(x, y)
    names = made[0].group.names
    assert names[:12] == ["embedding", "attention", "mlp", *["attention", "latent", "experts", "mlp"] * 2, "attention"]


@pytest.mark.parametrize("size,parallel", WAYS)
def test_every_rank_holds_its_share(config, tensors, size: int, parallel: str) -> None:
    """Cut tensors add up to the whole ones, and no rank holds another's values."""
    parts = [config.of_rank(Shard(rank, size, parallel)) for rank in range(size)]
    cut = [rank_tensors(tensors, config, part) for part in parts]
    for name, (shape, _) in tensor_shapes(config).items():
        held = [t[name] for t in cut]
        assert [tuple(x.shape) for x in held] == [tensor_shapes(part)[name][0] for part in parts]
        count = sum(x.numel() for x in held)
        assert count in (math.prod(shape), size * math.prod(shape))
        if count == math.prod(shape):
            every = torch.cat([x.flatten() for x in held]).sort().values
            assert torch.equal(every, tensors[name].flatten().sort().values)
    copied = {name for name in tensor_shapes(config) if cut[0][name].shape == tensors[name].shape}
    assert all("norm" in n or "res_proj" in n or "_a_proj" in n or ".gate." in n for n in copied)
    for name in ("1.block_sparse_moe.gate", "1.self_attn.f_a_proj", "3.self_attn.kv_a_proj_with_mqa"):
        assert f"model.layers.{name}.weight" in copied


@pytest.mark.parametrize("size,parallel", [(2, "tp"), (4, "ep")])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_greedy_text_of_the_ranks(config, tensors, whole, size: int, parallel: str, tree: bool) -> None:
    spec = load_tree("tree-8") if tree else TreeSpec.chain(3)

    def text(model: KimiK3) -> list[list[int]]:
        engine = Engine(model, NgramDrafter(), spec=spec, max_num_requests=2, max_model_len=96)
        short = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        return [o.token_ids for o in engine.generate(PROMPTS[1:4], short)]

    made = ranks(config, tensors, size, parallel, torch.float64)
    assert together(made, text) == [text(whole)] * size


def test_equal_logits_go_to_the_lowest_id_and_nan_shows(config, tensors) -> None:
    made = ranks(config, tensors | {"lm_head.weight": torch.ones(128, 64, dtype=torch.float64)}, 4, "tp", torch.float64)
    hidden = torch.ones(2, 64, dtype=torch.float64)
    hidden[1, 3] = float("nan")
    for best, value in together(made, lambda model: model.greedy(hidden)):
        assert best[0] == 0 and value[0] == 64 and value[1].isnan() and 0 <= best[1] < 128


# ---------------------------------------------------------------------------------------------- the released shapes


def test_a_sixteenth_of_the_released_model() -> None:
    c = kimi_k3_config("kimi-k3")
    for parallel, experts in (("tp", (896, 384, 1792)), ("ep", (56, 6144, 1792))):
        part = c.of_rank(Shard(15, 16, parallel))
        shapes = {name: shape for name, (shape, _) in tensor_shapes(part).items()}
        layer = "model.layers.1."
        assert shapes[f"{layer}block_sparse_moe.experts.gate_up.weight_packed"] == experts
        assert shapes["model.embed_tokens.weight"] == (10240, 7168)
        assert shapes[f"{layer}self_attn.q_proj.weight"] == (768, 7168)
        assert shapes[f"{layer}block_sparse_moe.routed_expert_down_proj.weight"] == (224, 7168)
        assert shapes[f"{layer}block_sparse_moe.gate.weight"] == (896, 7168)
        copied = 92 * 896 * 7168 + 69 * 128 * 7168 + 24 * (1536 + 576) * 7168
        found = weight_bytes(part, torch.bfloat16)
        assert found == pytest.approx(c.facts.checkpoint_bytes / 16 + 2 * copied * 15 / 16, rel=1e-3)


@pytest.mark.parametrize(
    "size,parallel,message",
    [
        (7, "tp", "found 7, allowed: numbers of ranks that divide the 3072 of ffn.moe.shared_intermediate_size"),
        (64, "tp", "the 3072 of ffn.moe.intermediate_size into 32s"),
        (64, "ep", "the 96 of attention.kda.heads"),
        (512, "ep", "the 896 of ffn.moe.num_experts"),
    ],
)
def test_what_does_not_divide_is_named(size: int, parallel: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kimi_k3_config("kimi-k3").of_rank(Shard(0, size, parallel))


def test_shards_are_checked(config, tensors) -> None:
    for shard, message in (
        (dict(size=0), "rank_of: found 0"),
        (dict(rank=2, size=2), "rank: found 2, allowed: 0 to 1"),
        (dict(parallel="pp"), "parallel: found 'pp', allowed: tp, ep"),
    ):
        with pytest.raises(ConfigError, match=message):
            Shard(**shard)
    part = config.of_rank(Shard(1, 2))
    with pytest.raises(ConfigError, match="group: found .*, allowed: Shard"):
        KimiK3(part, rank_tensors(tensors, config, part), name="x", dtype=torch.float64, device="cpu")
    models = ranks(config, tensors, 2, "tp", torch.float64)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: found shape \[128, 32\], expected \[64, 64\]"):
        narrow = tensors | {"lm_head.weight": torch.zeros(128, 32)}
        held, group = rank_tensors(narrow, config, part), models[1].group
        KimiK3(part, held, name="x", dtype=torch.float64, device="cpu", group=group)


def test_dummy_ranks_share_what_is_copied(config) -> None:
    a, b = (DummyTensors(config.of_rank(Shard(r, 2)), 0, torch.bfloat16, "cpu") for r in range(2))
    layer = "model.layers.1."
    shared = ("self_attn.f_a_proj.weight", "block_sparse_moe.gate.weight")
    for name in (*shared, "self_attn.q_proj.weight", "block_sparse_moe.experts.down.weight_packed"):
        assert torch.equal(a[layer + name], b[layer + name]) == (name in shared)
