"""The chi-square over a request's first tokens: right drafts pass, a wrong rule does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.dspark.load import load_drafter
from drafters.topology import TreeSpec
from drafters.tree_search import drawn_tree
from dspark_runtime import acceptance
from dspark_runtime.sampling import SamplingParams
from eval.sampled_law import LEVEL, Texts, chi_square, draw, measure, tail
from tests.drafters.dspark_cases import DEEPSPEC, block_tensors, target, write

PROMPT = [3, 1, 4, 1, 5]
SHAPES = {"chain": TreeSpec.chain(3), "tree": drawn_tree(6, 3)}


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_sampled_drafts_have_the_targets_law_as_in_the_engine(name: str, tmp_path: Path) -> None:
    model = target()
    drafter = load_drafter(write(tmp_path, DEEPSPEC, block_tensors(DEEPSPEC)), model)
    found = measure(model, drafter, name, PROMPT, SHAPES[name], 2000, 20, 3, first=0)
    assert found["p"] > LEVEL and 20 <= found["cells"] <= 27 and found["engine_equal"] == found["engine_draws"] == 20
    assert found["rejection_sample_method"] == {"chain": "standard", "tree": "tree"}[name]


@torch.inference_mode()
def test_a_rule_that_takes_every_draft_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    drafter = load_drafter(write(tmp_path, DEEPSPEC, block_tensors(DEEPSPEC)), model)
    texts = Texts(model, PROMPT, params := SamplingParams(temperature=1.0, top_k=3, max_tokens=3))
    rule = acceptance.RULES["standard"]

    def eager(tree, probs, rows, seeds, counters):
        return rule.accept(tree, (probs + 1e3 * (probs > 0)), rows, seeds, counters)

    monkeypatch.setitem(acceptance.RULES, "standard", rule._replace(accept=eager))
    tokens, _ = draw(model, drafter, PROMPT, texts, params, SHAPES["chain"], "standard", torch.arange(2000))
    assert chi_square(tokens, texts)[2] < LEVEL / 100


def test_tail_is_the_chi_square_distributions() -> None:
    from scipy.stats import chi2

    assert [tail(x, n) for x, n in ((0.3, 1), (12.0, 9), (80.0, 63))] == pytest.approx([chi2.sf(0.3, 1), chi2.sf(12, 9), chi2.sf(80, 63)])
