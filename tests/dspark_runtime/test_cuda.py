"""The step as a CUDA graph: the same tokens as step by step, for chains and trees, whatever the batch size."""

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

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs: needs a CUDA GPU"),
]
TREE = TreeSpec((-1, 0, 0, 1, 1, 2, 3))
PROMPTS = [[1], [5, 6], list(range(1, 20)), [9, 9, 9, 9], [3] * 40]


def tokens(graph: bool, drafter: str, spec: TreeSpec, synthetic: float | None = None) -> tuple[list[list[int]], Engine]:
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
