"""The event loop: requests come, wait, are prefilled and decoded as `dspark_runtime.engine` does it, on a clock that a
cost curve moves. Every decode step asks the engine's own `Scheduler` what to verify.

One iteration is one pass. What is known of the running requests lies in numpy arrays of one column a row, which move as
the engine's rows move.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from dspark_runtime.acceptance import Accepted
from dspark_runtime.errors import ConfigError
from dspark_runtime.scheduling.costs import StepCosts
from dspark_runtime.scheduling.policies import Policy
from dspark_runtime.scheduling.scheduler import Scheduler
from dspark_runtime.simulation.acceptance import Acceptance, Drawn
from dspark_runtime.simulation.workload import Workload
from dspark_runtime.tuning.curve import Curve

CPU = torch.device("cpu")
REQUEST, UNCOMPUTED, CONTEXT, LEFT, STEPS = range(5)
"""Lines of the state: the request's number; context tokens that a prefill pass has yet to compute; those in the cache;
output tokens that are missing; decode steps so far. The last token, the root, is no context."""


class State(NamedTuple):
    """What a scheduler reads of `drafters.base.BatchState`."""

    context_lens: Tensor


@dataclass(frozen=True)
class Run:
    """What happened, seconds from 0.

    Of each request [N]: ready; admitted (got a row); computed (its prompt was in the cache); first and ended: end of
    the step with its first and last token. Of each decode step [S]: end, ms, requests, tokens (verified, roots
    included), emitted. prefill_ms: of all prefill passes together.
    """

    workload: Workload
    ready: np.ndarray
    admitted: np.ndarray
    computed: np.ndarray
    first: np.ndarray
    ended: np.ndarray
    step_end: np.ndarray
    step_ms: np.ndarray
    requests: np.ndarray
    tokens: np.ndarray
    emitted: np.ndarray
    prefill_ms: float


@dataclass(frozen=True)
class System:
    """What serves. k: drafts of a request and step (0: plain decoding). policy: None verifies them all.
    prefill_rate: prompt tokens a second of a prefill pass, which takes at least as long as a plain step of one request;
    inf: prompts are computed elsewhere. max_prefill_tokens: of one pass."""

    curve: Curve
    k: int
    policy: Policy | None
    max_num_requests: int
    prefill_rate: float = math.inf
    max_prefill_tokens: int = 1024


@torch.inference_mode()
def simulate(system: System, workload: Workload, acceptance: Acceptance, seed: int = 0) -> Run:
    """Serve the workload to its end. Raises ConfigError for what does not fit together or lies beyond the curve."""
    if system.k > acceptance.depth:
        raise ConfigError(
            f"num_speculative_tokens: found {system.k}, allowed: at most {acceptance.depth}, where acceptance is known"
        )
    if not system.prefill_rate > 0:
        raise ConfigError(f"prefill_rate: found {system.prefill_rate:g}, allowed: more than 0 tokens a second")
    spec, rows, count = TreeSpec.chain(system.k), system.max_num_requests, len(workload)
    costs = StepCosts(system.curve, spec, rows, CPU)
    generations = torch.full((rows,), -1, dtype=torch.int64)
    chooser = None
    moving = [generations.numpy()]
    if system.policy is not None and system.k:
        chooser = Chooser(system, spec, generations, acceptance.has_confidence)
        moving += [buffer.numpy() for buffer in chooser.scheduler.rows]
    acceptance.start(count, np.random.default_rng(seed))

    state = np.zeros((5, rows), dtype=np.int64)
    times = np.full((5, count), math.nan)
    ready, admitted, computed, first, ended = times
    steps: list[tuple[float, float, int, int, int]] = []
    prefill_ms, shortest_ms = 0.0, sum(system.curve.cost(1, 1, 0, system.curve.contexts[0]))
    free_prefill = math.isinf(system.prefill_rate)
    follower = dict(zip(workload.after.tolist(), range(count)))
    follower.pop(-1, None)
    coming = [(float(workload.arrival[i]), i) for i in np.flatnonzero(workload.after < 0).tolist()]
    heapq.heapify(coming)
    waiting: deque[int] = deque()
    fresh: list[int] = []  # running requests without a token yet
    running, entered, now, uncomputed = 0, 0, 0.0, False

    while True:
        while coming and coming[0][0] <= now:
            ready[coming[0][1]] = coming[0][0]
            waiting.append(heapq.heappop(coming)[1])
        while waiting and running < rows:
            i = waiting.popleft()
            context = int(workload.prompt[i]) - 1
            missing = 0 if free_prefill else context - min(context, int(workload.cached[i]))
            state[:, running] = i, missing, context - missing, workload.output[i], 0
            generations[running] = entered
            admitted[i] = now
            if missing:
                uncomputed = True
            else:
                computed[i] = now
            fresh.append(i)
            entered += 1
            running += 1
        if not running:
            if not coming:
                break
            now = coming[0][0]
            continue

        if uncomputed:
            left = state[UNCOMPUTED, :running]
            before = left.cumsum() - left
            chunk = np.minimum(left, (system.max_prefill_tokens - before).clip(min=0))
            ms = max(shortest_ms, 1e3 * int(chunk.sum()) / system.prefill_rate)
            now += ms / 1e3
            prefill_ms += ms
            left -= chunk
            state[CONTEXT, :running] += chunk
            computed[state[REQUEST, :running][(chunk > 0) & (left == 0)]] = now
            uncomputed = bool(left.any())
            continue

        live = state[:, :running]
        drawn = acceptance.draw(live[REQUEST], live[STEPS], system.k)
        limit = np.minimum(live[LEFT] - 1, system.k if drawn.drafted is None else drawn.drafted)
        drafts = chooser is None or chooser.scheduler.drafts(torch.from_numpy(live[CONTEXT]))
        if not drafts:
            kept = np.zeros_like(limit)
        else:
            kept = limit if chooser is None else chooser.verified(drawn, limit, live[CONTEXT])
        emitted = np.minimum(drawn.accepted, kept) + 1
        if drafts and chooser is not None:
            chooser.learn(emitted)
        tokens, context = running + int(kept.sum()), int(live[CONTEXT].sum()) / running
        ms = costs.step_ms(running, tokens, context) if drafts else costs.plain_ms(running, context)
        now += ms / 1e3
        live[CONTEXT] += emitted
        live[LEFT] -= emitted
        live[STEPS] += 1
        steps.append((now, ms, running, tokens, int(emitted.sum())))
        if fresh:
            first[fresh] = now
            fresh.clear()
        if live[LEFT].min():
            continue
        for row in np.flatnonzero(live[LEFT] == 0)[::-1].tolist():
            i = int(state[REQUEST, row])
            ended[i] = now
            if (then := follower.get(i)) is not None:
                heapq.heappush(coming, (max(workload.arrival[then], now + workload.delay[then]), then))
            running -= 1
            if row != running:
                state[:, row] = state[:, running]
                for buffer in moving:
                    buffer[row] = buffer[running]

    columns = np.array(steps).T
    return Run(workload, *times, *columns[:2], *columns[2:].astype(np.int64), prefill_ms)


class Chooser:
    """The engine's scheduler, fed with trees whose tokens mean nothing."""

    def __init__(self, system: System, spec: TreeSpec, generations: Tensor, calibrated: bool) -> None:
        self.scheduler = Scheduler(system.policy)
        self.scheduler.start(spec, generations, calibrated)
        rows = len(generations)
        self._nodes = np.arange(spec.num_nodes)
        self._tokens = np.ones((rows, spec.num_nodes), dtype=np.int64)
        self._parents = np.tile(np.array(spec.parents), (rows, 1))
        self._depth = spec.depth

    def verified(self, drawn: Drawn, limit: np.ndarray, context_lens: np.ndarray) -> np.ndarray:
        """[R] int64: drafts that are verified, at most limit [R]."""
        rows = len(limit)
        tokens, parents = self._tokens[:rows], self._parents[:rows]
        if limit.min() < self._depth:
            inside = self._nodes <= limit[:, None]
            tokens, parents = np.where(inside, tokens, -1), np.where(inside, parents, -1)
        confidence = None
        if drawn.confidence is not None:
            confidence = np.ones((rows, len(self._nodes)), dtype=np.float32)
            confidence[:, 1:] = drawn.confidence
            confidence = torch.from_numpy(confidence)
        tokens, parents, count = map(torch.from_numpy, (tokens, parents, limit + 1))
        tree = DraftTree(tokens, parents, count, self._depth, is_chain=True, confidence=confidence)
        self._tree = self.scheduler.schedule(tree, State(torch.from_numpy(context_lens)))
        return self._tree.num_nodes.numpy() - 1

    def learn(self, emitted: np.ndarray) -> None:
        """What became of those drafts; emitted [R] int64, one more than were accepted."""
        path = self._tree.tokens  # of a chain, only the number of tokens is read
        self.scheduler.observe(self._tree, Accepted(path, path, torch.from_numpy(emitted)))
