"""A whole training run in one folder: prompts, answers, steps. Every stage that is done is left as it is."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.config import TrainConfig
from dspark_runtime.errors import ConfigError, DsparkError
from dspark_runtime.validation import read_fields, read_json

STAGES = ("prompts", "answers", "training")

Report = Callable[[str, int, int], None]
"""report(what, done, total)"""


def train(
    config: TrainConfig,
    folder: Path,
    report: Report,
    *,
    prompts: Sequence[Path] = (),
    evaluation: Sequence[Path] = (),
    device: str = "auto",
    dtype: str = "auto",
    workers: int = 1,
    stop_after: str = STAGES[-1],
    seconds: float | None = None,
    init: Path | None = None,
) -> dict[str, Any]:
    """Run the stages up to `stop_after`, or go on with a stopped run; returns what the run is made of.

    prompts: JSONL files to answer beside the self-written turns. evaluation: JSONL files that are never trained on.
    workers: processes that answer side by side on one device. seconds: of training in this call, then stop and save.
    init: a drafter checkpoint to start from.
    Raises ConfigError for what does not fit together.
    """
    if stop_after not in STAGES:
        raise ConfigError(f"stop_after: found {stop_after!r}, allowed: {', '.join(STAGES)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {folder}: {error.strerror or error}") from None
    _check_shape(config)
    if init is not None:
        _check_start(init, folder)
    _keep_recipe(config, folder)
    if not (folder / "prompts.jsonl").is_file():
        _write_prompts(config, folder, report, prompts, evaluation, device, dtype, workers)
    else:
        _check_prompts(folder, prompts, evaluation)
    if stop_after == "prompts":
        return _summary(config, folder)
    _answer(config, folder, report, device, dtype, workers)
    if stop_after == "answers":
        return _summary(config, folder)
    _train(config, folder, report, device, dtype, seconds, init)
    return _summary(config, folder)


def _check_shape(config: TrainConfig) -> None:
    """Whether the drafter fits the target, before the data is made that it is to learn from."""
    from drafters.dspark.dialects import parse
    from dspark_runtime.targets import target_config
    from training.config import drafter_config

    target = target_config(config.target)
    taps, last = config.drafter.target_layer_ids, target.num_hidden_layers - 1
    if not all(-1 <= tap <= last for tap in taps):
        raise ConfigError(f"drafter.target_layer_ids: found {list(taps)}, allowed: 0 to {last}, -1 for embeddings")
    try:
        parse(drafter_config(config.drafter, target), "drafter", target.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_start(init: Path, folder: Path) -> None:
    """What can be said of `init` without the target; the trainer compares the shapes."""
    from drafters.dspark.dialects import parse
    from drafters.dspark.load import read_config

    if (folder / "training" / "state.json").is_file():
        raise ConfigError(f"init: {folder} holds a run already, allowed: a new folder, or going on without --init")
    try:
        parse(read_config(init), str(init))
    except ValueError as error:
        raise ConfigError(f"init: {error}") from None


def _check_prompts(folder: Path, files: Sequence[Path], evaluation: Sequence[Path]) -> None:
    """Files named to a run that has its prompts: they must be in it, or not be in it."""
    from training.prompts import Forbidden, from_file
    from training.rollout import read_prompts
    from dspark_runtime.prompts import load_prompts

    forbidden = Forbidden(load_prompts(path).texts for path in evaluation)
    turns = [prompt["turns"][0] for prompt in read_prompts(folder / "prompts.jsonl")]
    for number, turn in enumerate(turns, start=1):
        shared = forbidden.shared(turn)
        if shared is not None:
            raise ConfigError(
                f'evaluation: prompt {number} of {folder / "prompts.jsonl"} shares 13 words with an evaluation prompt '
                f'("{shared}"); allowed: a new folder'
            )
    known = set(turns)
    for path in files:
        if any(prompt["turns"][0] not in known for prompt in from_file(path, forbidden)):
            raise ConfigError(f"prompts: {path} is not part of the run in {folder}, allowed: a new folder")


def _keep_recipe(config: TrainConfig, folder: Path) -> None:
    """The recipe of the data lies beside it: a folder belongs to one. Training may be repeated with another schedule."""
    path, data = folder / "recipe.json", config.model_dump(mode="json", include={"target", "seed", "prompts", "answers"})
    if path.is_file():
        if read_json(path) != data:
            raise ConfigError(f"{folder}: holds prompts and answers of another recipe, allowed: a new folder")
        return
    _json(path, data)


def _engine(config: TrainConfig, device: str, dtype: str, max_tokens: int) -> tuple[Any, Any]:
    """(engine, target) that decodes plainly, many requests at once."""
    from dspark_runtime.engine import Engine
    from dspark_runtime.targets import load_target

    target = load_target(config.target, device=device, dtype=dtype)
    if target.tokenizer is None:
        raise ConfigError(f"target: {config.target} has no tokenizer, needed to read and write prompts")
    length = min(target.model.max_model_len, config.training.row_length)
    rows = config.answers.num_requests
    engine = Engine(
        target.model, max_num_requests=rows, max_model_len=length, max_prefill_tokens=16384,
        num_pages=max(rows * -(-min(length, 2 * max_tokens) // 16), -(-length // 16) + 1) + 1,
    )  # fmt: skip
    return engine, target


def _write_prompts(
    config: TrainConfig,
    folder: Path,
    report: Report,
    files: Sequence[Path],
    evaluation: Sequence[Path],
    device: str,
    dtype: str,
    workers: int,
) -> None:
    from training.prompts import Forbidden, from_file, write
    from training.rollout import read_prompts
    from dspark_runtime.prompts import load_prompts

    forbidden = Forbidden(load_prompts(path).texts for path in evaluation)
    found = {prompt["turns"][0]: prompt for path in files for prompt in from_file(path, forbidden)}
    if config.prompts.self_written:
        _in_parts(_prompts_part, "prompts", workers, report, config, folder, device, dtype, evaluation)
        for path in sorted(folder.glob("prompts-part-*.jsonl")):
            found |= {prompt["turns"][0]: prompt for prompt in read_prompts(path)}
    if not found:
        raise ConfigError("prompts: found none, allowed: prompts.self_written above 0 in the recipe, or --prompts FILE")
    import random

    prompts = [found[turn] for turn in sorted(found)]  # whoever wrote them
    random.Random(config.seed).shuffle(prompts)
    write(folder / "prompts.jsonl", prompts)
    for path in folder.glob("prompts-part-*.jsonl"):
        path.unlink()


def _prompts_part(
    config: TrainConfig,
    folder: Path,
    device: str,
    dtype: str,
    evaluation: Sequence[Path],
    part: tuple[int, int],
    report: Callable[[int, int], None],
) -> None:
    from training.prompts import Forbidden, self_write, write
    from dspark_runtime.prompts import load_prompts

    path = folder / f"prompts-part-{part[0]}-{part[1]}.jsonl"
    if path.is_file():
        return
    forbidden = Forbidden(load_prompts(path).texts for path in evaluation)
    engine, target = _engine(config, device, dtype, 2 * config.prompts.max_tokens)
    write(path, self_write(engine, target.tokenizer, config.prompts, forbidden, config.seed, report, part))


def _answer(config: TrainConfig, folder: Path, report: Report, device: str, dtype: str, workers: int) -> None:
    from training.rollout import jobs, read_prompts, shard_path

    prompts = read_prompts(folder / "prompts.jsonl")
    shards = range(-(-len(jobs(prompts, config.answers)) // config.answers.shard))
    if not all(shard_path(folder / "answers", i).is_file() for i in shards):
        _in_parts(_answer_part, "answers", workers, report, config, folder, device, dtype)


def _answer_part(
    config: TrainConfig, folder: Path, device: str, dtype: str, part: tuple[int, int], report: Callable[[int, int], None]
) -> None:
    from training.rollout import answer, read_prompts

    engine, target = _engine(config, device, dtype, config.answers.max_tokens)
    prompts = read_prompts(folder / "prompts.jsonl")
    answer(engine, target.tokenizer, prompts, config.answers, folder / "answers", config.seed, report, part)


def _in_parts(work: Callable[..., None], what: str, workers: int, report: Report, *args: Any) -> None:
    """work(*args, (i, workers), report) for every part i, in processes of their own if there is more than one: decoding
    a small model on a GPU waits for the host."""
    if workers == 1:
        work(*args, (0, 1), lambda *x: report(what, *x))
        return
    import multiprocessing

    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    counts, errors = [context.Array("l", 2) for _ in range(workers)], context.SimpleQueue()
    processes = [
        context.Process(target=_part, args=(work, args, (i, workers), counts[i], errors), daemon=True)
        for i in range(workers)
    ]
    # Ctrl-C reaches every process of a terminal: this one ends the others. An ignored signal is inherited.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.5)
        report(what, sum(count[0] for count in counts), sum(count[1] for count in counts))
        if any(process.exitcode for process in processes):
            break
    for process in processes:
        if process.exitcode:
            for other in processes:
                other.terminate()
            if not errors.empty():
                raise ConfigError(errors.get())
            raise ConfigError(f"{what}: a worker ended with exit code {process.exitcode}; its own message is above")


def _part(work: Callable[..., None], args: tuple[Any, ...], part: tuple[int, int], count: Any, errors: Any) -> None:
    def report(done: int, total: int) -> None:
        count[0], count[1] = done, total

    try:
        work(*args, part, report)
    except DsparkError as error:
        errors.put(str(error))
        sys.exit(1)


def _train(
    config: TrainConfig, folder: Path, report: Report, device: str, dtype: str, seconds: float | None, init: Path | None
) -> None:
    from training.rollout import load_shards
    from training.trainer import Trainer
    from dspark_runtime.targets import load_target

    target = load_target(config.target, device=device, dtype=dtype)
    tokens, lengths = load_shards(folder / "answers")
    if len(lengths) < 2:
        raise ConfigError(f"{folder}: found {len(lengths)} answers, allowed: 2 or more")
    cuda = target.model.device.type == "cuda"
    trainer = Trainer(config, target, tokens, lengths, folder / "training", compile=cuda, init=init)

    def progress(done: int, total: int, parts: dict[str, float]) -> None:
        report(f"training, AL {parts['tau']:.2f}", done, total)

    trainer.run(progress, seconds)
    _json(folder / "training" / "held_out.json", trainer.evaluate())
    plot(trainer.curve, folder / "training" / "curve.png")


def plot(curve: Sequence[dict[str, float]], path: Path) -> None:
    """The run as a picture: AL under the real prefix (1 + Σ survival) and the losses, over steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = [point["step"] for point in curve]
    left.plot(steps, [point["tau"] for point in curve], color="black", linewidth=1)
    left.set(xlabel="step", ylabel="AL at T=1 under the real prefix, tokens", title="acceptance length in training")
    for name, label in (("ce", "cross-entropy, nats"), ("tv", "‖q - p‖₁"), ("confidence", "confidence, nats")):
        right.plot(steps, [point[name] for point in curve], label=label, linewidth=1)
    right.set(xlabel="step", title="losses", ylim=(0, None))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def _summary(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Counts of what the folder holds: prompts by source, answers (fewer than asked for where a prompt was too long),
    tokens, and where training stands. Also kept in the folder."""
    from collections import Counter

    from training.rollout import jobs, load_shards, read_prompts

    prompts = read_prompts(folder / "prompts.jsonl")
    _, lengths = load_shards(folder / "answers")
    found: dict[str, Any] = {
        "prompts": dict(Counter(p["source"] for p in prompts)),
        "asked": len(jobs(prompts, config.answers)),
        "answers": len(lengths),
        "answer_tokens": int(lengths[:, 1].sum()),
    }
    state = folder / "training" / "state.json"
    if state.is_file():
        values = read_fields(state, "step", "seconds", "curve")
        found |= {"step": values["step"], "seconds": values["seconds"], "last": values["curve"][-1] if values["curve"] else None}
    held = folder / "training" / "held_out.json"
    if held.is_file():
        found["held_out"] = read_json(held)
    _json(folder / "summary.json", found)
    return found
