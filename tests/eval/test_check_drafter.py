"""`dspark check` of a drafter checkpoint: the sound one passes, and every trap comes out under its own name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import eval.check
from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.load import load_drafter
from dspark_runtime.models.transformer import Transformer
from eval.check_drafter import check_drafter, context_lengths
from tests.drafters import planted
from tests.drafters.dspark_cases import eagle_tensors, target, write
from tests.drafters.planted import HALF, LAYERS, H, V
from tests.eval.test_cli import dspark

PROMPTS = [torch.randint(V, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 32 columns: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return planted.target(request.param)


@pytest.fixture(scope="module")
def qwen3() -> Transformer:
    return planted.target()


def verdicts(model: Any, folder: Path, context: int | None = None) -> dict[str, dict[str, Any]]:
    rows = {}

    def verdict(name: str, passed: bool, text: str, **numbers: Any) -> None:
        rows[name] = dict(passed=passed, text=text, **numbers)

    drafter = load_drafter(folder, model)
    check_drafter(model, drafter, PROMPTS, min(4, drafter.max_depth), 1.05, context, verdict)
    return rows


def failed(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in rows.items() if not row["passed"]]


def pruned(model: Transformer, ids: Tensor, shift: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a drafter of the tokens `ids`, whose d2t is `shift` rows off."""
    own = planted.drafter_tensors(model)
    tensors = {name: own[name][ids] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    return dict(draft_vocab_size=len(ids)), tensors | dict(d2t=ids.roll(shift) - torch.arange(len(ids)))


# -------------------------------------------------------------------------------------------------- a sound drafter


def test_a_sound_drafter_passes(model: Transformer, tmp_path: Path) -> None:
    rows = verdicts(model, planted.drafter(tmp_path, model))
    assert not failed(rows)
    assert rows["first_drafts"]["matched"] == 1.0 and max(rows["first_drafts"]["neighbours"].values()) < 0.8
    assert rows["preemption"]["preemptions"] > 0
    assert rows["chunk_edges"]["same"] == rows["chunk_edges"]["chains"]
    assert rows["markov_head"]["al"] > 4.9 and rows["markov_head"]["al_without"] < 3


def test_a_weaker_drafter_passes_too(qwen3: Transformer, tmp_path: Path) -> None:
    """Right as often as published ones are, and with a confidence that knows a little of when."""
    own = planted.drafter_tensors(qwen3)["markov_head.markov_w2.weight"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) * own.std()
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{"markov_head.markov_w2.weight": own + 0.6 * noise}))
    assert not failed(rows)
    assert 0.5 < rows["first_drafts"]["matched"] < 0.9
    assert "AUC" in rows["confidence_head"]["text"]


# -------------------------------------------------------------------------------------------------- traps of reading


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one(shift: int, model: Transformer, tmp_path: Path) -> None:
    taps = [i + shift for i in planted.CONFIG["target_layer_ids"]]
    rows = verdicts(model, planted.drafter(tmp_path, model, dict(target_layer_ids=taps)))
    assert f"layer ids look off by one: taps shifted by {-shift:+d} match 1.00 against" in rows["first_drafts"]["text"]
    assert "first_drafts" in failed(rows)


def test_slots_off_by_one(model: Transformer, tmp_path: Path) -> None:
    folder = planted.drafter(tmp_path, model, dict(sample_from_anchor=False))
    rows = verdicts(model, folder)
    assert "slots look off by one: sample_from_anchor true matches 1.00 against" in rows["first_drafts"]["text"]


@pytest.mark.parametrize("key, name", [("lm_head.weight", "LM head"), ("embed_tokens.weight", "embedding")])
def test_tables_of_another_model(key: str, name: str, model: Transformer, tmp_path: Path) -> None:
    own = planted.drafter_tensors(model)[key]
    wrong = own.roll(1, 0) if key == "lm_head.weight" else own.roll(HALF, 1)
    rows = verdicts(model, planted.drafter(tmp_path, model, **{key: wrong}))
    assert f"the {name} is not the one that the drafter was trained with" in rows["first_drafts"]["text"]
    assert "first_drafts" in failed(rows)


def test_weights_of_another_target(qwen3: Transformer, tmp_path: Path) -> None:
    own = planted.drafter_tensors(qwen3)
    keys = ("layers.0.self_attn.v_proj.weight", "markov_head.markov_w1.weight")
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{key: -own[key] for key in keys}))
    assert "weights of another target, or untrained" in rows["first_drafts"]["text"]


# ------------------------------------------------------------------------------------------------ traps of the heads


@pytest.mark.parametrize("key", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"])
def test_a_zeroed_markov_head(key: str, model: Transformer, tmp_path: Path) -> None:
    zero = torch.zeros_like(planted.drafter_tensors(model)[key])
    rows = verdicts(model, planted.drafter(tmp_path, model, **{key: zero}))
    assert failed(rows) == ["markov_head"]
    assert "Markov head is dead: its bias changes none of" in rows["markov_head"]["text"]
    assert "(all zero)" in rows["markov_head"]["text"]


def test_a_huge_markov_head(qwen3: Transformer, tmp_path: Path) -> None:
    key = "markov_head.markov_w2.weight"
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{key: planted.drafter_tensors(qwen3)[key] * 1e4}))
    assert failed(rows) == ["markov_head"] and "Markov head is huge" in rows["markov_head"]["text"]


def test_a_markov_head_of_another_drafter(qwen3: Transformer, tmp_path: Path) -> None:
    key = "markov_head.markov_w1.weight"
    own = planted.drafter_tensors(qwen3)[key]
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{key: -own}))
    assert "Markov head does harm" in rows["markov_head"]["text"]


def test_a_constant_confidence_head(model: Transformer, tmp_path: Path) -> None:
    key = "confidence_head.proj.weight"
    rows = verdicts(model, planted.drafter(tmp_path, model, **{key: torch.zeros(1, H + HALF)}))
    assert failed(rows) == ["confidence_head"]
    assert "confidence head is constant, it was not trained: 0.500" in rows["confidence_head"]["text"]


# ------------------------------------------------------------------------------------------- traps of the vocabulary


def test_pruned_vocabularies(model: Transformer, tmp_path: Path) -> None:
    common = torch.arange(V)[torch.arange(V) % 8 != 5]
    config, tensors = pruned(model, common)
    rows = verdicts(model, planted.drafter(tmp_path / "sound", model, config, **tensors))
    assert not failed(rows) and rows["draft_vocabulary"]["covered"] > 0.8
    config, tensors = pruned(model, common, shift=1)
    rows = verdicts(model, planted.drafter(tmp_path / "shifted", model, config, **tensors))
    assert "first_drafts" in failed(rows)
    assert "d2t is off by one row: shifted back it matches" in rows["first_drafts"]["text"]
    config, tensors = pruned(model, torch.arange(12))
    rows = verdicts(model, planted.drafter(tmp_path / "few", model, config, **tensors))
    assert "draft_vocabulary" in failed(rows)
    assert "the rest can never be drafted" in rows["draft_vocabulary"]["text"]


# ------------------------------------------------------------------------------------------------ traps of the cache


def broken(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    """The drafter forgets the features of passes (in `prefill`) or tokens for which `when` holds."""
    original = BlockDrafter._remember

    def remember(self: BlockDrafter, batch: Any, features: Tensor) -> None:
        original(self, batch, torch.where(when(batch)[:, None], -features, features))

    monkeypatch.setattr(BlockDrafter, "_remember", remember)


def test_entries_lost_at_chunk_edges(qwen3: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_of_later_chunk = lambda b: (b.positions == b.context_lens[0]) & (b.positions >= 40)  # noqa: E731
    broken(monkeypatch, first_of_later_chunk)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3), context=30)
    assert "chunk_edges" in failed(rows) and "lost or misplaced at the edges" in rows["chunk_edges"]["text"]


def test_a_cache_lost_by_preemption(qwen3: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a resumed request has its own output prefilled: here, tokens past its prompt of 24."""
    original = BlockDrafter.prefill

    def prefill(self: BlockDrafter, batch: Any, features: Tensor) -> None:
        long = batch.max_kv_len > 24 and self.cache.page_size == 4
        original(self, batch, -features if long else features)

    monkeypatch.setattr(BlockDrafter, "prefill", prefill)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3))
    assert failed(rows) == ["preemption"] and "preempted" in rows["preemption"]["text"]


@pytest.mark.parametrize(
    "own, cause", [(256, "positions or cache entries go wrong"), (100, "past the drafter's own range of 100")]
)
def test_long_contexts_that_go_wrong(
    own: int, cause: str, qwen3: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planted.drafter(tmp_path, qwen3, dict(max_position_embeddings=own))
    rows = verdicts(qwen3, folder)
    assert not failed(rows) and ("was not passed" in rows["contexts"]["text"]) == (own == 256)
    broken(monkeypatch, lambda batch: batch.positions >= 100)
    rows = verdicts(qwen3, folder)
    assert failed(rows) == ["contexts"] and cause in rows["contexts"]["text"]


def test_contexts_reach_past_a_short_range() -> None:
    assert context_lengths(256, 64, 20, None) == [1, 4, 16, 44, 64, 128]
    assert context_lengths(100_000, 40_960, 20, None) == [1, 4, 16, 64, 256, 512]
    assert context_lengths(100_000, 40_960, 20, 50_000)[-4:] == [16384, 40940, 40960, 50000]
    assert context_lengths(30, 64, 20, None) == [1, 4, 10]


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_verdicts_and_fails(
    qwen3: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eval.check, "load", lambda *_: SimpleNamespace(model=qwen3, tokenizer=None, name="planted"))
    sound = planted.drafter(tmp_path / "a", qwen3)
    shifted = planted.drafter(tmp_path / "b", qwen3, dict(target_layer_ids=[2, 4]))
    asked = ("--context", "40", "--json", str(tmp_path / "out.json"))
    assert dspark("check", "--drafter", str(sound), *asked) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["check"] for row in found["results"]} >= {"twin", "chain", "al", "first_drafts", "contexts"}
    assert all(row["passed"] for row in found["results"]) and found["environment"]["target"]
    capsys.readouterr()
    assert dspark("check", "--drafter", str(shifted), *asked) == 1
    assert "FAIL  first drafts: layer ids look off by one" in capsys.readouterr().out
    assert not all(row["passed"] for row in json.loads((tmp_path / "out.json").read_text())["results"])


@pytest.mark.parametrize("arguments, words", [
    (["--context", "0"], "context: found 0, allowed: 1 or more"),
    (["--json", "no/folder/x.json"], "json: found 'no/folder/x.json', allowed: a file that can be written"),
])  # fmt: skip
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("check", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_eagle3_is_checked_too(tmp_path: Path) -> None:
    """An untrained one: it is called dead, and its cache is sound."""
    from tests.drafters.test_dspark import make

    case, model = make("deepspec eagle3"), target()
    rows = verdicts(model, write(tmp_path, case.config, eagle_tensors(3)))
    assert {"chunk_edges", "preemption"}.isdisjoint(failed(rows))
    assert set(rows["first_drafts"]["neighbours"]) >= {"taps +1", "target's LM head"}
    assert LAYERS < model.num_layers
