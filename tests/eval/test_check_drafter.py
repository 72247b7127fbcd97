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
from drafters.dspark import calibration
from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.load import load_drafter
from dspark_runtime.models.transformer import Transformer
from eval import check_drafter
from eval.check_drafter import context_lengths
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
    check_drafter.check_drafter(model, drafter, PROMPTS, min(4, drafter.max_depth), 1.05, context, verdict)
    return rows


def failed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """All but the confidence head, which the planted drafter has at random: it has its own tests."""
    return [name for name, row in rows.items() if not row["passed"] and name != "confidence_head"]


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


def weaker(model: Transformer) -> dict[str, Tensor]:
    """A Markov head with mistakes, as often as published drafters make them."""
    own = planted.drafter_tensors(model)["markov_head.markov_w2.weight"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) * own.std()
    return {"markov_head.markov_w2.weight": own + 0.6 * noise}


def confident(model: Transformer, folder: Path, **tensors: Tensor) -> dict[str, Tensor]:
    """A confidence head fitted to what was accepted after each token."""
    written = check_drafter.write(model, load_drafter(planted.drafter(folder, model, **tensors), model), PROMPTS, 24, 4)
    right = torch.zeros(V, 2)
    for (request, length), accepted in written.accepted(4).items():
        text = written.texts[request][length - 1 :]
        for i in range(min(accepted + 1, 4)):
            right[text[i]] += torch.tensor([1.0, float(i < accepted)])
    rate = (right[:, 1] + 0.5) / (right[:, 0] + 1)
    e = planted.drafter_tensors(model)["markov_head.markov_w1.weight"]
    w = torch.linalg.lstsq(torch.cat((e, torch.ones(V, 1)), 1), rate.logit()[:, None]).solution[:, 0]
    weight = torch.cat((torch.zeros(H), w[:-1]))[None]
    return {"confidence_head.proj.weight": weight, "confidence_head.proj.bias": w[-1:]}


def test_a_weaker_drafter_passes_too(qwen3: Transformer, tmp_path: Path) -> None:
    """Right as often as published ones are, and with a confidence that knows a little of when."""
    tensors = weaker(qwen3)
    tensors |= confident(qwen3, tmp_path / "first", **tensors)
    rows = verdicts(qwen3, planted.drafter(tmp_path / "fitted", qwen3, **tensors))
    assert not failed(rows) and rows["confidence_head"]["passed"]
    assert 0.5 < rows["first_drafts"]["matched"] < 0.9
    assert 0.65 < rows["confidence_head"]["auc"] < 1 and "AUC" in rows["confidence_head"]["text"]


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_sound_drafters_with_other_heads_pass(kind: str, qwen3: Transformer, tmp_path: Path) -> None:
    config, tensors = dict(markov_head_type=kind), planted.drafter_tensors(qwen3)
    if kind == "gated":  # open
        extra = {"markov_head.gate_proj.weight": torch.zeros(HALF, H + HALF), "markov_head.gate_proj.bias": torch.full((HALF,), 30.0)}
    else:  # its output branch: tanh of a little is that little
        joint = torch.zeros(3 * HALF, 2 * HALF + H)
        joint[2 * HALF :, HALF : 2 * HALF] = torch.eye(HALF) * 1e-3
        extra = {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": torch.zeros(3 * HALF)}
        extra["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"] * 1e3
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, config, **extra))
    assert not failed(rows) and rows["first_drafts"]["matched"] == 1.0
    assert rows["markov_head"]["al"] > 4.9 and rows["markov_head"]["al_without"] < 3


def masked(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter whose slots fill their own position, as DFlash's: each stands one token later and looks one further back."""
    from tests.drafters.planted import BACK, HEADS, _pointer

    return dict(block_size=5), {"layers.0.self_attn.q_proj.bias": _pointer(BACK + 1, 1.0).repeat(HEADS)}


def test_a_sound_drafter_of_the_other_slots_passes(qwen3: Transformer, tmp_path: Path) -> None:
    config, tensors = masked(qwen3)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, config | dict(sample_from_anchor=False), **tensors))
    assert not failed(rows) and rows["first_drafts"]["matched"] == 1.0


# -------------------------------------------------------------------------------------------------- traps of reading


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one(shift: int, model: Transformer, tmp_path: Path) -> None:
    taps = [i + shift for i in planted.CONFIG["target_layer_ids"]]
    rows = verdicts(model, planted.drafter(tmp_path, model, dict(target_layer_ids=taps)))
    assert f"layer ids look off by one: taps {-shift:+d} matches 1.00 against" in rows["first_drafts"]["text"]
    assert "first_drafts" in failed(rows)


def test_slots_off_by_one(model: Transformer, tmp_path: Path) -> None:
    folder = planted.drafter(tmp_path, model, dict(sample_from_anchor=False))
    rows = verdicts(model, folder)
    assert "slots look off by one: sample_from_anchor true matches 1.00 against" in rows["first_drafts"]["text"]
    assert "first_drafts" in failed(rows)


def test_slots_off_by_one_the_other_way(qwen3: Transformer, tmp_path: Path) -> None:
    """A checkpoint that forgot to say that its anchor predicts nothing."""
    config, tensors = masked(qwen3)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, config, **tensors))
    assert "slots look off by one: sample_from_anchor false matches 1.00 against" in rows["first_drafts"]["text"]
    assert "first_drafts" in failed(rows)


def test_layer_ids_and_slots_off_by_one(qwen3: Transformer, tmp_path: Path) -> None:
    """Two mistakes at once: neither reading alone is right."""
    wrong = dict(target_layer_ids=[2, 4], sample_from_anchor=False)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, wrong))
    words = "layer ids and slots look off by one: taps -1, sample_from_anchor true matches 1.00 against"
    assert words in rows["first_drafts"]["text"]


def test_a_calibrated_drafter_is_read_otherwise_too(qwen3: Transformer, tmp_path: Path) -> None:
    """The neighbour that drafts one more has no temperature for it."""
    folder = planted.drafter(tmp_path, qwen3, dict(sample_from_anchor=False))
    found = calibration.Calibration(temperatures=[1.5, 1.2, 1.0], dataset="x", num_samples=1, ece_before=0, ece_after=0)
    (folder / calibration.FILE).write_text(found.model_dump_json())
    assert "sample_from_anchor true matches 1.00" in verdicts(qwen3, folder)["first_drafts"]["text"]


def test_few_matches_are_called_few(qwen3: Transformer, tmp_path: Path) -> None:
    own = planted.drafter_tensors(qwen3)["markov_head.markov_w2.weight"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) * own.std()
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{"markov_head.markov_w2.weight": own + 2.5 * noise}))
    assert 0.05 < rows["first_drafts"]["matched"] < 0.3 and rows["first_drafts"]["passed"]
    assert "few, half and more is usual" in rows["first_drafts"]["text"]


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
    assert rows["contexts"]["passed"], "where next to nothing is accepted, nothing is no collapse"


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
    assert not failed(rows) and not rows["confidence_head"]["passed"]
    assert "confidence head is constant, it was not trained: 0.500" in rows["confidence_head"]["text"]


def test_an_untrained_confidence_head(qwen3: Transformer, tmp_path: Path) -> None:
    """Random: its outputs differ, and say nothing of what is accepted."""
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **weaker(qwen3)))
    assert not failed(rows) and not rows["confidence_head"]["passed"] and rows["confidence_head"]["auc"] < 0.65
    assert "does not know what is accepted, it was not trained" in rows["confidence_head"]["text"]


def test_a_broken_confidence_head(qwen3: Transformer, tmp_path: Path) -> None:
    bias = torch.full((1,), float("nan"))
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, **{"confidence_head.proj.bias": bias}))
    assert not failed(rows) and not rows["confidence_head"]["passed"]


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


@pytest.mark.parametrize("d2t, words", [
    (lambda ids: ids, "d2t holds target ids where offsets were read: read so it matches"),
    (lambda ids: ids - torch.arange(len(ids)) + 1, "d2t is off by one: target ids less one match"),
    (lambda ids: ids.roll(-1) - torch.arange(len(ids)), "d2t is off by one row: shifted on it matches"),
], ids=["target ids", "ids + 1", "rows - 1"])  # fmt: skip
def test_vocabulary_maps_read_wrongly(d2t: Any, words: str, qwen3: Transformer, tmp_path: Path) -> None:
    """A small vocabulary, so that a wrong map is still a map and nothing but the text can tell."""
    ids = torch.arange(26)[torch.arange(26) % 4 != 3]
    config, tensors = pruned(qwen3, ids)
    rows = verdicts(qwen3, planted.drafter(tmp_path, qwen3, config, **tensors | dict(d2t=d2t(ids))))
    assert words in rows["first_drafts"]["text"] and "first_drafts" in failed(rows)


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


@pytest.mark.parametrize("block, said", [(2, "chain of 1"), (3, "chain of 2"), (6, "chain of 4")])
def test_shorter_blocks_than_the_usual_chain_are_checked_as_they_are(
    block: int, said: str, qwen3: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eval.check, "load", lambda *_: SimpleNamespace(model=qwen3, tokenizer=None, name="planted"))
    config, tensors = masked(qwen3)
    folder = planted.drafter(tmp_path, qwen3, config | dict(block_size=block, sample_from_anchor=False), **tensors)
    call = ["check", "--drafter", str(folder), "--context", "20", "--json", str(tmp_path / "out.json")]
    dspark(*call)
    assert f"ok    {said}: 6 of 6 outputs equal plain decoding" in capsys.readouterr().out
    rows = {row["check"]: row for row in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert rows["tree"]["passed"] and rows["first_drafts"]["matched"] == 1.0
    if block < 5:
        assert dspark(*call, "-k", "4") == 2
        assert f"found depth 4, allowed: at most {block - 1}" in capsys.readouterr().err


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
