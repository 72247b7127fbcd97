"""The `dspark` command. Help and config checks answer without importing torch: each command imports what it needs."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from dspark_runtime.errors import DsparkError
from verify_kernels.errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eval.schema import BenchConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Speculative decoding: measure it, check it, run it.",
)

UsageError = typer.BadParameter.__mro__[1]  # bad options, whichever parser this typer brings

Target = Annotated[
    Optional[str],
    typer.Option(help="smollm2 (fetched once), a folder or hub id, a .gguf file, or an architecture YAML."),
]
Drafter = Annotated[Optional[str], typer.Option(help="ngram, none, draft:NAME (a target), draft:self, or a folder.")]
K = Annotated[Optional[str], typer.Option("-k", "--num-speculative-tokens", help="Drafts in a row: 0-7 or 0,3,7.")]
Tree = Annotated[Optional[str], typer.Option(help="Names of configs/trees, or YAML files, separated by commas.")]
Device = Annotated[Optional[str], typer.Option(help="auto, cpu, cuda, cuda:1.")]
Dtype = Annotated[Optional[str], typer.Option(help="auto, float32, bfloat16, float16.")]
Weights = Annotated[Optional[str], typer.Option(help="auto, or dummy: seeded random weights, for timing.")]
Backend = Annotated[
    Optional[str],
    typer.Option(help="Kernels: auto (this project's own), unmeasured (also those not yet run on a GPU), reference."),
]
Method = Annotated[
    Optional[str],
    typer.Option("--rejection-sample-method", help="Acceptance rule; auto picks one that fits the drafter."),
]
Seed = Annotated[Optional[int], typer.Option(help="Everything random follows from it.")]
Schedule = Annotated[
    Optional[str],
    typer.Option(
        "--scheduler",
        help="What is verified of the drafts: none, fixed:N, threshold:P, budget:TOKENS, early-stop:CURVE.json, "
        "async:CURVE.json; fixed and threshold also take dspark tune's JSON.",
    ),
]
Routing = Annotated[
    Optional[str],
    typer.Option(
        help="Experts of an MoE target in a synthetic run: uniform (the default with dummy weights), zipf:A, "
        "trace:FILE of dspark trace-routing, or model: the router's own.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]

# A flag takes the place of these fields of a recipe as well: each group says one thing in several ways.
_ACCEPTANCE = ("acceptance_length", "synthetic_acceptance_rates", "synthetic_acceptance_trace")
_REPLACES = {
    **dict.fromkeys(_ACCEPTANCE, _ACCEPTANCE),
    "tree": ("num_speculative_tokens",),
    "context_len": ("prompts",),
    "prompts": ("context_len",),
    "speculative_config": ("drafter", "num_speculative_tokens", "tree"),
}


def recipe(file: Path | None, flags: dict[str, object]) -> BenchConfig:
    """The effective recipe: the file (or the default one if nothing is asked for), overridden by the flags given."""
    from eval.schema import bench_config

    flags = {name: value for name, value in flags.items() if value is not None}
    base: dict[str, object] = {}
    if file is not None or not flags.keys() - {"engine"}:
        from dspark_runtime.configs import read_yaml
        from eval.recipes import DEFAULT

        file = file or DEFAULT
        base = read_yaml(file)
        bench_config(base, str(file))
    for name in flags:
        for other in _REPLACES.get(name, ()):
            base.pop(other, None)
    return bench_config(base | flags)


def progress_bar(quiet: bool) -> tuple[Callable[[str, int, int], None], Callable[[], None]]:
    """(report, close): a bar on stderr, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        return (lambda text, done, total: None), (lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Drawn between measurements only: a refreshing thread would take its share of the time that is measured.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.start()
    task = bar.add_task("starting", total=1)

    def report(text: str, done: int, total: int) -> None:
        bar.update(task, description=text, completed=done, total=total, refresh=True)

    return report, bar.stop


@app.command()
def bench(
    context_of_call: typer.Context,
    target: Target = None,
    drafter: Drafter = None,
    k: K = None,
    tree: Tree = None,
    scheduler: Schedule = None,
    num_requests: Annotated[
        Optional[str], typer.Option("-b", "--num-requests", help="Requests at once: 1,8,32.")
    ] = None,
    al: Annotated[
        Optional[str],
        typer.Option("--al", help="Synthetic AL, bonus token included: 3.24 or 2,3,4; 'real' is the drafter's own."),
    ] = None,
    al_law: Annotated[Optional[str], typer.Option(help="min_variance (as in vLLM) or geometric.")] = None,
    rates: Annotated[
        Optional[str], typer.Option(help="Synthetic unconditional rates by position: 0.9,0.7,0.4.")
    ] = None,
    trace: Annotated[
        Optional[str], typer.Option(help="Synthetic: replay the acceptance recorded in this JSON file.")
    ] = None,
    context: Annotated[Optional[int], typer.Option(help="Prompts of this many random token ids, not texts.")] = None,
    tokens: Annotated[Optional[int], typer.Option(help="Tokens of each request.")] = None,
    prompts: Annotated[Optional[str], typer.Option(help='JSONL file, {"turns": [text]} a line.')] = None,
    temperature: Annotated[Optional[float], typer.Option(help="0 is greedy.")] = None,
    method: Method = None,
    routing: Routing = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    quantization: Annotated[Optional[str], typer.Option(help="Of dummy weights: none, fp8 (128 x 128 blocks).")] = None,
    backend: Backend = None,
    cuda_graph: Annotated[Optional[bool], typer.Option(help="Replay steps as CUDA graphs (default: on a GPU).")] = None,
    seed: Seed = None,
    repeats: Annotated[
        Optional[int], typer.Option(help="Measured repeats of every point, each with other prompts.")
    ] = None,
    warmup: Annotated[Optional[int], typer.Option(help="Repeats before them that do not count.")] = None,
    engine: Annotated[
        Optional[str], typer.Option(help="dspark, or vllm: vLLM stock and with the plugin, each in a process of its own.")
    ] = None,
    speculative_config: Annotated[
        Optional[str], typer.Option(help="With --engine vllm: vLLM's JSON, as dspark tune prints it, for --drafter and -k.")
    ] = None,
    rank_of: Annotated[
        Optional[int], typer.Option(help="Measure one rank of this many GPUs, not the whole target (dummy weights).")
    ] = None,
    parallel: Annotated[
        Optional[str], typer.Option(help="Experts of that rank: tp, a slice of each, or ep, some of them.")
    ] = None,
    collectives: Annotated[
        Optional[str], typer.Option(help="Of that rank: modelled, none, or real (all ranks run, under torchrun).")
    ] = None,
    hardware: Annotated[
        Optional[str], typer.Option(help="Machine of configs/hardware whose collectives are modelled.")
    ] = None,
    config: Annotated[Optional[Path], typer.Option(help="Recipe (YAML); flags override it.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl on stdout.")] = "md",
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Also write the run to this file.")] = None,
    plot_file: Annotated[Optional[Path], typer.Option("--plot", help="Also draw it: .svg or .png.")] = None,
    quiet: Quiet = False,
) -> None:
    """Tokens/s of plain and speculative decoding, at real or fixed acceptance length.

    Without any option: SmolLM2 with its shipped drafter, real acceptance and a synthetic length, 1 and 4 requests. Any
    option replaces that recipe; what is not given then takes its own default.
    """
    flags = dict(
        target=target,
        drafter=drafter,
        num_speculative_tokens=k,
        tree=tree,
        scheduler=scheduler,
        num_requests=num_requests,
        acceptance_length=al,
        synthetic_acceptance_law=al_law,
        synthetic_acceptance_rates=rates,
        synthetic_acceptance_trace=trace,
        context_len=context,
        max_tokens=tokens,
        prompts=prompts,
        temperature=temperature,
        rejection_sample_method=method,
        routing=routing,
        device=device,
        dtype=dtype,
        weights=weights,
        quantization=quantization,
        backend=backend,
        cuda_graph=cuda_graph,
        seed=seed,
        repeats=repeats,
        warmup=warmup,
        engine=engine,
        speculative_config=speculative_config,
        rank_of=rank_of,
        parallel=parallel,
        collectives=collectives,
        hardware=hardware,
    )
    from eval import report

    if output not in ("md", "csv", "json", "jsonl"):
        raise DsparkError(f"output: found {output!r}, allowed: md, csv, json, jsonl")
    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise DsparkError(f"plot: found {str(plot_file)!r}, allowed: a file that ends in .svg or .png")
    writable(json=json_file, plot=plot_file)
    settings = recipe(config, flags)
    if settings.rank_of is not None:
        if output not in ("md", "json") or plot_file is not None:
            raise DsparkError("output: found csv, jsonl or a plot with rank_of, allowed: md, json")
        return _bench_rank(settings, context_of_call.obj, output, json_file, quiet)

    if settings.engine == "vllm":
        from eval.bench_vllm import bench_vllm as run_bench
    else:
        from eval.bench import bench as run_bench

    progress, close = progress_bar(quiet)
    try:
        run = run_bench(settings, context_of_call.obj, progress)
    finally:
        close()
    sys.stdout.write(report.render(run, output))
    if json_file is not None:
        write("json", json_file, report.render(run, "json"))
    if plot_file is not None:
        report.plot(run, plot_file)
    if run.interrupted:
        raise typer.Exit(130)
    wrong = [row for row in run.results if row.ran and row.error]
    for row in wrong:
        print(f"dspark: ERROR: {report.full_name(row)}, b={row.num_requests}: {row.error}", file=sys.stderr)
    if wrong:
        raise typer.Exit(1)


def _bench_rank(settings: BenchConfig, command: str, output: str, json_file: Path | None, quiet: bool) -> None:
    from eval import rank

    progress, close = progress_bar(quiet)
    try:
        run = rank.measure_rank(settings, command, progress, lambda text: print(f"dspark: {text}", file=sys.stderr))
    finally:
        close()
    if run.results[0].rank:
        return  # of ranks that all run, the first speaks
    sys.stdout.write(rank.text(run) if output == "md" else run.model_dump_json(indent=1) + "\n")
    if json_file is not None:
        write("json", json_file, run.model_dump_json(indent=1) + "\n")
    wrong = [row.error for row in run.results if row.error]
    for error in wrong:
        print(f"dspark: ERROR: {error}", file=sys.stderr)
    if wrong:
        raise typer.Exit(1)


@app.command()
def compare(a: Path, b: Path) -> None:
    """The points that two `bench --json` files share, and whether they differ by more than their spread."""
    from eval.compare import compare as compare_runs
    from eval.schema import load_run

    sys.stdout.write(compare_runs(load_run(a), load_run(b), str(a), str(b)))


@app.command()
def generate(
    prompt: str,
    target: Target = None,
    drafter: Drafter = None,
    k: K = None,
    tree: Tree = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    method: Method = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    backend: Backend = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Stream a completion; ends with its AL and tokens/s."""
    flags = dict(
        target=target,
        drafter=drafter,
        num_speculative_tokens=k if k is not None or tree is not None else "7",
        tree=tree,
        rejection_sample_method=method,
        device=device,
        dtype=dtype,
        weights=weights,
        backend=backend,
        seed=seed,
    )
    settings = recipe(None, flags)
    if len(settings.num_speculative_tokens) > 1 and not tree or len(settings.tree or ()) > 1:
        raise DsparkError("num_speculative_tokens, tree: found several shapes, allowed: one")
    options = dict(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)

    from eval.generate import generate as run_generate

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write("\n" + run_generate(prompt, settings, options, raw, write) + "\n")


@app.command("eval")
def evaluate(
    context_of_call: typer.Context,
    drafter: Annotated[str, typer.Argument(help="Folder of a drafter checkpoint; ngram or draft:NAME as for bench.")],
    target: Target = None,
    prompts: Annotated[
        Optional[list[str]],
        typer.Option(help='A suite: JSONL file, {"turns": [text]} a line. May be repeated. Default: the project\'s.'),
    ] = None,
    trees: Annotated[
        Optional[str], typer.Option(help="chain, and grown trees of so many nodes: chain,16,32,64.")
    ] = None,
    temperature: Annotated[Optional[str], typer.Option(help="0 is greedy: 0,1.")] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="The trees also with matches of the request's own text.")
    ] = False,
    max_tokens: Annotated[Optional[int], typer.Option(help="End a request after this many tokens.")] = None,
    limit: Annotated[Optional[int], typer.Option(help="So many prompts of each suite.")] = None,
    num_requests: Annotated[
        Optional[int], typer.Option("-b", "--num-requests", help="Requests at once (for acceptance, not for speed).")
    ] = None,
    speed: Annotated[Optional[int], typer.Option(help="Time so many prompts of each suite; 0: none.")] = None,
    scheduler: Schedule = None,
    fit_calibration: Annotated[
        Optional[str],
        typer.Option(help="Fit the confidence's temperatures on this prompt file; writes calibration.json."),
    ] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the rows to this file.")] = None,
    trace_file: Annotated[
        Optional[Path],
        typer.Option("--trace", help="Write every step of the chains to this file (.jsonl), for tune and simulate."),
    ] = None,
    plot_file: Annotated[Optional[Path], typer.Option("--plot", help="Draw survival and AL: .png or .svg.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    backend: Backend = None,
    seed: Seed = None,
    quiet: Quiet = False,
) -> None:
    """AL, acceptance by position, confidence and speed of a drafter on prompts, as chain and as grown trees."""
    import json

    flags = dict(
        target=target,
        drafter=drafter,
        prompts=prompts or None,
        fit_calibration=fit_calibration,
        trees=trees,
        hybrid=hybrid,
        temperature=temperature,
        max_tokens=max_tokens,
        limit=limit,
        num_requests=num_requests,
        speed=speed,
        scheduler=scheduler,
        device=device,
        dtype=dtype,
        weights=weights,
        backend=backend,
        seed=seed,
    )
    from eval.schema import eval_config

    settings = eval_config({name: value for name, value in flags.items() if value is not None})
    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise DsparkError(f"plot: found {str(plot_file)!r}, allowed: a file that ends in .svg or .png")
    writable(json=json_file, trace=trace_file, plot=plot_file)
    if trace_file is not None:
        if settings.scheduler != "none" or "chain" not in settings.trees:
            raise DsparkError("trace: found with a scheduler or without chains, allowed: chains, all of them verified")
        if trace_file.suffix != ".jsonl":
            raise DsparkError(f"trace: found {str(trace_file)!r}, allowed: a file that ends in .jsonl")

    from eval import evaluate_report
    from eval.environment import write_result
    from eval.evaluate import evaluate as run_eval

    progress, close = progress_bar(quiet)
    try:
        found = run_eval(settings, progress)
    finally:
        close()
    evaluate_report.show(found)
    if json_file is not None:
        write_result(json_file, context_of_call.obj, [row.model_dump() for row in found.rows], **found.facts)
    if trace_file is not None:
        write("trace", trace_file, "".join(json.dumps(line) + "\n" for line in found.trace))
    if plot_file is not None:
        evaluate_report.plot(found, plot_file)


@app.command()
def check(
    context_of_call: typer.Context,
    target: Target = None,
    drafter: Drafter = None,
    k: K = None,
    tree: Annotated[Optional[str], typer.Option(help="Tree to check beside the chain.")] = None,
    expect_al: Annotated[
        Optional[float], typer.Option(help="Fail if the AL is further than --tolerance from this.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Allowed distance from --expect-al.")] = 0.1,
    min_al: Annotated[float, typer.Option(help="A drafter below this is called dead and fails.")] = 1.05,
    context: Annotated[
        Optional[int],
        typer.Option(help="Longest context to check a drafter's AL at (default: 512, or past its own short range)."),
    ] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the verdicts to this file.")] = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="float32 demands equal tokens; 16-bit types allow near ties.")] = "float32",
    weights: Weights = None,
    backend: Backend = None,
    seed: Seed = None,
) -> None:
    """Is this pair of target and drafter sound? Exit code 1 if not."""
    flags = dict(
        target=target,
        drafter=drafter,
        num_speculative_tokens="4" if k is None else k,  # not asked for: fewer where the drafter makes fewer
        device=device,
        dtype=dtype,
        weights=weights,
        backend=backend,
        seed=seed,
    )
    settings = recipe(None, flags)
    if len(settings.num_speculative_tokens) > 1 or settings.num_speculative_tokens[0] < 1:
        raise DsparkError(f"num_speculative_tokens: found {k}, allowed: one number from 1 to 63")
    if settings.drafter == "none":
        raise DsparkError("drafter: found none, allowed: the drafter to check")
    if not tolerance >= 0:
        raise DsparkError(f"tolerance: found {tolerance}, allowed: 0 or more")
    if expect_al is not None and not 1 <= expect_al <= 64:
        raise DsparkError(f"expect_al: found {expect_al:g}, allowed: 1 to 64 (the bonus token counts)")
    if not 0 <= min_al <= 64:
        raise DsparkError(f"min_al: found {min_al:g}, allowed: 0 to 64")
    if context is not None and context < 1:
        raise DsparkError(f"context: found {context}, allowed: 1 or more")
    writable(json=json_file)

    from eval.check import check as run_check

    drafts = settings.num_speculative_tokens[0] if k else None
    rows = run_check(settings, drafts, tree, expect_al, tolerance, min_al, context, print)
    if json_file is not None:
        from eval.environment import write_result

        pair = dict(target=settings.target, drafter=settings.drafter)
        write_result(json_file, context_of_call.obj, rows, seed=settings.seed, **pair)
    raise typer.Exit(0 if all(row["passed"] for row in rows) else 1)


@app.command()
def train(
    recipe_file: Annotated[str, typer.Argument(metavar="RECIPE", help="A name of configs/train, or a YAML file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run; an unfinished run in it goes on.")],
    prompts: Annotated[
        Optional[list[Path]], typer.Option(help='JSONL of user turns, {"turns": [text]} a line; may be repeated.')
    ] = None,
    evaluation: Annotated[
        Optional[list[Path]], typer.Option(help="JSONL of evaluation prompts, never trained on; may be repeated.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer side by side on one device.")] = 1,
    stop_after: Annotated[str, typer.Option(help="prompts, answers or training.")] = "training",
    minutes: Annotated[
        Optional[float], typer.Option(min=0, help="Of training in this call; the run can go on later.")
    ] = None,
    init: Annotated[Optional[Path], typer.Option(help="Drafter checkpoint to start from.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a DSpark drafter: prompts, the target's own answers, then the drafter in OUT/training/drafter."""
    import json

    from training.config import load_train_config
    from training.run import train as run_train

    report, close = progress_bar(quiet)
    try:
        summary = run_train(
            load_train_config(recipe_file), out, report, prompts=prompts or (), evaluation=evaluation or (),
            device=device or "auto", dtype=dtype or "auto", workers=workers, stop_after=stop_after,
            seconds=None if minutes is None else minutes * 60, init=init,
        )  # fmt: skip
    finally:
        close()
    print(json.dumps(summary, indent=1))


@app.command("trace-routing")
def trace_routing(
    context_of_call: typer.Context,
    out: Annotated[Path, typer.Argument(help="File to write (.safetensors), for dspark bench --routing trace:FILE.")],
    target: Target = None,
    prompts: Annotated[Optional[str], typer.Option(help='JSONL file, {"turns": [text]} a line.')] = None,
    limit: Annotated[Optional[int], typer.Option(min=1, help="So many prompts.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 256,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    quiet: Quiet = False,
) -> None:
    """Record which experts an MoE target picks for every token of its answers."""
    if out.suffix != ".safetensors":
        raise DsparkError(f"out: found {str(out)!r}, allowed: a file that ends in .safetensors")
    if not out.parent.is_dir():
        raise DsparkError(f"out: folder {out.parent} does not exist")
    writable(out=out)
    flags = dict(target=target, drafter="none", prompts=prompts, max_tokens=tokens, device=device, dtype=dtype, backend=backend)
    settings = recipe(None, flags)

    from eval.trace_routing import record

    progress, close = progress_bar(quiet)
    try:
        text = record(settings, limit, out, context_of_call.obj, progress)
    finally:
        close()
    sys.stdout.write(text)


@app.command()
def doctor() -> None:
    """What this machine has, and what a run would use."""
    from eval.doctor import doctor as facts

    sys.stdout.write(facts())


@app.command()
def reproduce(
    context_of_call: typer.Context,
    name: Annotated[
        Optional[str], typer.Argument(help="An entry of configs/reported, or entry/point, or a YAML file.")
    ] = None,
    al: Annotated[Optional[float], typer.Option("--al", help="What if: this acceptance length.")] = None,
    gpus: Annotated[Optional[int], typer.Option(help="What if: this many GPUs, tensor parallel.")] = None,
    hardware: Annotated[Optional[str], typer.Option(help="What if: another machine of configs/hardware.")] = None,
    tokens: Annotated[Optional[int], typer.Option(help="What if: verify this many tokens a request and step.")] = None,
    tree: Annotated[Optional[str], typer.Option(help="What if: verify a tree of configs/trees.")] = None,
    num_requests: Annotated[
        Optional[int], typer.Option("-b", "--num-requests", help="What if: requests at once.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Also measure the nearest shape that fits this machine.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="md or json on stdout.")] = "md",
    plot_file: Annotated[Optional[Path], typer.Option("--plot", help="Draw the entry: .svg or .png.")] = None,
    report_file: Annotated[Optional[Path], typer.Option("--report", help="Everything as one HTML page.")] = None,
) -> None:
    """Reported tokens/s against floor, measured kernels and what was fitted. Needs no torch (but for --run)."""
    from eval import reproduce as room

    what = room.WhatIf(al=al, gpus=gpus, hardware=hardware, tokens=tokens, tree=tree, requests=num_requests)
    room.check_options(name, what, run, output, plot_file)
    writable(plot=plot_file, report=report_file)
    if output == "json":
        sys.stdout.write(room.as_json(name, what))
    else:
        sys.stdout.write(room.one_text(name, what) if name else room.all_text())
    if plot_file is not None or report_file is not None:
        from eval import reproduce_page

        if plot_file is not None:
            reproduce_page.plot(room.changed(room.find_row(name), what), plot_file)
        if report_file is not None:
            write("report", report_file, reproduce_page.page())
    if run:
        sys.stdout.write(room.measured(room.changed(room.find_row(name), what), context_of_call.obj))


@app.command()
def kernels(
    action: Annotated[str, typer.Argument(help="list, build, check or bench; the last two need a GPU.")],
    target: Annotated[str, typer.Option(help="Architectures or targets that are meant, separated by commas.")] = "qwen3-8b",
    drafter: Annotated[
        Optional[str], typer.Option(help="list, build: a DSpark, DFlash or EAGLE-3 drafter of theirs, as bench takes it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    page_size: Annotated[int, typer.Option(help="16, 32, 64 or 128.")] = 16,
    rank_of: Annotated[Optional[int], typer.Option(help="list, build: of one rank of this many GPUs.")] = None,
    parallel: Annotated[str, typer.Option(help="Experts of that rank: tp, a slice of each, or ep, some of them.")] = "tp",
    quantization: Annotated[Optional[str], typer.Option(help="list, build: of the targets' checkpoints, fp8.")] = None,
    folder: Annotated[Optional[Path], typer.Option(help="Where libraries lie (default: DSPARK_KERNEL_CACHE or the cache).")] = None,
    jobs: Annotated[int, typer.Option(help="Compiler processes.")] = 2,
    cases: Annotated[int, typer.Option(help="Random batches of check, for each target.")] = 40,
    quiet: Quiet = False,
) -> None:
    """CuTe DSL kernels for Hopper: which ones a model needs, compile them ahead of time, check and time them."""
    if dtype not in ("bfloat16", "float16"):
        raise DsparkError(f"dtype: found {dtype!r}, allowed: bfloat16, float16")
    for name, value in (("jobs", jobs), ("cases", cases)):
        if value < 1:
            raise DsparkError(f"{name}: found {value}, allowed: 1 or more")
    if action not in ("list", "build", "check", "bench"):
        raise DsparkError(f"action: found {action!r}, allowed: list, build, check, bench")

    from eval import kernels as run

    targets, asked = target.split(","), (dtype, page_size, folder)
    part = dict(rank_of=rank_of, parallel=parallel, quantization=quantization)
    progress, close = progress_bar(quiet)
    try:
        if action == "list":
            text = run.listing(targets, drafter, *asked, **part)
        elif action == "build":
            text = run.build(targets, drafter, *asked, jobs, progress, **part)
        elif action == "check":
            text = run.check(targets, *asked, cases, progress)
        else:
            text = run.bench(targets, *asked, progress)
    finally:
        close()
    sys.stdout.write(text)


@app.command()
def profile(
    context_of_call: typer.Context,
    target: Target = None,
    drafter: Drafter = None,
    k: K = None,
    tree_tokens: Annotated[
        Optional[str], typer.Option(help="Sizes of trees, root included: 8,16,32 (default, but not for ngram); 0: none.")
    ] = None,
    num_requests: Annotated[Optional[str], typer.Option("-b", "--num-requests", help="Requests at once: 1,8,32.")] = None,
    context: Annotated[str, typer.Option(help="Tokens in the cache of each request: 1024 or 1024,8192.")] = "256",
    hardware: Annotated[
        Optional[str],
        typer.Option(help="Measure nothing: the performance model's curve of this machine of configs/hardware."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --hardware: GPUs, tensor parallel.")] = 1,
    between: Annotated[
        str, typer.Option(help="Cost of sizes that were not measured: step (the next one's), linear, or auto (step with CUDA graphs).")
    ] = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens of each request; a timed step emits two.")] = 24,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    backend: Backend = None,
    cuda_graph: Annotated[Optional[bool], typer.Option(help="Replay steps as CUDA graphs (default: on a GPU).")] = None,
    seed: Seed = None,
    repeats: Annotated[Optional[int], typer.Option(help="Measured repeats of every point.")] = None,
    warmup: Annotated[Optional[int], typer.Option(help="Repeats before them that do not count.")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the curve to this file, for dspark tune.")] = None,
    quiet: Quiet = False,
) -> None:
    """What a step costs here by drafts, tree size, requests and context: the curve for dspark tune."""
    from eval.profile import options, predicted, text

    flags = dict(
        target=target,
        drafter=drafter,
        num_speculative_tokens=k,
        num_requests=num_requests,
        max_tokens=tokens,
        device=device,
        dtype=dtype,
        weights=weights,
        backend=backend,
        cuda_graph=cuda_graph,
        seed=seed,
        repeats=repeats,
        warmup=warmup,
    )
    asked = options(flags, hardware, context, tree_tokens, between, tp)
    writable(json=json_file)
    if hardware is not None:
        curve = predicted(asked, hardware, tp, context_of_call.obj)
    else:
        from eval.profile import profile as run_profile

        settings = recipe(None, flags)
        progress, close = progress_bar(quiet)
        try:
            curve = run_profile(settings, asked.contexts, asked.tree_tokens, between, context_of_call.obj, progress)
        finally:
            close()
    sys.stdout.write(text(curve))
    if json_file is not None:
        write("json", json_file, curve.model_dump_json(indent=1) + "\n")


@app.command()
def tune(
    context_of_call: typer.Context,
    curve: Annotated[Path, typer.Argument(help="A curve of dspark profile --json.")],
    acceptance: Annotated[
        Optional[Path], typer.Option(help="dspark eval --json, a file of suites, or a trace of steps (.jsonl).")
    ] = None,
    rates: Annotated[
        Optional[str], typer.Option(help="Conditional rates by position, each given that all before were accepted: 0.8,0.7.")
    ] = None,
    survival: Annotated[
        Optional[str], typer.Option(help="Unconditional rates by position, as vLLM logs them: 0.8,0.56.")
    ] = None,
    steps: Annotated[Optional[int], typer.Option(help="Steps that typed rates rest on (default: taken as exact).")] = None,
    suite: Annotated[Optional[str], typer.Option(help="Only this suite of the file.")] = None,
    temperature: Annotated[Optional[float], typer.Option(help="Of the evaluation's chains (default: its first).")] = None,
    num_requests: Annotated[
        Optional[str], typer.Option("-b", "--num-requests", help="Requests at once (default: the curve's).")
    ] = None,
    context: Annotated[Optional[int], typer.Option(help="Tokens in the cache (default: the curve's longest).")] = None,
    latency: Annotated[Optional[float], typer.Option(help="Most milliseconds per token of a user.")] = None,
    trees: Annotated[bool, typer.Option(help="Trees beside chains.")] = True,
    drafter: Annotated[
        Optional[str], typer.Option(help="Checkpoint that recipe and vLLM load (default: the curve's drafter).")
    ] = None,
    other_machine: Annotated[
        bool, typer.Option("--other-machine", help="Take a curve that was measured elsewhere; every output says so.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run the top choices here: predicted against measured.")] = False,
    top: Annotated[int, typer.Option(min=1, help="With --measure: shapes for each number of requests.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="With --measure: repeats.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="With --measure: tokens of each request.")] = 48,
    device: Annotated[str, typer.Option(help="With --measure: auto, cpu, cuda, cuda:1.")] = "auto",
    yaml_file: Annotated[Optional[Path], typer.Option("--yaml", help="Write a recipe for dspark bench --config.")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write everything to this file.")] = None,
    plot_file: Annotated[Optional[Path], typer.Option("--plot", help="Draw it: .svg or .png.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Draft length, tree and whether to speculate, by tokens/s: from a cost curve and acceptance rates."""
    from eval import tune as room
    from eval import tune_report

    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise DsparkError(f"plot: found {str(plot_file)!r}, allowed: a file that ends in .svg or .png")
    writable(yaml=yaml_file, json=json_file, plot=plot_file)
    asked = room.Asked(
        curve, acceptance, rates, survival, steps, suite, temperature, room.requests(num_requests), context, latency,
        drafter, trees, other_machine, measure, seed,
    )  # fmt: skip
    found = room.find(asked, context_of_call.obj)
    written = room.write_recipe(found, yaml_file) if yaml_file is not None else []
    sys.stdout.write(tune_report.text(found))
    if written:
        print("Wrote " + ", ".join(map(str, written)) + f": dspark bench --config {yaml_file}")
    if plot_file is not None:
        tune_report.plot(found, plot_file)
    measured = []
    if measure:
        progress, close = progress_bar(quiet)
        try:
            measured = room.measure(found, top, repeats, tokens, device, progress)
        finally:
            close()
        sys.stdout.write("\n" + tune_report.measured_text(measured))
    if json_file is not None:
        write("json", json_file, room.as_json(found, measured))


@app.command()
def simulate(
    context_of_call: typer.Context,
    curve: Annotated[Path, typer.Argument(help="A curve of dspark profile --json.")],
    acceptance: Annotated[
        Optional[Path], typer.Option(help="A trace of steps (.jsonl), dspark eval --json, or a file of suites.")
    ] = None,
    rates: Annotated[
        Optional[str], typer.Option(help="Conditional rates by position, each given that all before were accepted: 0.8,0.7.")
    ] = None,
    survival: Annotated[
        Optional[str], typer.Option(help="Unconditional rates by position, as vLLM logs them: 0.8,0.56.")
    ] = None,
    suite: Annotated[Optional[str], typer.Option(help="Only this suite of the file.")] = None,
    temperature: Annotated[Optional[float], typer.Option(help="Of the evaluation's chains (default: its first).")] = None,
    spread_requests: Annotated[
        Optional[float], typer.Option(help="Rates differ between requests: standard deviation of the logit (default 0.5).")
    ] = None,
    spread_drafts: Annotated[
        Optional[float], typer.Option(help="And between drafts of a request (default 1.5).")
    ] = None,
    confidence: Annotated[
        str, typer.Option(help="head: the drafter knows each draft's chance, or the trace says it; none: estimated online.")
    ] = "head",
    k: Annotated[
        Optional[str],
        typer.Option("-k", "--num-speculative-tokens", help="Fixed lengths: 1,5 (default: 1 and the longest)."),
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(help="On the longest of them: async, early-stop (this curve's, or with :CURVE.json), threshold:P, "
                     "budget:TOKENS, fixed:N, separated by commas; none."),
    ] = "async",
    num_requests: Annotated[
        Optional[str], typer.Option("-b", "--num-requests", help="Closed loop: so many users (default: the curve's).")
    ] = None,
    rate: Annotated[Optional[str], typer.Option(help="Poisson: requests a second, 2,4,8.")] = None,
    trace: Annotated[
        Optional[Path], typer.Option(help='JSONL, {"arrival": 0.5, "prompt": 900, "output": 120} a line; docs/simulate.md.')
    ] = None,
    requests: Annotated[
        Optional[int], typer.Option(help="Requests of each load (default: 20 a user and at least 400; 2000 at a rate).")
    ] = None,
    prompt: Annotated[
        Optional[str], typer.Option(help="Tokens, 512 or 64-448 (uniform); default: the curve's longest context.")
    ] = None,
    output_tokens: Annotated[str, typer.Option("--output", help="Tokens, likewise.")] = "64-448",
    max_num_requests: Annotated[
        Optional[int], typer.Option(help="Most requests at once; others wait (default: the curve's most).")
    ] = None,
    prefill_rate: Annotated[
        Optional[float],
        typer.Option(help="Prompt tokens a second; inf: prompts are computed elsewhere (default: as the curve's largest pass)."),
    ] = None,
    max_prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens of one pass.")] = 1024,
    gpus: Annotated[Optional[int], typer.Option(min=1, help="That the curve is of (default: what it says, or 1).")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write everything to this file.")] = None,
    plot_file: Annotated[Optional[Path], typer.Option("--plot", help="Draw it: .svg or .png.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Serving simulated on a cost curve: throughput against interactivity, plain, with fixed lengths and schedules."""
    from eval import simulate as room
    from eval import simulate_report
    from eval.tune import Asked as Rates

    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise DsparkError(f"plot: found {str(plot_file)!r}, allowed: a file that ends in .svg or .png")
    writable(json=json_file, plot=plot_file)
    accepted = Rates(curve, acceptance, rates, survival, None, suite, temperature)
    spreads = dict(spread_requests=spread_requests, spread_drafts=spread_drafts)
    asked = room.Asked(
        curve, accepted, confidence=confidence, k=k, scheduler=scheduler, num_requests=num_requests, rate=rate,
        trace=trace, requests=requests, prompt=prompt, output=output_tokens, max_num_requests=max_num_requests,
        prefill_rate=prefill_rate, max_prefill_tokens=max_prefill_tokens, gpus=gpus, seed=seed,
        **{name: value for name, value in spreads.items() if value is not None},
    )  # fmt: skip
    progress, close = progress_bar(quiet)
    try:
        found = room.simulate(asked, context_of_call.obj, progress)
    finally:
        close()
    sys.stdout.write(simulate_report.text(found))
    if json_file is not None:
        write("json", json_file, room.as_json(found))
    if plot_file is not None:
        simulate_report.plot(found, plot_file)


def writable(**outputs: Path | None) -> None:
    """Refuses, before anything runs, an output that cannot be written or would take another one's place."""
    seen: dict[Path, str] = {}
    for name, path in outputs.items():
        if path is None:
            continue
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise DsparkError(f"{name}: found {str(path)!r}, allowed: a file that can be written")
        if (other := seen.setdefault(path.resolve(), name)) != name:
            raise DsparkError(f"{name}: found {str(path)!r}, which is --{other} too, allowed: a file of its own")


def write(name: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise DsparkError(f"{name}: {path}: {error.strerror or error}") from None


@app.command()
def config(file: Path) -> None:
    """Check a YAML file: a recipe, an architecture, a machine, a reported result or a tree. Needs no torch."""
    from eval.recipes import check_file

    print(check_file(file))


def main(argv: list[str] | None = None) -> None:
    """Entry point: every error that a user can act on is one line on stderr and exit code 2."""
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = app(arguments, standalone_mode=False, obj=shlex.join(["dspark", *arguments]))
        sys.stdout.flush()
    except OSError as error:  # files that an option names are checked where they are opened
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        message = f"output: {error.strerror}"
        sys.stdout = open(os.devnull, "w")  # what is left in the buffer has nowhere to go
    except DsparkError as error:
        message = str(error)
    except UsageError as error:
        message = error.format_message()
    except KernelError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    print("dspark: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
