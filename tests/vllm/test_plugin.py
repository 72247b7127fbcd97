"""The plugin in vLLM's processes: found, switched off, refusing broken checkpoints, sampling by the target's law."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from tests.vllm import cases
from tests.vllm.cases import K, OFF, V

AWAY = dict(VLLM_PLUGINS="")
OURS, THEIRS = "dspark_runtime.vllm.model", "vllm.model_executor.models.qwen3_dspark"
LIGHT = ["dspark_runtime", "dspark_runtime.errors", "dspark_runtime.vllm"]


def test_off_is_vllm_and_on_is_vllm_until_dspark_is_asked_for(tmp_path: Path) -> None:
    target, drafter = cases.random_target(tmp_path / "target"), cases.random_drafter(tmp_path / "drafter")
    texts = cases.prompts((3, 20, 70))
    plain = dict(target=str(target), prompts=texts, tokens=12, sampling=dict(logprobs=V))
    seeded = plain | dict(sampling=dict(temperature=1.0, seed=7, logprobs=V))
    jobs = [
        plain, seeded, plain | dict(speculative=cases.speculative(drafter)),
        seeded | dict(speculative=cases.speculative(drafter, "probabilistic")),
        seeded | dict(speculative=cases.speculative(drafter, "probabilistic"), engine=dict(use_fp64_gumbel=True)),
    ]  # fmt: skip
    found, logs = {}, {}
    for name, environment in (("on", {}), ("off", OFF), ("away", AWAY)):
        (tmp_path / name).mkdir()
        found[name], logs[name] = cases.run(jobs, tmp_path / name, **environment)
    on, off, away = (found[name] for name in ("on", "off", "away"))

    def bytes_of(answer: dict[str, Any]) -> str:
        return json.dumps({key: x for key, x in answer.items() if key not in ("modules", "model")})

    # Switched off, or named by nobody: to the last bit of every log probability.
    assert off["registered"] == away["registered"] == THEIRS and on["registered"] == OURS
    assert [bytes_of(x) for x in off["jobs"]] == [bytes_of(x) for x in away["jobs"]]
    assert [x["model"] for x in off["jobs"]] == [x["model"] for x in away["jobs"]] == ["", "", THEIRS, THEIRS, THEIRS]
    assert all(x["modules"] == [] for x in away["jobs"]) and all(x["modules"] == LIGHT for x in off["jobs"])
    # On, and no drafter: registered and nothing else.
    assert [bytes_of(x) for x in on["jobs"][:2]] == [bytes_of(x) for x in off["jobs"][:2]]
    assert [x["modules"] for x in on["jobs"][:2]] == [LIGHT, LIGHT]
    # With a drafter of vLLM's kind: the same drafts, at temperature 0 and drawn with vLLM's noise.
    for ours, theirs in zip(on["jobs"][2:], off["jobs"][2:]):
        assert ours["model"] == OURS
        assert [ours[x] for x in ("texts", "drafts", "counts")] == [theirs[x] for x in ("texts", "drafts", "counts")]
    assert on["jobs"][0]["texts"] == on["jobs"][2]["texts"]
    assert on["jobs"][3]["texts"] != on["jobs"][4]["texts"]  # noise in float64 is other noise
    said = "DSpark drafts step by step, with vLLM's sampler: noise is asked for in float64 (use_fp64_gumbel)"
    assert logs["on"].count(said) == 1


def test_an_engine_in_a_process_of_its_own_finds_the_plugin(tmp_path: Path) -> None:
    target = cases.random_target(tmp_path / "target")
    drafter = cases.random_drafter(tmp_path / "drafter", markov_head_type="gated")
    job = dict(target=str(target), prompts=cases.prompts((3, 20)), tokens=6, speculative=cases.speculative(drafter))
    found, log = cases.run([job], tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert found["jobs"][0].get("counts", {}).get("vllm:spec_decode_num_drafts"), log[-3000:]
    line = re.search(r"\((\w+) pid=\d+\).*DSpark drafter of dspark-runtime: .*, gated Markov head", log)
    assert line and line[1] != "MainProcess", log[-3000:]


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "missing": (lambda c, x: x.pop("markov_head.markov_w2.weight"),
                r"missing: markov_head.markov_w2.weight: missing, expected shape \[48, 12\]"),
    "shape": (lambda c, x: x.update({"fc.weight": x["fc.weight"][:, :-1].contiguous()}),
              r"shape: fc.weight: found shape \[64, 191\], expected \[64, 192\]"),
    "stranger": (lambda c, x: x.update(surprise=torch.ones(2)),
                 r"stranger: surprise: not a tensor of a dspark drafter in the deepspec dialect"),
    "head": (lambda c, x: c.update(markov_head_type="lstm"),
             r"head/config.json: markov_head_type: found 'lstm', allowed: vanilla, gated, rnn; DSPARK_VLLM_PLUGIN=0.*"),
    "layers": (lambda c, x: c.update(target_layer_ids=[0, 2, 6]),
               r"layers/config.json: target layers: found \[0, 2, 6\], allowed: up to 5, the target's last"),
    "width": (lambda c, x: c.update(target_hidden_size=32),
              r"width/config.json: target_hidden_size: found 32, allowed: 64, the target's"),
    "rank": (lambda c, x: c.pop("markov_rank"), r"rank/config.json: markov_rank: missing; DSPARK_VLLM_PLUGIN=0 .*"),
}  # fmt: skip


def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    target = cases.random_target(tmp_path / "target")
    job = dict(target=str(target), prompts=[[1, 2]], tokens=2)
    jobs = []
    for name, (change, _) in BROKEN.items():
        edit(cases.random_drafter(tmp_path / name), change)
        jobs.append(job | dict(speculative=cases.speculative(tmp_path / name)))
    cut = cases.random_drafter(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    found, _ = cases.run([*jobs, job | dict(speculative=cases.speculative(cut.parent))], tmp_path)
    expected = [message for _, message in BROKEN.values()] + [r"cut: not readable safetensors \(.*\)"]
    for answer, message in zip(found["jobs"], expected, strict=True):
        assert answer.get("kind") == "ValueError", answer
        assert re.fullmatch(re.escape(f"{tmp_path}/") + message, answer["error"]), answer["error"]


Judged = list[tuple[np.ndarray, list[int], int]]
"""[(law [V], ids in the order of the draft's probabilities, token)]"""


def pvalue(judged: Judged) -> float:
    """Of: every token was drawn from its law. Along the order that the drafter gives it, where it falls in its law's
    distribution function is uniform in [0, 1)."""
    g = np.random.default_rng(0)
    values = []
    for law, order, token in judged:
        at = order.index(token)
        values.append(law[order[:at]].sum() + g.random() * law[token])
    return float(stats.chisquare(np.histogram(values, bins=20, range=(0, 1 + 1e-6))[0]).pvalue)


def judged_texts(found: list[dict[str, Any]], target: Path, folder: Path) -> Judged:
    """Every token that a drawn draft was verified for, with plain vLLM's own probabilities of all tokens there."""
    folder.mkdir()
    judge = dict(target=str(target), tokens=1, sampling=dict(prompt_logprobs=V))
    answers, _ = cases.run([judge | dict(prompts=answer["texts"]) for answer in found], folder, **AWAY)
    out: Judged = []
    for answer, plain in zip(found, answers["jobs"], strict=True):
        for i, n, chain, _, ranks in answer["drafts"]:
            text = answer["texts"][i]
            for k in range(len(chain)):
                if n + k < len(text) and text[n : n + k] == chain[:k]:
                    law = np.exp([plain["logprobs"][i][n + k][str(token)] for token in range(V)])
                    assert abs(law.sum() - 1) < 1e-4
                    out.append((law, ranks[k], text[n + k]))
    return out


def test_probabilistic_drafting_keeps_the_law_of_plain_vllm(tmp_path: Path) -> None:
    target = cases.random_target(tmp_path / "target")
    own = load_file(target / "model.safetensors")["lm_head.weight"]
    jobs = []
    for i, kind in enumerate(("vanilla", "gated", "rnn")):
        drafter = cases.random_drafter(tmp_path / kind, markov_head_type=kind)
        # Closer to the target than noise, so that drafts are accepted and rejected.
        edit(drafter, lambda c, x: x.update({"lm_head.weight": 0.5 * own}))
        # Seeds of their own: one seed's draws are alike under every drafter, and the judge wants independent ones.
        jobs.append(dict(
            target=str(target), prompts=cases.prompts((4,) * 24, seed=8), tokens=16, ranks=True,
            sampling=dict(temperature=1.0, seed=1000 * (i + 1)),
            speculative=cases.speculative(drafter, "probabilistic", k=3),
        ))  # fmt: skip
    found, log = cases.run(jobs, tmp_path)
    assert not [x["error"] for x in found["jobs"] if "error" in x], log[-3000:]
    for answer in found["jobs"]:
        counts = answer["counts"]
        rate = counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_draft_tokens"]
        assert 0.03 < rate < 0.97, rate
    judged = judged_texts(found["jobs"], target, tmp_path / "judge")
    assert len(judged) > 800
    assert pvalue(judged) > 1e-3
    # The same judge where one token in ten is the drafter's best.
    g = np.random.default_rng(1)
    drawn = [int(g.choice(V, p=law / law.sum())) for law, _, _ in judged]
    wrong = [(law, order, order[0] if g.random() < 0.1 else x) for (law, order, _), x in zip(judged, drawn)]
    assert pvalue(wrong) < 1e-3


def test_prompt_lookup_by_custom_class(tmp_path: Path) -> None:
    target = cases.random_target(tmp_path / "target")
    texts = [[5, 6, 7, 8, 9] * 4, cases.prompts((30,))[0], [1]]
    plain = dict(target=str(target), prompts=texts, tokens=40)
    lookup = dict(method="custom_class", num_speculative_tokens=K)
    jobs = [plain]
    for name in ("NgramProposer", "SuffixProposer"):
        jobs.append(plain | dict(speculative=lookup | dict(model=f"dspark_runtime.vllm.proposer.{name}")))
    found, log = cases.run(jobs, tmp_path, VLLM_USE_V2_MODEL_RUNNER="0")
    assert not [x["error"] for x in found["jobs"] if "error" in x], log[-3000:]
    for answer in found["jobs"][1:]:
        assert answer["texts"] == found["jobs"][0]["texts"]
        assert answer["counts"]["vllm:spec_decode_num_accepted_tokens"] > 0
