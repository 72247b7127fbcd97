"""Decode steps as CUDA graphs: one captured step per batch size, tree and context bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

BUCKET = 512
"""Context lengths are rounded up to this many tokens, so that one graph serves a range of them."""

Result = TypeVar("Result")


@dataclass
class _Captured:
    phases: list[tuple[str, torch.cuda.CUDAGraph]]
    result: object


class GraphCache:
    """Captures `run` on first use of a key and replays it afterwards.

    A step is captured as one graph per phase, back to back on one memory pool, so that its phases can be timed.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._steps)

    def replay(
        self,
        key: Hashable,
        run: Callable[[Callable[[str], None], int], Result],
        longest: int,
        limit: int,
        mutable: tuple[Tensor, ...],
        mark: Callable[[str], None],
    ) -> Result:
        """run(mark, max_seq_len) is the step; `mutable` are the buffers it changes (put back after the warm-up)."""
        bound = min(-(-longest // BUCKET) * BUCKET, limit)
        step = self._steps.get((key, bound))
        if step is None:
            step = self._steps[(key, bound)] = self._capture(run, bound, mutable)
        for phase, graph in step.phases:
            graph.replay()
            mark(phase)
        return step.result

    def _capture(
        self, run: Callable[[Callable[[str], None], int], Result], bound: int, mutable: tuple[Tensor, ...]
    ) -> _Captured:
        saved = [x.clone() for x in mutable]

        def restore() -> None:
            for buffer, before in zip(mutable, saved):
                buffer.copy_(before)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        phases: list[tuple[str, torch.cuda.CUDAGraph]] = []
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first runs allocate constants and pick library kernels
                run(lambda phase: None, bound)
                restore()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)

            def cut(phase: str) -> None:
                nonlocal graph
                graph.capture_end()
                phases.append((phase, graph))
                if phase != "accept":
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=self._pool)

            result = run(cut, bound)
        torch.cuda.current_stream().wait_stream(stream)
        return _Captured(phases, result)
