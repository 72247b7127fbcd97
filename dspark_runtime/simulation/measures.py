"""What a simulated run says in numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_runtime.simulation.simulator import Run

PERCENTILES = (50, 90, 99)
EDGE = 10
"""One request in EDGE at either end is simulated and not counted: the system fills and drains."""


@dataclass(frozen=True)
class Measures:
    """Of the requests and the time in between that count (all of them where there are fewer than EDGE).

    output_throughput: tokens/s of all. output_throughput_per_user {P: tokens/s}: P % of the requests are at least this
    fast, from the end of their prompt to their last token. ttft_ms, queue_ms {P: ms}: P % wait at most so long from
    ready to the first token, and to a row. num_running, verified_tokens (of a request and step, its root included),
    spec_decode_acceptance_length, step_ms: means over the decode steps; running and verified weigh a step by its time
    and its requests. prefill_share, idle_share: of the whole time.
    """

    num_requests: int
    counted: int
    seconds: float
    output_throughput: float
    output_throughput_per_user: dict[int, float]
    ttft_ms: dict[int, float]
    queue_ms: dict[int, float]
    num_running: float
    verified_tokens: float
    spec_decode_acceptance_length: float
    step_ms: float
    prefill_share: float
    idle_share: float


def measures(run: Run) -> Measures:
    count = len(run.ready)
    order = np.argsort(run.ready, kind="stable")
    edge = count // EDGE
    counted = order[edge : count - edge]
    begin, end = (run.ready[counted[0]], run.ready[counted[-1]]) if edge else (0.0, 0.0)
    if end <= begin:  # all came at once
        counted, begin, end = order, 0.0, run.step_end[-1]
    steps = (run.step_end > begin) & (run.step_end <= end)
    if not steps.any():
        steps[:] = True
    emitted = np.interp([begin, end], np.append(0.0, run.step_end), np.append(0, run.emitted.cumsum()))
    ms, requests = run.step_ms[steps], run.requests[steps]
    per_user = run.workload.output[counted] / (run.ended - run.computed)[counted]

    def percentiles(seconds: np.ndarray) -> dict[int, float]:
        return {p: float(1e3 * np.percentile(seconds[counted], p)) for p in PERCENTILES}

    whole = run.step_end[-1]
    return Measures(
        num_requests=count,
        counted=len(counted),
        seconds=float(whole),
        output_throughput=float((emitted[1] - emitted[0]) / (end - begin)),
        output_throughput_per_user={p: float(np.percentile(per_user, 100 - p)) for p in PERCENTILES},
        ttft_ms=percentiles(run.first - run.ready),
        queue_ms=percentiles(run.admitted - run.ready),
        num_running=float(np.average(requests, weights=ms)),
        verified_tokens=float(run.tokens[steps].sum() / requests.sum()),
        spec_decode_acceptance_length=float(run.emitted[steps].sum() / requests.sum()),
        step_ms=float(ms.mean()),
        prefill_share=run.prefill_ms / 1e3 / whole,
        idle_share=max(0.0, 1 - (run.step_ms.sum() + run.prefill_ms) / 1e3 / whole),
    )
