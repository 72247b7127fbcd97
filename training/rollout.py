"""The target's own answers: what a drafter learns from. Shards of conversations as token ids, written as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.config import AnswerPlan


def jobs(prompts: Sequence[dict[str, Any]], plan: AnswerPlan) -> list[tuple[int, float, int]]:
    """Every answer to be made: (prompt, temperature, seed). Longest share first is not worth it: the order is the
    prompts', so that every shard is a fair mixture."""
    found = []
    for i, prompt in enumerate(prompts):
        count = plan.answers_per_prompt if prompt["source"].startswith("self:") else plan.file_answers
        for j in range(count):
            found.append((i, plan.temperatures[(i + j) % len(plan.temperatures)], i * 64 + j))
    return found


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.safetensors"


def answer(
    engine: Any,
    tokenizer: Any,
    prompts: Sequence[dict[str, Any]],
    plan: AnswerPlan,
    folder: Path,
    seed: int,
    report: Callable[[int, int], None],
    part: tuple[int, int] = (0, 1),
) -> None:
    """Write the shards of part (i, n) that are missing: every n-th, from the i-th. A run that was stopped goes on with
    the shard it was at. report(done, total) counts this part's answers."""
    from dspark_runtime.sampling import SamplingParams
    from dspark_runtime.prompts import encode

    folder.mkdir(parents=True, exist_ok=True)
    all_jobs = jobs(prompts, plan)
    starts = range(0, len(all_jobs), plan.shard)
    mine = [i for i in range(len(starts)) if i % part[1] == part[0]]
    total = sum(len(all_jobs[starts[i] : starts[i] + plan.shard]) for i in mine)
    done = 0

    def progress(outputs: list[Any]) -> None:
        nonlocal done
        done += sum(o.finish_reason is not None for o in outputs)
        report(done, total)

    for index in mine:
        chunk = all_jobs[starts[index] : starts[index] + plan.shard]
        if shard_path(folder, index).is_file():
            done += len(chunk)
            continue
        ids = [encode(tokenizer, prompts[i]["turns"][0]) for i, _, _ in chunk]
        params = [SamplingParams(temperature=t, max_tokens=plan.max_tokens, seed=seed + s) for _, t, s in chunk]
        outputs = engine.generate(ids, params, on_step=progress)
        save_shard(shard_path(folder, index), [(p, o.token_ids) for p, o in zip(ids, outputs) if not o.error])


def save_shard(path: Path, conversations: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """(prompt ids, answer ids) of many conversations -> one file, in place at once."""
    from safetensors.numpy import save_file

    dtype = np.uint32
    flat = [token for prompt, output in conversations for token in (*prompt, *output)]
    if max(flat, default=0) < 1 << 16:
        dtype = np.uint16
    lengths = np.array([[len(p), len(o)] for p, o in conversations], dtype=np.int32).reshape(-1, 2)
    temporary = path.with_suffix(".partial")
    save_file({"tokens": np.array(flat, dtype=dtype), "lengths": lengths}, temporary)
    temporary.replace(path)


def load_shards(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32, flat; lengths [n, 2] of prompt and answer) of every shard, in order."""
    from safetensors.numpy import load_file

    loaded = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    if not loaded:
        return np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    tokens = np.concatenate([part["tokens"].astype(np.int32) for part in loaded])
    return tokens, np.concatenate([part["lengths"] for part in loaded])


def read_prompts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]
