"""vLLM's drafts and this project's engine's on one checkpoint: the same at the same contexts, the same tokens, the same
AL. Stock vLLM first: then ours inside of it, with the heads that vLLM does not have. About 40 s a case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dspark.load import load_drafter
from dspark_runtime.targets import load_target
from eval.check_drafter import rebuilt, write
from tests.vllm import cases
from tests.vllm.cases import K, OFF, TOKENS

LENGTHS = (1, 5, 16, 17, 63, 64, 65, 150)  # around vLLM's chunks of 64 shared by all requests


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
    assert len(sure) > 0.95 * len(theirs["drafts"]) and len(sure) > 20
    assert [chain for _, _, chain, _ in sure] == [ours.chains[i, n] for i, n, _, _ in sure]
    assert len({tuple(chain) for _, _, chain, _ in sure}) > 10
    for i, n, _, probabilities in sure:
        if probabilities:
            assert probabilities == pytest.approx(ours.sure[i, n], abs=1e-4)

    # Their own count of accepted drafts, from the same chains on the same text. A last step may be cut short.
    counts = [ours.accepted(K)[i, n] for i, n, _, _ in theirs["drafts"]]
    assert theirs["counts"]["vllm:spec_decode_num_drafts"] == pytest.approx(len(counts), abs=len(texts))
    accepted = theirs["counts"]["vllm:spec_decode_num_accepted_tokens"]
    assert accepted == pytest.approx(sum(counts), abs=K * len(texts))
    return sum(counts) / len(counts)


@pytest.mark.parametrize("name", ["random", "planted"])
def test_stock_vllm_drafts_and_writes_the_same(name: str, tmp_path: Path) -> None:
    if name == "random":
        target, drafter = cases.random_target(tmp_path / "target"), cases.random_drafter(tmp_path / "drafter")
    else:
        target, drafter = cases.planted_pair(tmp_path)
    texts = cases.prompts(LENGTHS)
    job = dict(target=str(target), prompts=texts, tokens=TOKENS, speculative=cases.speculative(drafter))
    found, _ = cases.run([job], tmp_path, **OFF)
    assert found["jobs"][0]["model"] == "vllm.model_executor.models.qwen3_dspark"
    mean = compare(target, drafter, found["jobs"][0], texts)
    assert name == "random" or 0.5 < mean < K


DRAFTERS: dict[str, dict[str, Any]] = {
    "gated": dict(markov_head_type="gated"),
    "rnn": dict(markov_head_type="rnn", confidence_head_with_markov=False),
    "none": dict(markov_rank=0, markov_head_type=None, enable_confidence_head=False),  # DeepSpec's DFlash
    "pruned": dict(draft_vocab_size=32),
    "embeddings": dict(target_layer_ids=[-1, 2, 5], sample_from_anchor=False, block_size=5),
}


def test_our_drafter_in_vllm_with_every_head(tmp_path: Path) -> None:
    target = cases.random_target(tmp_path / "target")
    texts = cases.prompts((1, 17, 64, 150))
    plain = dict(target=str(target), prompts=texts, tokens=TOKENS)
    jobs, drafters = [plain], {}
    for name, changes in DRAFTERS.items():
        drafters[name] = cases.random_drafter(tmp_path / name, **changes)
        confidence = changes.get("enable_confidence_head", True)
        jobs.append(plain | dict(speculative=cases.speculative(drafters[name]), confidence=confidence))
    drafters["planted"], jobs[-1:] = cases.planted_pair(tmp_path / "planted")[1], jobs[-1:]
    planted = dict(target=str(tmp_path / "planted" / "target"), prompts=texts, tokens=TOKENS)
    jobs += [planted, planted | dict(speculative=cases.speculative(drafters["planted"]), confidence=True)]
    found, log = cases.run(jobs, tmp_path)
    results = found["jobs"]
    assert not [r["error"] for r in results if "error" in r], log[-3000:]
    without, answers = results[0], dict(zip(DRAFTERS, results[1:]))
    for name, answer in answers.items():
        assert answer["model"] == "dspark_runtime.vllm.model", name
        assert answer["texts"] == without["texts"], name  # greedy: with speculation as without
        compare(target, drafters[name], answer, texts)
    assert results[-1]["texts"] == results[-2]["texts"]
    assert 0.5 < compare(tmp_path / "planted" / "target", drafters["planted"], results[-1], texts) < K
