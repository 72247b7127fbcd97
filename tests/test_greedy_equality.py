"""Greedy speculative output is greedy plain output, token for token, on real text with the real embedded target.

float32: exactly. bfloat16: a difference must be a tie within rounding, and is counted.
The project's own prompts always run. DSPARK_PROMPTS=<folder of JSONL files> adds other sets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafters.draft_model import DraftModel
from drafters.ngram import NgramDrafter
from drafters.tree import TreeSpec
from dspark_runtime.configs import load_tree
from dspark_runtime.engine import Engine
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.prompts import encode, load_prompts

TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
BF16_SPACING = 2.0**-7  # of a value between 1 and 2; rounding of the two logits that compete


def engine(target, drafter: str, shape: str, rows: int) -> Engine:
    made = {"plain": None, "ngram": NgramDrafter(), "draft": DraftModel(target.model)}[drafter]
    spec = TreeSpec.chain(0) if made is None else TreeSpec.chain(4) if shape == "chain" else load_tree(shape)
    return Engine(target.model, made, spec=spec, max_num_requests=rows, max_prefill_tokens=256)


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    texts = load_prompts().texts[:52]
    return [encode(smollm2.tokenizer, text) for text in texts]


@pytest.fixture(scope="module")
def plain(smollm2, prompts) -> list[list[int]]:
    return [o.token_ids for o in engine(smollm2, "plain", "chain", 8).generate(prompts, GREEDY)]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("drafter,shape", [("ngram", "chain"), ("ngram", "tree-16"), ("draft", "chain"), ("draft", "tree-8")])
def test_float32_is_exact(smollm2, prompts, plain, drafter: str, shape: str, rows: int) -> None:
    assert len(prompts) >= 50
    outs = engine(smollm2, drafter, shape, rows).generate(prompts, GREEDY)
    assert [o.token_ids for o in outs] == plain
    assert sum(o.num_accepted for o in outs) > 0
    if drafter == "draft":  # the target as its own draft: all is accepted but what the end of a request cuts
        assert all(o.num_steps <= -(-len(o.token_ids) // 4) for o in outs)


@pytest.fixture(scope="session")
def half():
    from dspark_runtime.targets import load_target

    return load_target("smollm2", dtype="bfloat16", device="cpu", max_model_len=1024)


def near_tie(target, prompt: list[int], common: list[int], token: int) -> bool:
    """Whether `token` is the best next token of plain decoding up to the rounding of two bfloat16 logits."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    top = engine(target, "plain", "chain", 1).generate([prompt + common], params)[0].logprobs[0].top
    best = max(top.values())
    return token in top and best - top[token] <= 32 * BF16_SPACING  # logits of this model stay below 32


@pytest.mark.parametrize("drafter,shape", [("ngram", "tree-16"), ("draft", "chain")])
def test_bfloat16_differs_only_at_ties(half, prompts, drafter: str, shape: str, record_property) -> None:
    some = prompts[:24]
    want = [o.token_ids for o in engine(half, "plain", "chain", 1).generate(some, GREEDY)]
    got = [o.token_ids for o in engine(half, drafter, shape, 8).generate(some, GREEDY)]
    ties = 0
    for prompt, a, b in zip(some, want, got):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
            assert near_tie(half, prompt, a[:at], b[at])
            ties += 1
    record_property("near_ties", ties)
    assert ties <= len(some) // 4


SHARED = os.environ.get("DSPARK_PROMPTS")


@pytest.mark.prompts
@pytest.mark.skipif(SHARED is None, reason="DSPARK_PROMPTS names no folder of evaluation prompts (they are not part of the project)")
@pytest.mark.parametrize("drafter,shape", [("ngram", "chain"), ("ngram", "tree-16"), ("draft", "chain")])
def test_float32_is_exact_on_evaluation_prompts(smollm2, drafter: str, shape: str) -> None:
    texts = [text for path in sorted(Path(SHARED).glob("*.jsonl")) for text in load_prompts(path).texts[:14]]
    ids = [encode(smollm2.tokenizer, text)[:400] for text in texts]
    assert len(ids) >= 50
    want = [o.token_ids for o in engine(smollm2, "plain", "chain", 8).generate(ids, GREEDY)]
    assert [o.token_ids for o in engine(smollm2, drafter, shape, 8).generate(ids, GREEDY)] == want
