"""vLLM's drafts and this project's engine's on one checkpoint: the same at the same contexts, the same tokens, the same
AL. Stock vLLM first: then ours inside of it, with the heads that vLLM does not have. About 40 s a case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dspark.load import load_drafter
from dspark_runtime.targets import load_target
from eval.check_drafter import rebuilt, write
from tests.vllm import cases
from tests.vllm.cases import K, OFF, TOKENS

LENGTHS = (1, 17, 63, 64, 150)  # around vLLM's chunks of 64 shared by all requests


def compare(target: Path, drafter: Path, theirs: dict[str, Any], texts: list[list[int]]) -> float:
    """Mean of accepted drafts a step, after everything was compared."""
    model = load_target(str(target), dtype="float32", device="cpu").model
    own = load_drafter(drafter, model, candidates=48)
    # Longer than theirs, so that there are whole chains up to their end.
    ours = write(model, own, texts, TOKENS + K + 1, K)
    assert [ours.texts[i][: len(text) + TOKENS] for i, text in enumerate(texts)] == theirs["texts"]

    # A near tie may fall either way: chains count that survive a change of the LM head by some times its rounding.
    head = own.network.lm_head
    g = torch.Generator().manual_seed(4)
    shaken = rebuilt(own, lm_head=head * (1 + 1e-5 * torch.randn(head.shape, generator=g)))
    again = write(model, shaken, texts, TOKENS + K + 1, K)
    sure = [line for line in theirs["drafts"] if ours.chains[line[0], line[1]] == again.chains[line[0], line[1]]]
    assert len(sure) > 0.95 * len(theirs["drafts"]) > 19
    assert [chain for _, _, chain, *_ in sure] == [ours.chains[i, n] for i, n, *_ in sure]
    assert len({tuple(chain) for _, _, chain, *_ in sure}) > 10
    for i, n, _, probabilities, _ in sure:
        if probabilities:
            assert probabilities == pytest.approx(ours.sure[i, n], abs=1e-4)

    # Their own count of accepted drafts, from the same chains on the same text. A last step may be cut short.
    counts = [ours.accepted(K)[i, n] for i, n, *_ in theirs["drafts"]]
    assert theirs["counts"]["vllm:spec_decode_num_drafts"] == pytest.approx(len(counts), abs=len(texts))
    accepted = theirs["counts"]["vllm:spec_decode_num_accepted_tokens"]
    assert accepted == pytest.approx(sum(counts), abs=K * len(texts))
    return sum(counts) / len(counts)


def job(target: Path, texts: list[list[int]], drafter: Path | None = None, confidence: bool = False) -> dict[str, Any]:
    asked = dict(target=str(target), prompts=texts, tokens=TOKENS, confidence=confidence)
    return asked | (dict(speculative=cases.speculative(drafter)) if drafter else {})


def test_stock_vllm_drafts_and_writes_the_same(tmp_path: Path) -> None:
    target, drafter = cases.random_target(tmp_path / "target"), cases.random_drafter(tmp_path / "drafter")
    other = cases.planted_pair(tmp_path / "planted")
    texts = cases.prompts(LENGTHS)
    found, _ = cases.run([job(target, texts, drafter), job(other[0], texts, other[1])], tmp_path, **OFF)
    assert {answer["model"] for answer in found["jobs"]} == {"vllm.model_executor.models.qwen3_dspark"}
    compare(target, drafter, found["jobs"][0], texts)
    assert 0.5 < compare(*other, found["jobs"][1], texts) < K


NESTED = dict(
    target_layer_ids=[1, 3, 4], mask_token_id=7, markov_rank=9, markov_head_type="gated", enable_confidence_head=True,
    confidence_head_with_markov=True,
)  # fmt: skip
DRAFTERS: dict[str, dict[str, Any]] = {
    "gated": dict(markov_head_type="gated"),
    "rnn": dict(markov_head_type="rnn", confidence_head_with_markov=False),
    "specforge": dict(
        architectures=["DSparkDraftModel"], markov_rank=None, markov_head_type=None, enable_confidence_head=None,
        target_layer_ids=None, mask_token_id=None, dflash_config=NESTED,
    ),
    "none": dict(markov_rank=0, markov_head_type=None, enable_confidence_head=False),  # DeepSpec's DFlash
    "pruned": dict(draft_vocab_size=32),
    "embeddings": dict(target_layer_ids=[-1, 2, 5], sample_from_anchor=False, block_size=5),
}


def test_our_drafter_in_vllm_with_every_head(tmp_path: Path) -> None:
    target, texts = cases.random_target(tmp_path / "target"), cases.prompts(LENGTHS)
    drafters = {name: cases.random_drafter(tmp_path / name, **changes) for name, changes in DRAFTERS.items()}
    scaling = dict(temperatures=[0.5, 2.0, 1.5, 0.7], dataset="x", num_samples=9, ece_before=0.1, ece_after=0.0)
    (drafters["gated"] / "calibration.json").write_text(json.dumps(scaling))
    other = cases.planted_pair(tmp_path / "planted")
    jobs = [job(target, texts), job(other[0], texts), job(other[0], texts, other[1], confidence=True)]
    for name, changes in DRAFTERS.items():
        jobs.append(job(target, texts, drafters[name], confidence=changes.get("enable_confidence_head") is not False))
    found, log = cases.run(jobs, tmp_path)
    plain, other_plain, planted, *answers = found["jobs"]
    assert not [x["error"] for x in found["jobs"] if "error" in x], log[-3000:]
    for name, answer in zip(DRAFTERS, answers):
        assert answer["model"] == "dspark_runtime.vllm.model", name
        assert answer["texts"] == plain["texts"], name  # greedy: with speculation as without
        compare(target, drafters[name], answer, texts)
    assert planted["texts"] == other_plain["texts"]
    assert 0.5 < compare(*other, planted, texts) < K
