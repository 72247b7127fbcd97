"""Is the simulator right? Its throughput and P90 beside a real closed loop of the engine on this machine.

    python -m eval.simulate_check [-b 1,4,16] [-k 4] [--repeats 3] [--json FILE]

Every repeat measures the step-cost curve, then serves the same requests at each number of users plainly, with k drafts
and with the `async` schedule, then simulates them with that curve, the prefill rate of those runs, and the acceptance
of the run with k drafts, whose steps are played again. Needs a quiet machine: one that slows down between the curve
and the runs is a wrong prediction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_runtime.engine import Engine
    from dspark_runtime.simulation.simulator import Run
    from dspark_runtime.simulation.workload import Workload
    from dspark_runtime.tuning.acceptance import Suite
    from dspark_runtime.tuning.curve import Curve
    from eval.schema import BenchConfig

CONTEXTS = (32, 192)
"""Of the curve: about the shortest and the longest of the project's mixed prompts with their answers."""
PROFILED = 12
"""Tokens of each request in a timed run of the curve."""
SEEDS = 10
"""Simulations, whose median counts: which recorded request a simulated one plays is drawn."""


def serve(engine: Engine, prompts: Sequence[list[int]], outputs: Sequence[int], users: int) -> dict[str, float]:
    """A closed loop of users, by the clock. Raises DsparkError if a request fails."""
    import numpy as np

    from dspark_runtime.errors import DsparkError
    from dspark_runtime.sampling import SamplingParams

    waiting = list(zip(prompts, outputs))[::-1]
    ready: dict[int, float] = {}
    rates = []

    def send() -> None:
        if waiting:
            prompt, tokens = waiting.pop()
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            ready[engine.submit(prompt, params)] = time.perf_counter()

    engine.records.clear()
    engine.prefill_ms.clear()
    start = time.perf_counter()
    for _ in range(users):
        send()
    while engine.has_work:
        done = [output for output in engine.step() if output.finish_reason]
        now = time.perf_counter()
        for output in done:
            if output.finish_reason == "error":
                raise DsparkError(f"request {output.request_id}: {output.error}")
            rates.append(len(output.token_ids) / (now - ready.pop(output.request_id)))
            send()
    seconds = time.perf_counter() - start
    steps = engine.records
    emitted, pairs = (sum(map(f, steps)) for f in (lambda r: sum(r.emitted), lambda r: r.num_requests))
    return dict(
        output_throughput=sum(outputs) / seconds, per_user_p90=float(np.percentile(rates, 10)),
        acceptance_length=emitted / pairs, verified_tokens=sum(r.verified_tokens for r in steps) / pairs,
        step_ms=float(np.mean([r.ms["total"] for r in steps])), prefill_ms=sum(engine.prefill_ms),
        between_ms=1e3 * seconds - sum(r.ms["total"] for r in steps) - sum(engine.prefill_ms),
    )  # fmt: skip


def simulated(run: Run) -> dict[str, float]:
    """The same numbers of a simulation: all requests, from ready to the end."""
    import numpy as np

    rates = run.workload.output / (run.ended - run.ready)
    pairs = run.requests.sum()
    return dict(
        output_throughput=float(run.emitted.sum() / run.step_end[-1]), per_user_p90=float(np.percentile(rates, 10)),
        acceptance_length=float(run.emitted.sum() / pairs), verified_tokens=float(run.tokens.sum() / pairs),
        step_ms=float(run.step_ms.mean()), prefill_ms=run.prefill_ms,
    )  # fmt: skip


def recorded(engine: Engine) -> Suite:
    """The engine's steps as a trace."""
    import numpy as np

    from dspark_runtime.tuning.acceptance import Suite

    lines = [(a, d, i) for r in engine.records for a, d, i in zip(r.accepted, r.drafted, r.request_ids)]
    accepted, drafted, requests = np.array(lines).T
    survival = tuple(float((accepted >= i).mean()) for i in range(1, engine.spec.depth + 1))
    return Suite("run", survival, len(lines), accepted=accepted, drafted=drafted, requests=requests)


def workload(prompts: Sequence[list[int]], outputs: Sequence[int], users: int) -> Workload:
    """What `serve` sends."""
    import numpy as np

    from dspark_runtime.simulation.workload import Workload

    n = len(prompts)
    zeros = np.zeros(n)
    return Workload(
        f"{users} users", zeros, np.maximum(np.arange(n) - users, -1), zeros, np.array([len(p) for p in prompts]),
        np.array(outputs), np.zeros(n, dtype=np.int64),
    )  # fmt: skip


def check(config: BenchConfig, k: int, users: Sequence[int], requests: int, repeats: int) -> list[dict[str, object]]:
    """A row for each repeat, number of users and line."""
    import numpy as np

    from drafters.topology import TreeSpec
    from dspark_runtime.engine import Engine
    from dspark_runtime.prompts import encode, load_prompts
    from dspark_runtime.scheduling.policies import Lagged
    from dspark_runtime.scheduling.scheduler import Scheduler
    from dspark_runtime.simulation.acceptance import Recorded
    from dspark_runtime.simulation.simulator import System, simulate
    from eval import bench
    from eval.profile import profile

    target = bench.load(config.target, config)
    drafter = bench.make_drafter(config.drafter, target, config)
    texts = load_prompts(config.prompts).texts
    rng = np.random.default_rng(config.seed)
    rows = []
    for repeat in range(repeats):
        timed = config.model_copy(update=dict(max_tokens=PROFILED))
        curve = profile(timed, CONTEXTS, [], "linear", "", lambda text, done, total: None)
        for b in users:
            chosen = rng.permutation(len(texts))
            count = max(requests, 4 * b)
            prompts = [encode(target.tokenizer, texts[chosen[i % len(texts)]]) for i in range(count)]
            outputs = rng.integers(config.max_tokens // 2, config.max_tokens + 1, count).tolist()
            engine = Engine(target.model, drafter, max_num_requests=b, max_model_len=1024)
            served = workload(prompts, outputs, b)
            trace = None
            for name, depth in (("plain", 0), (f"k={k}", k), (f"async, k={k}", k)):
                policy = Lagged(curve) if name.startswith("async") else None
                engine.configure(TreeSpec.chain(depth), scheduler=Scheduler(policy) if policy else None)
                real = serve(engine, prompts, outputs, b)
                if name == f"k={k}":
                    trace = recorded(engine)
                # A step of plain decoding plays nothing.
                played = Recorded([trace if trace is not None else everywhere_wrong(k)])
                rate = 1e3 * sum(len(p) - 1 for p in prompts) / real["prefill_ms"]
                system = System(curve, depth, policy, b, rate, engine.max_prefill_tokens)
                runs = [simulated(simulate(system, served, played, seed)) for seed in range(SEEDS)]
                model = {field: float(np.median([run[field] for run in runs])) for field in runs[0]}
                rows.append(dict(
                    repeat=repeat, num_requests=b, line=name, requests=count, real=real, simulated=model,
                    throughput_ratio=model["output_throughput"] / real["output_throughput"],
                    p90_ratio=model["per_user_p90"] / real["per_user_p90"],
                ))  # fmt: skip
    return rows


def everywhere_wrong(k: int) -> Suite:
    import numpy as np

    from dspark_runtime.tuning.acceptance import Suite

    zero = np.zeros(1, dtype=np.int64)
    return Suite("none", (0.0,) * k, 1, accepted=zero, drafted=zero + k, requests=zero)


def main(
    target: Annotated[str, typer.Option(help="A target of dspark bench.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="A drafter of dspark bench.")] = "ngram",
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Drafts.")] = 4,
    users: Annotated[str, typer.Option("-b", "--num-requests", help="Users of the closed loops.")] = "1,4,16",
    requests: Annotated[int, typer.Option(help="Requests of each loop, at least; four a user in any case.")] = 16,
    tokens: Annotated[int, typer.Option(help="Output tokens: uniform from half of it.")] = 48,
    repeats: Annotated[int, typer.Option(help="Curves, each with its own runs.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from eval.environment import write_result
    from eval.profile import numbers
    from eval.schema import bench_config

    loads = numbers("num_requests", users, 1)
    config = bench_config(dict(
        target=target, drafter=drafter, num_speculative_tokens=list(range(k + 1)), num_requests=sorted({1, *loads}),
        max_tokens=tokens, repeats=2,
    ))  # fmt: skip
    rows = check(config, k, loads, requests, repeats)
    table = Table("repeat", "users", "line", "tok/s", "simulated", "ratio", "P90/user", "simulated ", "ratio ", "AL",
                  "simulated  ", "step ms", "simulated   ")  # fmt: skip
    for row in rows:
        real, model = row["real"], row["simulated"]
        cells = [f"{x[f]:.1f}" for f in ("output_throughput", "per_user_p90") for x in (real, model)]
        cells[2:2], cells[5:5] = [f"{row['throughput_ratio']:.3f}"], [f"{row['p90_ratio']:.3f}"]
        cells += [f"{x[f]:.2f}" for f in ("acceptance_length", "step_ms") for x in (real, model)]
        table.add_row(str(row["repeat"]), str(row["num_requests"]), row["line"], *cells)
    Console(width=160).print(table)
    if json_file:
        command = f"python -m eval.simulate_check --target {target} --drafter {drafter} -k {k} -b {users}"
        command += f" --requests {requests} --tokens {tokens} --repeats {repeats}"
        write_result(json_file, command, rows, contexts=list(CONTEXTS), seeds=SEEDS)


if __name__ == "__main__":
    typer.run(main)
