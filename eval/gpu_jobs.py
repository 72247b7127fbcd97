"""Jobs for a GPU in a process that may hang or die, one after the other, and a parent that keeps the results.

A job is a dictionary with a name under "job"; the other process runs the method of that name with the rest as arguments.
When a job takes too long or the process dies, the job counts as failed, what it used is left out from then on, and the
next job gets a new process. Results are written after every job.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Job = dict[str, Any]
START_SECONDS = 60.0


def serve(make: Callable[[Callable[[str], None]], Any]) -> None:
    """The other process: jobs come in as lines of JSON, results go out so. make(tell) gives the object that runs them;
    tell(words) says where in a job it is."""
    import torch

    answers = sys.stdout
    sys.stdout = sys.stderr

    def answer(result: Job) -> None:
        print(json.dumps(result), file=answers, flush=True)

    bench = make(lambda at: answer({"at": at}))
    torch.ones(1, device="cuda")
    answer({"ready": torch.cuda.get_device_name()})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = getattr(bench, job.pop("job"))(**job)
            torch.cuda.synchronize()
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answer(result)
        if "failed" in result and "CUDA" in result["failed"]:
            return  # the context may be lost: the next job starts with a new one


class Worker:
    """The other process, as its parent sees it."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.at = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, seconds: float) -> Job | None:
        """The next result; None if the process died or took too long, `at` then says where."""
        deadline = time.monotonic() + seconds
        self.at = ""
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return None
            if line is None:
                self.process.wait()
                return None
            found: Job = json.loads(line)
            if "at" not in found:
                return found
            self.at = found["at"]

    def ask(self, job: Job, seconds: float) -> Job | None:
        try:
            assert self.process.stdin
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self.answer(seconds)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(
    jobs: Iterable[Job],
    command: list[str],
    uses: Callable[[Job], set[str]],
    limit: Callable[[Job], float],
    seconds: float,
    save: Callable[[str, list[Job]], None],
) -> list[Job]:
    """Every job that fits into `seconds`, each {job..., result...}. command: starts the other process; uses(job): what it
    needs, and once it failed or said `bad`, jobs that need any of that are left out; limit(job): its seconds; save(device,
    results) is called after each."""
    deadline = time.monotonic() + seconds
    results: list[Job] = []
    out_of_use: set[str] = set()
    worker: Worker | None = None
    device = ""
    for job in jobs:
        used = uses(job)
        left = deadline - time.monotonic()
        if used & out_of_use or left < 1:
            results.append(job | {"skipped": "its kernel failed before" if left >= 1 else "out of time"})
            continue
        if worker is None or worker.process.poll() is not None:
            worker = Worker(command)
            ready = worker.answer(min(START_SECONDS, left))
            if ready is None:
                worker.stop()
                worker = None
                results.append(job | {"failed": "no process came up on the GPU"})
                continue
            device = ready["ready"]
        start = time.monotonic()
        result = worker.ask(job, min(limit(job), max(left, 1.0)))
        if result is None:
            state = worker.process.poll()
            why = f"the process died with {state}" if state is not None else "took too long"
            result = {"failed": why, "at": worker.at}
            worker.stop()
            worker = None
        if used and ("failed" in result or result.get("bad")):
            out_of_use |= used
            print("BAD", *sorted(used), job, {k: v for k, v in result.items() if k in ("failed", "at", "bad", "errors")}, flush=True)
        results.append(job | result | {"seconds": round(time.monotonic() - start, 3)})
        save(device, results)
    if worker:
        worker.stop()
    save(device, results)
    return results


def graph_us(call: Callable[[], None], replays: int = 9) -> float:
    """Median microseconds of a CUDA graph of call()."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times[2:])[replays // 2]
