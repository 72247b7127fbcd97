"""Where a step's time goes: device events on CUDA, the wall clock elsewhere."""

from __future__ import annotations

import time

import torch


class PhaseTimer:
    """Times one step, which begins on the host as this is made: begin_device(), mark(phase) as each phase ends, finish()."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = time.perf_counter()
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def begin_device(self) -> None:
        """The first phase begins."""
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """A phase ends."""
        self._marks.append((phase, self._now()))

    def finish(self, after: float) -> dict[str, float]:
        """Milliseconds of each phase, of everything else ("other", host work) and of the whole step ("total").

        The caller has read the step's results, so the device is done. after: when the step before was finished, in
        `time.perf_counter`'s seconds: a step that began before that counts from there, so that totals add up.
        """
        total = (time.perf_counter() - max(self._start, after)) * 1e3
        ms = {"draft": 0.0, "verify": 0.0, "accept": 0.0}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:]):
            ms[phase] += before.elapsed_time(after) if self._cuda else (after - before) * 1e3
        return {**ms, "other": max(total - sum(ms.values()), 0.0), "total": total}

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
