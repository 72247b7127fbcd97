"""Answers: every job once, whatever kills the run and however many share it. The target is scripted: an answer depends on
its prompt and seed alone, so that equal shards are equal byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_runtime.engine import Engine
from dspark_runtime.models.scripted import ScriptedModel
from training.config import AnswerPlan
from training.rollout import answer, jobs, load_shards, read_prompts, save_shard, shard_path

V, LIMIT = 48, 64
PLAN = AnswerPlan(max_tokens=16, num_requests=4, shard=3, answers_per_prompt=2, file_answers=3)


class Letters:
    """A tokenizer: id i is character 64 + i; no chat template."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 64 for c in text]}


def engine(rows: int = 4) -> Engine:
    def logits(prefix: tuple[int, ...]) -> list[float]:
        return [((prefix[-1] * 7 + len(prefix) * 3 + i * i) % 11) / 4 for i in range(V)]

    return Engine(ScriptedModel(V, logits, max_model_len=LIMIT, eos_token_ids=(0,)), max_num_requests=rows, page_size=8)


def prompts(count: int) -> list[dict[str, Any]]:
    sources = ["self:free", "own.jsonl", "self:Words"]
    return [{"turns": [chr(65 + i % 26) * (1 + i % 7)], "source": sources[i % 3]} for i in range(count)]


def roll_out(folder: Path, count: int, plan: AnswerPlan = PLAN, kill: int | None = None, **part: Any) -> list[tuple[int, int]]:
    """Every answer, or until `kill` of them are there; returns what was reported."""
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == kill:
            raise KeyboardInterrupt

    answer(engine(plan.num_requests), Letters(), prompts(count), plan, folder, 5, report, **part)
    return seen


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def conversations(folder: Path) -> list[tuple[list[int], list[int]]]:
    tokens, lengths = load_shards(folder)
    found, at = [], 0
    for p, o in lengths.tolist():
        found.append((tokens[at : at + p].tolist(), tokens[at + p : at + p + o].tolist()))
        at += p + o
    assert at == len(tokens)
    return found


# ------------------------------------------------------------------------------------------------ what is asked


@given(st.integers(1, 40), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), st.integers(1, 64), st.integers(1, 64))
def test_jobs_go_round_the_temperatures_and_have_seeds_of_their_own(
    count: int, temperatures: list[float], own: int, file: int
) -> None:
    plan = AnswerPlan(temperatures=tuple(temperatures), answers_per_prompt=own, file_answers=file)
    found = jobs(prompts(count), plan)
    assert [i for i, _, _ in found] == sorted(i for i, _, _ in found)
    for i in range(count):
        mine = [(t, s) for j, t, s in found if j == i]
        assert len(mine) == (file if i % 3 == 1 else own)
        assert [t for t, _ in mine] == [temperatures[(i + j) % len(temperatures)] for j in range(len(mine))]
    assert len({s for _, _, s in found}) == len(found)


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Each against decoding its prompt alone, with its own temperature and seed."""
    from dspark_runtime.sampling import SamplingParams

    seen = roll_out(tmp_path, 7)
    asked = jobs(prompts(7), PLAN)
    assert [done for done, _ in seen] == list(range(1, len(asked) + 1)) and {total for _, total in seen} == {len(asked)}
    found = conversations(tmp_path)
    assert len(found) == len(asked)
    for (ids, output), (i, temperature, seed) in zip(found, asked):
        assert ids == Letters()(prompts(7)[i]["turns"][0])["input_ids"]
        params = SamplingParams(temperature=temperature, max_tokens=PLAN.max_tokens, seed=5 + seed)
        assert output == engine(1).generate([ids], params)[0].token_ids
        assert len(output) == PLAN.max_tokens or output[-1] == 0  # the end of turn is learnt too
    lengths = [len(output) for _, output in found]
    assert min(lengths) < PLAN.max_tokens == max(lengths)


# ------------------------------------------------------------------------------------------------ resuming, sharing


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_shards(count: int, shard: int, rows: int, data: Any) -> None:
    plan = PLAN.model_copy(update=dict(shard=shard, num_requests=rows))
    total = len(jobs(prompts(count), plan))
    with tempfile.TemporaryDirectory() as name:
        whole, folder = Path(name, "whole"), Path(name, "killed")
        roll_out(whole, count, plan)
        want = files(whole)
        assert len(want) == -(-total // shard)
        for _ in range(data.draw(st.integers(1, 3))):
            before = files(folder)
            left = total - sum(min(shard, total - int(n[:4]) * shard) for n in before)
            if not left:
                break
            with pytest.raises(KeyboardInterrupt):
                roll_out(folder, count, plan, kill=data.draw(st.integers(1, left)))
            assert before.items() <= files(folder).items() <= want.items()
        have = files(folder)
        (folder / "0000.partial").write_bytes(b"cut off")  # killed while writing
        seen = roll_out(folder, count, plan)
        assert files(folder) == want
        answered = sum(min(shard, total - int(n[:4]) * shard) for n in have)
        assert len(seen) == total - answered and (not seen or seen[-1] == (total, total))
        assert roll_out(folder, count, plan) == [] and files(folder) == want


@pytest.mark.parametrize("workers", [1, 2, 3, 20])
def test_workers_cover_every_shard_once(workers: int, tmp_path: Path) -> None:
    roll_out(tmp_path / "one", 9)
    seen: list[str] = []
    for i in reversed(range(workers)):
        before = set(files(tmp_path / "many"))
        reported = roll_out(tmp_path / "many", 9, part=(i, workers))
        written = sorted(set(files(tmp_path / "many")) - before)
        assert all(int(name[:4]) % workers == i for name in written)
        if reported:
            assert reported[-1][0] == reported[-1][1]
        seen += written
    assert sorted(seen) == sorted(files(tmp_path / "one"))
    assert files(tmp_path / "many") == files(tmp_path / "one")


def test_a_request_that_fails_is_left_out(tmp_path: Path) -> None:
    """A prompt longer than the engine's limit: the others' answers are kept, in their order."""
    long = [*prompts(2), {"turns": ["A" * LIMIT], "source": "self:free"}, *prompts(2)]
    answer(engine(), Letters(), long, PLAN, tmp_path, 5, lambda *_: None)
    found = [ids for ids, _ in conversations(tmp_path)]
    assert found == [Letters()(long[i]["turns"][0])["input_ids"] for i, _, _ in jobs(long, PLAN) if i != 2]
    assert roll_out(tmp_path / "none", 0) == [] and load_shards(tmp_path / "none")[1].shape == (0, 2)


# ------------------------------------------------------------------------------------------------ shards


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.integers(0, 200_000), max_size=9)] * 2), max_size=12), st.integers(1, 5))
def test_shards_keep_every_token(pairs: list[tuple[list[int], list[int]]], shard: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, start in enumerate(range(0, len(pairs), shard)):
            save_shard(shard_path(folder, index), pairs[start : start + shard])
        tokens, lengths = load_shards(folder)
        assert tokens.dtype == np.int32 and lengths.dtype == np.int32 and lengths.shape == (len(pairs), 2)
        assert conversations(folder) == pairs


def test_prompts_are_read_by_line_ends_alone(tmp_path: Path) -> None:
    from training.prompts import write

    texts = [{"turns": ["a \u2028 b\x85c"], "source": "x"}, {"turns": ["d"], "source": "y"}]
    write(tmp_path / "p.jsonl", texts)
    assert read_prompts(tmp_path / "p.jsonl") == texts
