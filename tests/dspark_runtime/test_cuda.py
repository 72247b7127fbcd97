"""The engine on a GPU: graphs give the tokens of single steps, and the kernels those of the torch reference."""

from __future__ import annotations

import pytest
import torch

from drafters.draft_model import DraftModel
from drafters.ngram import NgramDrafter
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.synthetic import SyntheticLaw
from dspark_runtime.targets import load_target
from verify_kernels import ops

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs: needs a CUDA GPU"),
]
TREE = TreeSpec((-1, 0, 0, 1, 1, 2, 3))
SHAPE = """\
architecture: qwen3
vocab_size: 512
hidden_size: 256
intermediate_size: 512
num_hidden_layers: 3
num_attention_heads: 16
num_key_value_heads: 8
head_dim: 128
rms_norm_eps: 1.0e-6
max_position_embeddings: 4096
tie_word_embeddings: true
"""
"""Attention of Qwen3-0.6B's shape."""

PROMPTS = [[1], [5, 6], list(range(1, 20)), [9, 9, 9, 9], [3] * 40]


@pytest.fixture(autouse=True)
def backend():
    yield
    ops.use("auto")


def tokens(graph: bool, drafter: str, spec: TreeSpec, synthetic: float | None = None) -> tuple[list[list[int]], Engine]:
    ops.use("reference")  # float32, which the kernels do not serve
    model = load_target("tiny", weights="dummy", dtype="float32", device="cuda", max_model_len=256).model
    made = {"ngram": NgramDrafter(), "draft": DraftModel(model), "none": None}[drafter]
    law = None if synthetic is None else SyntheticLaw.make(spec.depth, acceptance_length=synthetic)
    engine = Engine(model, made, spec=spec, synthetic=law, max_num_requests=3, cuda_graph=graph)
    params = [SamplingParams(temperature=0.0, max_tokens=20 + 3 * i, ignore_eos=True, seed=i) for i in range(len(PROMPTS))]
    return [o.token_ids for o in engine.generate(PROMPTS, params)], engine


@pytest.mark.parametrize("spec", [TreeSpec.chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_graph_equals_eager_equals_plain(drafter: str, spec: TreeSpec) -> None:
    plain, _ = tokens(False, "none", TreeSpec.chain(0))
    eager, _ = tokens(False, drafter, spec)
    graph, engine = tokens(True, drafter, spec)
    assert plain == eager == graph
    assert engine.num_graphs >= 3  # one for each batch size that occurred
    assert engine.pool.num_free == engine.pool.capacity


def test_synthetic_graph_equals_eager() -> None:
    assert tokens(False, "ngram", TreeSpec.chain(4), 2.6)[0] == tokens(True, "ngram", TreeSpec.chain(4), 2.6)[0]


@pytest.mark.parametrize("drafter,spec", [("none", TreeSpec.chain(0)), ("ngram", TREE), ("draft", TreeSpec.chain(4)), ("draft", TREE)])
def test_kernels_write_what_the_reference_writes(drafter: str, spec: TreeSpec, tmp_path) -> None:
    """bfloat16: where tokens differ, the reference itself finds the two within rounding of each other."""
    path = tmp_path / "shape.yaml"
    path.write_text(SHAPE)
    model = load_target(str(path), weights="dummy", dtype="bfloat16", device="cuda", max_model_len=1024).model
    prompts = [*PROMPTS, [7, 8] * 300]

    def run(mode: str, drafter: str, spec: TreeSpec, graph: bool, prompts: list[list[int]], count: int = 40) -> list:
        ops.use(mode)
        made = {"ngram": NgramDrafter(), "draft": DraftModel(model), "none": None}[drafter]
        engine = Engine(model, made, spec=spec, max_num_requests=4, cuda_graph=graph, max_prefill_tokens=256)
        logprobs = None if graph else 5
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=logprobs)
        outputs = engine.generate(prompts, params)
        assert not any(o.error for o in outputs)
        return outputs

    want = run("reference", "none", TreeSpec.chain(0), False, prompts)
    for graph in (False, True):
        got = run("auto", drafter, spec, graph, prompts)
        for prompt, a, b in zip(prompts, want, got):
            differ = [i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y]
            if differ:
                there = a.logprobs[differ[0]]
                assert there.logprob - there.top.get(b.token_ids[differ[0]], float("-inf")) <= 0.06, prompt
        if drafter == "draft":
            assert sum(o.num_accepted for o in got) >= 0.8 * sum(o.num_drafted for o in got) * spec.depth / spec.num_drafts
