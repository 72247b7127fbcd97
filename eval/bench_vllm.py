"""`dspark bench --engine vllm`: the same measurement through vLLM, stock and with this project's plugin.

One engine serves one number of drafts and one acceptance, so each of them is a process of its own: a child that is told
what to measure in JSON and answers in JSON. It reports the tokens and the time of every step, and vLLM's own counters;
everything else is computed here, as for this project's engine. Prompts, lengths and repeats are those of `eval.bench`;
what one process measures, it measures in one go, so a slow minute of the machine falls on one line, not on all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dspark_runtime import vllm as plugin
from dspark_runtime.configs import names
from dspark_runtime.errors import ConfigError, DsparkError
from dspark_runtime.prompts import load_prompts
from eval import bench
from eval.schema import BenchConfig, BenchRow, Environment, Run, StepMs

if TYPE_CHECKING:
    from drafters.dspark.config import DrafterConfig
    from dspark_runtime.models.config import ModelConfig

STOCK, PLUGGED = "vllm", "vllm+plugin"
ROOT = Path(__file__).resolve().parent.parent
DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = COUNTERS = tuple(
    f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
AGREE = 0.005
"""How far the AL by vLLM's counters may be from the tokens that it emitted a step."""

Counts = Mapping[str, Any]
"""vLLM's counters by their names; `BY_POSITION` is a list."""
Event = tuple[float, list[int]]
"""(milliseconds since the event before, tokens of each request): one output of vLLM's engine."""


# --------------------------------------------------------------------------------------------------- what vLLM serves


def refuse(config: BenchConfig) -> None:
    """Options that vLLM has no counterpart of. Raises ConfigError naming the option."""
    rules = [name for name in config.scheduler if name != "none"]
    adaptive = "none (vLLM's own is enable_adaptive_verification of a --speculative-config)"
    for field, found, allowed in (
        ("tree", config.tree[0] if config.tree else None, "chains (vLLM has no trees): -k"),
        ("scheduler", rules[0] if rules else None, adaptive),
        ("backend", config.backend if config.backend != "auto" else None, "auto (vLLM picks its kernels)"),
        ("device", config.device if config.device != "auto" else None, "auto (vLLM is built for one kind of device)"),
        ("synthetic_acceptance_trace", config.synthetic_acceptance_trace, "--al or --rates (vLLM replays no trace)"),
        ("routing", config.routing if config.routing not in (None, "model", "uniform") else None, "model, uniform"),
    ):
        if found is not None:
            raise ConfigError(f"{field}: found {found!r} with engine vllm, allowed: {allowed}")
    rule, synthetic = config.rejection_sample_method, set(config.acceptance_length) - {"real"}
    synthetic = bool(synthetic or config.synthetic_acceptance_rates)
    allowed = ("auto",) if synthetic else ("auto", "standard", "block")
    if rule not in allowed:
        where = "with synthetic acceptance" if synthetic else "with engine vllm"
        raise ConfigError(f"rejection_sample_method: found {rule!r} {where}, allowed: {', '.join(allowed)}")
    given = config.speculative_config
    if given is not None:
        if twice := [field for field in ("drafter", "num_speculative_tokens") if field in config.model_fields_set]:
            raise ConfigError(f"speculative_config: found together with {twice[0]}, allowed: one of them")
        for field, kind in (("method", str), ("num_speculative_tokens", int)):
            if not isinstance(given.get(field), kind):
                raise ConfigError(f"speculative_config: {field}: missing, allowed: what dspark tune prints")
        for field in given:
            if field.startswith("synthetic_") or given[field] == "synthetic":
                allowed = "--al or --rates, so that the table says so"
                raise ConfigError(f"speculative_config: found {field}, allowed: {allowed}")


def require_vllm() -> str:
    """The installed vLLM's version. Raises ConfigError where there is none, saying how to get it."""
    version = plugin._installed()
    if version is None:
        raise ConfigError(
            f"engine: found vllm, which {sys.executable} does not have, allowed: after "
            "pip install 'dspark-runtime[vllm]' in an environment of its own"
        )
    return version


@dataclass
class Served:
    """What is served: a folder for vLLM, and what `eval.bench` asks of a target."""

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Any
    dtype: str

    @property
    def model(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.config.vocab_size, dtype=self.dtype)


def serve_target(name: str, config: BenchConfig, folder: Path) -> Served:
    from dspark_runtime.targets import hf_folder

    path, shape, tokenizer = hf_folder(name, folder, config.weights)
    called = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    return Served(called, path, shape, tokenizer, dtype)


def speculation(config: BenchConfig, target: Served, folder: Path) -> tuple[dict[str, Any], str]:
    """(vLLM's speculative_config without the number of drafts, what the method is called in the table). A drafter that
    is no folder is written into `folder`. Raises ConfigError."""
    from eval.tune import NGRAM

    if config.speculative_config is not None:
        found = dict(config.speculative_config)
        model = found.get("model")
        if isinstance(model, str) and found["method"] != "custom_class":
            found["model"] = str(model_folder(model, found["method"], config, target, folder))
        return found, ":".join(filter(None, (found["method"], model and Path(model).name)))
    name = config.drafter
    if name == "ngram":
        return {"method": "ngram", **NGRAM}, "ngram"
    if name.startswith("draft:"):
        model = name.removeprefix("draft:")
        path = target.folder if model == "self" else model_folder(model, "draft_model", config, target, folder)
        return {"method": "draft_model", "model": str(path)}, name
    path = model_folder(name, "dspark", config, target, folder)
    method = vllm_method(path, target)
    found = {"method": method, "model": str(path)}
    if method == "dspark" and config.temperature > 0:
        found["draft_sample_method"] = "probabilistic"  # as this project's engine drafts
    return found, f"{method}:{Path(name).name}"


def model_folder(name: str, method: str, config: BenchConfig, target: Served, folder: Path) -> Path:
    """The folder of a draft model, of one that ships, or of an architecture with dummy weights."""
    from drafters.dspark.load import locate

    if method == "draft_model":
        return serve_target(name, config, folder).folder
    path = locate(name)
    if name in names("models") and (config.weights == "dummy" or not path.is_dir()):
        if config.weights != "dummy":
            raise ConfigError(f"drafter: {name} is an architecture without weights; add --weights dummy for timing")
        values = drafter_to_hf(bench.drafter_config(name, target.config))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values, indent=1))
        return folder
    return path.resolve() if path.is_dir() else Path(name)


def vllm_method(folder: Path, target: Served) -> str:
    """vLLM's name for what a checkpoint is. DeepSpec's DFlash is a DSpark drafter without a Markov head there."""
    from drafters.dspark.dialects import parse
    from drafters.dspark.load import read_config

    try:
        c = parse(read_config(folder), str(folder / "config.json"), target.config.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(f"drafter: {error}") from None
    return "dspark" if c.dialect in ("deepspec", "specforge") and c.kind != "eagle3" else c.kind


def drafter_to_hf(c: DrafterConfig) -> dict[str, Any]:
    """The config.json, in DeepSpec's dialect, of a drafter without a checkpoint. Raises ConfigError."""
    if c.layers != "qwen3":
        raise ConfigError(f"drafter: found {c.layers} layers, allowed: an architecture with qwen3 layers in vLLM")
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "attention_bias",
        "target_hidden_size", "block_size", "sample_from_anchor", "mask_token_id", "markov_rank", "markov_head_type",
    )  # fmt: skip
    return {name: getattr(c, name) for name in same} | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "rope_parameters": c.rope.model_dump(exclude_defaults=True)
        | {"rope_type": c.rope.rope_type, "rope_theta": c.rope.rope_theta},
        "target_layer_ids": list(c.taps),
        "enable_confidence_head": c.confidence != "none",
        "confidence_head_with_markov": c.confidence == "markov",
    }


# ------------------------------------------------------------------------------------------------------- the numbers


def acceptance_numbers(counts: Counts, depth: int) -> dict[str, object]:
    """vLLM's counters as `BenchRow` names things: AL = 1 + accepted / drafts, rates of position i over drafts. depth:
    positions, 0 for plain decoding (`DRAFTS` is then the number of steps)."""
    drafts, drafted, accepted = (counts.get(name, 0) for name in (DRAFTS, DRAFTED, ACCEPTED))
    by_position = (list(counts.get(BY_POSITION, ())) + [0] * depth)[:depth]
    if not drafts:
        raise DsparkError("vLLM's counters have no drafts: found nothing to count")
    survival = [n / drafts for n in by_position]
    reached = [drafts, *by_position]
    return dict(
        spec_decode_acceptance_length=1 + accepted / drafts,
        spec_decode_per_position_acceptance_rates=survival,
        spec_decode_conditional_acceptance_rates=[p / q if q else None for p, q in zip(survival, [1.0, *survival])],
        accepted_per_step=accepted / drafts,
        proposed_per_step=drafted / drafts,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        emitted_histogram=[a - b for a, b in zip(reached, [*by_position, 0])],
    )


def summed(counts: Sequence[Counts]) -> dict[str, Any]:
    """Counters of several repeats as one."""
    total: dict[str, Any] = {}
    for one in counts:
        for name, value in one.items():
            old = total.get(name)
            if isinstance(value, list):
                total[name] = value if old is None else [a + b for a, b in zip(old, value, strict=True)]
            else:
                total[name] = value + (old or 0)
    return total


def repeat_of(events: Sequence[Event], depth: int) -> bench.Repeat:
    """A run's outputs as decode steps. A request's first token is its prefill's; a step in which another request's
    prompt was still being read holds the requests that decoded, and no time of it counts (it is not of all)."""
    from dspark_runtime.records import StepRecord

    started: set[int] = set()
    records, prefill_ms = [], 0.0
    for ms, tokens in events:
        decoding = [i for i, n in enumerate(tokens) if n and i in started]
        if len(started) < len(tokens):
            prefill_ms += ms
        if first := {i for i, n in enumerate(tokens) if n} - started:
            started |= first
        if decoding:
            emitted = [tokens[i] for i in decoding]
            size = len(decoding)
            accepted, verified = [n - 1 for n in emitted], size * (depth + 1)
            records.append(StepRecord(decoding, [depth] * size, accepted, emitted, verified, 0, dict(total=ms)))
    return bench.Repeat(records, prefill_ms)


def line_numbers(answer: Mapping[str, Any], num_requests: int, depth: int) -> dict[str, object]:
    """Every number of a row, from the repeats of a child."""
    found = answer["repeats"][str(num_requests)]
    repeats = [repeat_of(run["events"], depth) for run in found]
    steps = bench.acceptance_numbers(repeats, depth)
    pairs = sum(s.num_requests for r in repeats for s in r.records)
    counts = summed([run["counts"] for run in found])
    out = acceptance_numbers(counts if depth else {DRAFTS: pairs}, depth)
    out |= {name: steps[name] for name in ("spec_decode_acceptance_length_per_request", "steps")}
    out |= bench.time_numbers(repeats, num_requests)
    # vLLM's step is one: it says nothing of its parts.
    out["step_ms"] = StepMs(total=out["step_ms"].total)
    out["vllm_metrics"] = counts or None
    emitted = steps["spec_decode_acceptance_length"]
    if abs(emitted - out["spec_decode_acceptance_length"]) > AGREE:
        out["warning"] = (
            f"vLLM counts {counts.get(DRAFTS, 0)} drafts in {pairs} steps of requests, those with drafts only: "
            f"over all steps AL is {emitted:.2f}"
        )
    return out


# --------------------------------------------------------------------------------------------------------- the parent


def bench_vllm(config: BenchConfig, command: str = "dspark bench", progress: bench.Progress = lambda *_: None) -> Run:
    """As `eval.bench.bench`. Raises ConfigError before anything slow where it can."""
    refuse(config)
    asked = config
    if given := config.speculative_config:
        drafter, k = str(given.get("model", given["method"])), given["num_speculative_tokens"]
        config = config.model_copy(update=dict(drafter=drafter, num_speculative_tokens=[k]))
    points = bench.plan(config)
    version = require_vllm()
    texts = load_prompts(config.prompts) if config.context_len is None else None
    # vLLM guesses methods from paths: none of their names may stand in this one.
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        progress(f"reading {config.target}", 0, 1)
        target = serve_target(config.target, config, folder / "target")
        prompts = bench.Prompts(config, texts, target)
        method, called = ({}, "plain") if config.drafter == "none" else speculation(config, target, folder / "drafter")
        answers = measure(config, points, prompts, target, method, folder, progress)
    progress("done", 1, 1)

    rows: list[BenchRow] = []
    baseline: dict[int, BenchRow] = {}
    for point in points:
        for engine in engines(point, method):
            row = bench.empty_row(point, target, SimpleNamespace(name=called), config, prompts)
            row = row.model_copy(update=dict(engine=engine, routing=routing_name(config, target)))
            answer = {} if point.error else answers[key(point), engine]
            if "error" in answer:
                row.error = answer["error"]
            elif answer:
                update = line_numbers(answer, point.num_requests, point.spec.depth)
                warning = update.pop("warning", None)
                update |= dict(repeats=config.repeats, num_prompts=prompts.distinct(point.num_requests, config.repeats))
                row = row.model_copy(update=update)
                if point.plain:
                    baseline[point.num_requests] = row
                bench.finish_row(row, point, baseline.get(point.num_requests), None)
                row.warning = warning or row.warning
            rows.append(row)
            if point.error:
                break  # no engine can run it
    ran = [answer for answer in answers.values() if "error" not in answer]
    drafted = [row for row in rows if row.num_speculative_tokens]
    if not ran or drafted and not any(row.ran for row in drafted):
        raise ConfigError(f"vLLM: {next(row.error for row in rows if row.error)}")
    return Run(
        command=command,
        synthetic=any(row.synthetic for row in rows),
        environment=environment_of(config, version, ran[0], prompts),
        seed=config.seed,
        config=asked,
        results=rows,
    )


def environment_of(config: BenchConfig, version: str, answer: Mapping[str, Any], prompts: bench.Prompts) -> Environment:
    import torch

    from eval.environment import environment

    facts = environment(
        torch.device(answer["device"]),
        config.seed,
        cuda_graph=answer["cuda_graph"],
        prompts=prompts.set.name if prompts.set else None,
        prompts_sha256=prompts.set.sha256 if prompts.set else None,
    )
    return Environment(**(facts | dict(ops={}, cpu_kernels=None, vllm=version)))  # none of our own operations ran


def key(point: bench.Point) -> tuple[object, ...]:
    """Points of one key are served by one engine."""
    return point.spec.depth, None if point.law is None else point.law.survival


def engines(point: bench.Point, method: Mapping[str, Any]) -> tuple[str, ...]:
    """The plugin has a part in DSpark drafting only."""
    return (STOCK, PLUGGED) if not point.plain and method.get("method") == "dspark" else (STOCK,)


def routing_name(config: BenchConfig, target: Served) -> str | None:
    """As `bench.forced_routing`: not said, uniform for experts of random weights."""
    if not target.config.num_experts:
        if config.routing == "uniform":
            raise ConfigError(f"routing: found 'uniform' with {target.name}, allowed: model (it has no experts)")
        return None
    return config.routing or ("uniform" if config.weights == "dummy" else "model")


def measure(
    config: BenchConfig,
    points: Sequence[bench.Point],
    prompts: bench.Prompts,
    target: Served,
    method: Mapping[str, Any],
    folder: Path,
    progress: bench.Progress,
) -> dict[tuple[object, str], dict[str, Any]]:
    """Every child's answer by the key of its points and its engine."""
    deepest = max(p.spec.depth for p in points)
    longest = prompts.longest + config.max_tokens + deepest + 1
    if longest > target.config.max_position_embeddings:
        raise ConfigError(
            f"context_len: prompts of up to {prompts.longest} tokens, {config.max_tokens} new, {deepest + 1} of one "
            f"step make {longest}, allowed: at most {target.config.max_position_embeddings}, the limit of {target.name}"
        )
    rounds = [[prompts.of(i, b) for b in config.num_requests] for i in range(config.warmup + config.repeats)]
    forced = routing_name(config, target) == "uniform"
    runs = {(key(p), engine): p for p in points if not p.error for engine in engines(p, method)}
    answers: dict[tuple[object, str], dict[str, Any]] = {}
    for done, ((which, engine), point) in enumerate(runs.items()):
        progress(f"{engine} k={point.spec.depth}", done, len(runs))
        job = dict(
            plugged=engine == PLUGGED,
            cuda_graph=config.cuda_graph,
            rounds=rounds,
            warmup=config.warmup,
            max_tokens=config.max_tokens,
            spare=point.spec.depth + 1,
            temperature=config.temperature,
            seed=config.seed,
            engine=dict(
                model=str(target.folder),
                dtype=target.dtype,
                seed=config.seed,
                max_model_len=longest,
                max_num_seqs=max(config.num_requests),
                enable_prefix_caching=False,  # every repeat reads its prompts
                disable_log_stats=False,  # the counters
                skip_tokenizer_init=True,
                load_format="dummy" if config.weights == "dummy" else "auto",
                speculative_config=None if point.plain else speculative_config(config, method, point),
            ),
        )
        answers[which, engine] = in_a_process(job, folder, forced)
    return answers


def speculative_config(config: BenchConfig, method: Mapping[str, Any], point: bench.Point) -> dict[str, Any]:
    """vLLM's speculative_config of one line; a synthetic law goes in as its rates by position."""
    found = {**method, "num_speculative_tokens": point.spec.depth}
    if point.law is not None:
        found |= dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=list(point.law.survival))
    elif config.rejection_sample_method != "auto":
        found["rejection_sample_method"] = config.rejection_sample_method
    return found


def in_a_process(job: Mapping[str, Any], folder: Path, forced_routing: bool = False) -> dict[str, Any]:
    """A child's answer. One that ends without an answer is an answer with its last words as the error."""
    asked, answer, log = (folder / name for name in ("asked.json", "answer.json", "log"))
    asked.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    variables = os.environ | {
        plugin.SWITCH: "1" if job["plugged"] else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is stepped from here
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled at first use, where there is a compiler
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    if forced_routing:
        variables["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    code = "from eval.bench_vllm import child; child()"
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code, str(asked), str(answer)],
            env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if answer.exists():
        return json.loads(answer.read_text())
    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing said"])[-1]
    return dict(error=f"vLLM's process ended with code {done.returncode}: {last[:300]}")


# ---------------------------------------------------------------------------------------------------------- the child


def child() -> None:
    """In a process of its own, with the plugin's switch set for it: sys.argv names the job and where its answer goes."""
    asked, answer = map(Path, sys.argv[1:])
    try:
        found = run_job(json.loads(asked.read_text()))
    except Exception as error:  # whatever vLLM raises is the answer
        found = dict(error=" ".join(f"{error}".split())[:500] or type(error).__name__)
    answer.write_text(json.dumps(found))


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """One engine, all its rounds. Returns its device and, by number of requests, [{"events", "counts"}]."""
    from vllm import LLM, ModelRegistry
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    asked = job["engine"]
    if on_cpu and asked["load_format"] == "dummy" and (asked["speculative_config"] or {}).get("method") == "dspark":
        # vLLM's drafter joins its projections at first use, and its CPU layers have packed theirs away by then.
        raise RuntimeError("weights: found dummy with a DSpark drafter on a CPU, allowed: on a GPU, or a checkpoint")
    graphs = not on_cpu if job["cuda_graph"] is None else job["cuda_graph"]
    llm = LLM(**asked, enforce_eager=not graphs)
    module = ModelRegistry.models[plugin.ARCHITECTURE].module_name
    if (module == plugin.MODEL.partition(":")[0]) != job["plugged"]:
        drafter = next((text for part, text in plugin.status() if part.strip() == "drafter"), "")
        wanted = "our" if job["plugged"] else "stock"
        raise RuntimeError(f"asked for {wanted} {plugin.ARCHITECTURE}, {module} runs ({drafter})")
    repeats: dict[str, list[dict[str, Any]]] = {}
    for i, of_sizes in enumerate(job["rounds"]):
        for prompts in of_sizes:
            run = run_once(llm, prompts, job, i)
            if i >= job["warmup"]:
                repeats.setdefault(str(len(prompts)), []).append(run)
    return dict(device="cpu" if on_cpu else "cuda", cuda_graph=graphs and not on_cpu, repeats=repeats)


def run_once(llm: Any, prompts: Sequence[list[int]], job: Mapping[str, Any], repeat: int) -> dict[str, Any]:
    """All requests from submission until each has `max_tokens` tokens; a step is never cut, as in `bench.run_once`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, before = llm.llm_engine, counters(llm)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=job["temperature"], max_tokens=job["max_tokens"] + job["spare"], ignore_eos=True,
            seed=(job["seed"] << 32) + (repeat << 16) + i, detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine.add_request(f"{repeat}.{len(prompts)}.{i}", dict(prompt_token_ids=prompt), params)
    written = [0] * len(prompts)
    events: list[Event] = []
    last = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        tokens = [0] * len(prompts)
        for output in outputs:
            tokens[int(output.request_id.rpartition(".")[2])] += len(output.outputs[0].token_ids)
        if not any(tokens):
            continue  # nothing came back yet: its time is that of the step that it belongs to
        events.append((1e3 * (now - last), tokens))
        last = now
        written = [a + b for a, b in zip(written, tokens)]
        enough = [f"{repeat}.{len(prompts)}.{i}" for i, n in enumerate(written) if tokens[i] and n >= job["max_tokens"]]
        if enough:
            engine.abort_request(enough)
    after = counters(llm)
    difference = {
        name: [a - b for a, b in zip(value, before.get(name) or [0] * len(value))]
        if isinstance(value, list)
        else value - before.get(name, 0)
        for name, value in after.items()
    }
    return dict(events=events, counts=difference)


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of speculation since the engine's start."""
    return {m.name: m.values if m.name == BY_POSITION else m.value for m in llm.get_metrics() if m.name in COUNTERS}
