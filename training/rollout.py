"""The target's own answers: what a drafter learns from. Shards of conversations as token ids, written as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_runtime.errors import ConfigError, RequestError
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


def generate(
    engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any], done: Callable[[int, Any], None]
) -> None:
    """Run many prompts; done(i, output) as each ends, None for one the engine refuses. Requests enter an eighth of the rows at a time: a pass of the
    target over one new prompt costs a small model as much as a whole decode step."""
    rows = engine.max_num_requests
    wave = max(rows // 8, 1)
    ids: dict[int, int] = {}
    at = 0
    while at < len(prompts) or engine.has_work:
        free = rows - engine.num_running if at < len(prompts) else 0
        if free >= wave or not engine.has_work:
            for _ in range(min(free, len(prompts) - at)):
                try:
                    ids[engine.submit(prompts[at], params[at])] = at
                except RequestError:
                    done(at, None)
                at += 1
        for output in engine.step():
            if output.finish_reason:
                done(ids.pop(output.request_id), output)
        engine.records.clear()  # nobody reads them, and there are very many


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
    """Write the shards of part (i, n) that are missing: every n-th, from the i-th, each as soon as it is whole. A run
    that was stopped goes on with the shards it was at. report(done, total) counts this part's answers."""
    from dspark_runtime.sampling import SamplingParams
    from dspark_runtime.prompts import encode

    folder.mkdir(parents=True, exist_ok=True)
    all_jobs = jobs(prompts, plan)
    shards = [range(start, min(start + plan.shard, len(all_jobs))) for start in range(0, len(all_jobs), plan.shard)]
    mine = range(part[0], len(shards), part[1])
    missing = [i for i in mine if not shard_path(folder, i).is_file()]
    todo = [job for i in missing for job in shards[i]]
    total = sum(len(shards[i]) for i in mine)
    finished = total - len(todo)
    ids = [encode(tokenizer, prompts[all_jobs[job][0]]["turns"][0]) for job in todo]
    params = [
        SamplingParams(temperature=t, max_tokens=plan.max_tokens, seed=seed + s)
        for _, t, s in (all_jobs[job] for job in todo)
    ]
    answers: dict[int, Any] = {}
    left = {i: len(shards[i]) for i in missing}

    def done(at: int, output: Any) -> None:
        nonlocal finished
        answers[at] = output
        index = todo[at] // plan.shard
        left[index] -= 1
        finished += 1
        report(finished, total)
        if left[index] == 0:
            first = missing.index(index) * plan.shard  # only the last shard may be shorter
            found = [(ids[i], answers.pop(i)) for i in range(first, first + len(shards[index]))]
            save_shard(shard_path(folder, index), [(p, o.token_ids) for p, o in found if o is not None and not o.error])

    generate(engine, ids, params, done)


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
    """(tokens int32, flat; lengths [n, 2] of prompt and answer) of every shard, in order. Raises ConfigError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    loaded = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            loaded.append(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file ({error}); delete it to have it answered again") from None
    if not loaded:
        return np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    tokens = np.concatenate([part["tokens"].astype(np.int32) for part in loaded])
    return tokens, np.concatenate([part["lengths"] for part in loaded])


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of prompts.jsonl. Raises ConfigError naming file, line and field."""
    found = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        try:
            found += [json.loads(line)] if line else []
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error})") from None
        for name in ("turns", "source") if line else ():
            if not isinstance(found[-1], dict) or not found[-1].get(name):
                raise ConfigError(f"{path}:{number}: {name}: missing")
    return found
