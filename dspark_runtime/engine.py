"""The engine: continuous batching of requests over the tensor step in `dspark_runtime.step`.

A request waits, gets a row and pages, has its prompt (all but the last token) put into the cache in chunks, and then
takes part in decode steps until it ends. The last prompt token is the first tree's root, so every emitted token comes
from a verify step. The device state of running request i lives in row i of the engine's buffers.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.base import BatchState, Drafter
from drafters.tree import MAX_NODES, TreeSpec
from dspark_runtime import acceptance
from dspark_runtime.errors import ConfigError, RequestError
from dspark_runtime.graphs import GraphCache
from dspark_runtime.kv_cache import PagePool
from dspark_runtime.models.base import Model
from dspark_runtime.records import StepRecord
from dspark_runtime.request import Request, RequestOutput, TokenLogprob
from dspark_runtime.sampling import SamplingParams, SamplingState
from dspark_runtime.scheduling.scheduler import Scheduler
from dspark_runtime.step import StepResult, decode
from dspark_runtime.synthetic import SyntheticLaw
from dspark_runtime.timing import PhaseTimer
from verify_kernels.batch import SCRATCH_PAGE, PassBatch, slots_of


@dataclass
class _Launched:
    """A decode step that the host has yet to read."""

    requests: list[Request]  # of row i
    result: StepResult
    packed: Tensor  # of the result, on the host once `done` has passed
    done: torch.cuda.Event | None
    timer: PhaseTimer


class Engine:
    """Speculative decoding of many requests with one target and one drafter.

    model: the target. drafter: None decodes plainly. spec: the tree of every step (a chain of k by default; k = 0 is
    plain decoding and leaves the drafter idle). max_num_requests: rows. max_model_len: context limit, at most the
    model's. num_pages: size of the shared KV cache in pages (default: enough for all rows at the context limit).
    max_prefill_tokens: prompt tokens of one prefill pass. rejection_sample_method: "auto" or a name of
    `acceptance.RULES`. synthetic: replaces the acceptance decision by a stated law. detokenize: needed for stop strings
    and for `RequestOutput.text`. cuda_graph: replay captured steps (CUDA only) where every request is greedy and none
    asks for log-probabilities; other batches run the same step uncaptured. async_scheduling: launch a step before the one
    before it has been read, where nothing but a stop token can change what it has to do; outputs and records stay the same
    (off: it has run on no GPU yet). record_confidence: step records hold the drafts' confidences, which costs one more
    read of the device a step. record_experts: they count the experts that each MoE layer met, after the step's time was
    taken. scheduler: trims every step's trees before they are verified (CPU only).

    Raises ConfigError for what does not fit together.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None = None,
        *,
        spec: TreeSpec | None = None,
        max_num_requests: int = 8,
        max_model_len: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        max_prefill_tokens: int = 1024,
        rejection_sample_method: str = "auto",
        synthetic: SyntheticLaw | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
        cuda_graph: bool = False,
        async_scheduling: bool = False,
        record_confidence: bool = False,
        record_experts: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        for field, value in (
            ("max_num_requests", max_num_requests),
            ("page_size", page_size),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{field}: found {value}, allowed: 1 or more")
        limit = model.max_model_len
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise ConfigError(f"max_model_len: found {max_model_len}, allowed: 1 to {limit}, the context limit of {model.name}")
        if drafter is not None and drafter.vocab_size not in (None, model.vocab_size):
            raise ConfigError(
                f"drafter: vocabulary of {drafter.name} has {drafter.vocab_size} entries, expected the {model.vocab_size} of {model.name}"
            )
        if cuda_graph and model.device.type != "cuda":
            raise ConfigError(f"cuda_graph: found device {model.device.type}, allowed: cuda")
        self.model, self.drafter = model, drafter
        self.max_num_requests = max_num_requests
        self.max_model_len = max_model_len or limit
        self.max_prefill_tokens = max_prefill_tokens
        self.detokenize = detokenize
        self.async_scheduling = async_scheduling
        self.record_confidence = record_confidence
        self.record_experts = record_experts

        width = -(-(self.max_model_len + MAX_NODES) // page_size)
        if num_pages is None:
            num_pages = max_num_requests * width + 1
        if num_pages < 2:
            raise ConfigError(f"num_pages: found {num_pages}, allowed: 2 or more (page 0 is reserved)")
        self.pool = PagePool(num_pages, page_size)
        self.cache = model.allocate(num_pages, page_size, max_num_requests)
        if drafter is not None:
            try:
                drafter.allocate(num_pages, page_size, model.device)
            except ValueError as error:
                raise ConfigError(str(error)) from None

        rows, device = max_num_requests, model.device
        # One more column than the longest sequence: padding is written there.
        self._tokens = torch.zeros(rows, self.max_model_len + 1, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(rows, dtype=torch.int64, device=device)
        self._limits = torch.ones(rows, dtype=torch.int64, device=device)
        self._num_outputs = torch.zeros(rows, dtype=torch.int64, device=device)
        self._steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._generations = torch.full((rows,), -1, dtype=torch.int64, device=device)  # one for each stay in a row
        self._page_table = torch.full((rows, width), SCRATCH_PAGE, dtype=torch.int32, device=device)
        self._state_rows = torch.zeros(rows, dtype=torch.int64, device=device)  # of recurrent states: they do not move

        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # running request i owns row i
        self._next_id = 0
        self._next_generation = 0
        self._sampling: SamplingState | None = None  # None: the batch changed
        self._graphs = GraphCache() if cuda_graph else None
        self._ahead: _Launched | None = None  # launched before the step before it was read
        self._finished = 0.0  # when the last step was
        self.records: list[StepRecord] = []
        self.prefill_ms: list[float] = []
        self.num_preemptions = 0
        self.configure(spec or TreeSpec.chain(0), synthetic, rejection_sample_method, scheduler)

    # ------------------------------------------------------------------ configuration

    def configure(
        self,
        spec: TreeSpec | None = None,
        synthetic: SyntheticLaw | None = None,
        rejection_sample_method: str = "auto",
        scheduler: Scheduler | None = None,
    ) -> None:
        """Change tree, synthetic law, acceptance rule and scheduler between runs, without reloading. Only while idle.

        A confidence is taken as it is where the drafter calibrates it, which it does for chains; elsewhere the
        scheduler's own estimator decides what a draft is worth."""
        if self.has_work:
            raise ConfigError("configure: found requests in flight, allowed: only while the engine is idle")
        spec = spec or TreeSpec.chain(0)
        drafter = self.drafter
        if spec.num_drafts and drafter is None:
            raise ConfigError(f"num_speculative_tokens: found {spec.num_drafts} without a drafter, allowed: 0")
        if drafter is not None and spec.num_drafts:
            if spec.depth > drafter.max_depth:
                raise ConfigError(
                    f"num_speculative_tokens: found depth {spec.depth}, allowed: at most {drafter.max_depth} for {drafter.name}"
                )
            if drafter.lookahead > MAX_NODES:
                raise ConfigError(f"drafter: {drafter.name} looks {drafter.lookahead} tokens ahead, allowed: {MAX_NODES}")
            if not spec.is_chain and not drafter.can_tree:
                raise ConfigError(f"tree: {drafter.name} drafts chains only")
        self._can_sample = drafter is not None and drafter.can_sample and rejection_sample_method != "node"
        self._rule = acceptance.choose_rule(rejection_sample_method, spec, self._can_sample)
        # Rule N wants the best children, not sampled ones.
        self._can_sample = self._can_sample and self._rule != "node"
        if synthetic is not None and synthetic.depth != spec.depth:
            raise ConfigError(f"synthetic: made for depth {synthetic.depth}, expected the tree's depth {spec.depth}")
        if scheduler is not None:
            if self.model.device.type != "cpu":
                device = self.model.device.type
                # A GPU's pass is as wide as the widest tree could be, so that trimming would save nothing.
                raise ConfigError(f"scheduler: found device {device}, allowed: cpu (not built elsewhere)")
            if synthetic is not None:
                raise ConfigError("scheduler: found with a synthetic law, allowed: real acceptance")
            calibrated = spec.is_chain and bool(getattr(drafter, "temperatures", ()))
            scheduler.start(spec, self._generations, calibrated)
        self.spec, self.synthetic, self.scheduler = spec, synthetic, scheduler

    def _nodes(self, spec: TreeSpec) -> int:
        """Cache slots past the context that a step may write."""
        return max(spec.num_nodes, self.drafter.lookahead if self.drafter is not None and self.spec.num_drafts else 0)

    # ------------------------------------------------------------------ requests

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_graphs(self) -> int:
        """Captured steps so far."""
        return len(self._graphs) if self._graphs is not None else 0

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a request; returns its id. Raises RequestError for what this request cannot have."""
        params = params or SamplingParams()
        try:
            prompt = [operator.index(t) for t in prompt_token_ids]
        except TypeError as error:
            raise RequestError(f"prompt: {error}, allowed: a list of token ids") from None
        vocab = self.model.vocab_size
        if not prompt:
            raise RequestError("prompt: found no tokens, allowed: at least 1")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"prompt: found {len(prompt)} tokens, allowed: at most {self.max_model_len - 1} (context limit {self.max_model_len})"
            )
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt: found token id {bad}, allowed: 0 to {vocab - 1}")
        params.validate(vocab)
        if params.stop and self.detokenize is None:
            raise RequestError("stop: stop strings need a tokenizer, and this engine has none")
        limit = min(self.max_model_len, len(prompt) + params.max_tokens)
        need = self.pool.pages_for(limit - 1 + self._nodes(self.spec))
        if need > self.pool.capacity:
            raise RequestError(
                f"prompt: {len(prompt)} tokens and max_tokens {params.max_tokens} need {need} pages, the cache has {self.pool.capacity}"
            )
        eos = () if params.ignore_eos else (t for t in self.model.eos_token_ids if t < vocab)  # some configs name more
        stop = {*params.stop_token_ids, *eos}
        if params.min_tokens and len(stop) >= vocab:
            raise RequestError(f"min_tokens: found {params.min_tokens} with every token id a stop id, allowed: 0")
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        request = Request(self._next_id, prompt, params, seed, frozenset(stop), limit)
        self._next_id += 1
        self._waiting.append(request)
        return request.request_id

    def abort(self, request_id: int) -> None:
        """End a request now; its pages are free at once. Unknown or finished ids are ignored."""
        for request in list(self._waiting):
            if request.request_id == request_id:
                self._waiting.remove(request)
        for row, request in enumerate(self._running):
            if request.request_id == request_id:
                self._release(row)
                break

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[list[RequestOutput]], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends; outputs come in the prompts' order. A bad prompt gives an output with `error`."""
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"params: found {len(each)} for {len(prompts)} prompts, allowed: one for all or one each")
        final: dict[int, RequestOutput] = {}
        order: list[int] = []
        seen: dict[int, RequestOutput] = {}
        for prompt, p in zip(prompts, each):
            try:
                order.append(self.submit(prompt, p))
            except RequestError as error:
                request_id, self._next_id = self._next_id, self._next_id + 1
                order.append(request_id)
                length = len(prompt) if hasattr(prompt, "__len__") else 0
                final[request_id] = RequestOutput(request_id, length, [], [], None, "error", str(error), None, 0, 0, 0)
        while self.has_work:
            outputs = self.step()
            seen.update((o.request_id, o) for o in outputs)
            if on_step is not None:
                on_step(outputs)
            final.update((o.request_id, o) for o in outputs if o.finish_reason)
        for i, prompt in zip(order, prompts):
            if i not in final:  # `on_step` aborted it
                last = seen.get(i, RequestOutput(i, len(prompt), [], [], None, None, None, None, 0, 0, 0))
                final[i] = replace(last, new_token_ids=[], finish_reason="abort")
        return [final[i] for i in order]

    # ------------------------------------------------------------------ the step

    @torch.inference_mode()
    def step(self, spec: TreeSpec | None = None) -> list[RequestOutput]:
        """One prefill pass or one decode step. Returns the requests that it changed.

        spec: another tree for this step only, no larger than the configured one (the seam of a scheduler); with k = 0
        the drafter still runs, so that its own cache keeps up. Not with async_scheduling, which may have begun the step.
        """
        if spec is not None and self.async_scheduling:
            raise ConfigError("spec: found a tree for one step with async_scheduling, allowed: without it")
        if spec is not None and (spec.num_nodes > self.spec.num_nodes or spec.depth > self.spec.depth):
            raise ConfigError(
                f"spec: found {spec.num_nodes} nodes of depth {spec.depth}, allowed: at most the configured "
                f"{self.spec.num_nodes} of depth {self.spec.depth}"
            )
        if spec is not None and not spec.is_chain and self.drafter is not None and not self.drafter.can_tree:
            raise ConfigError(f"spec: {self.drafter.name} drafts chains only")
        if spec is not None and not spec.is_chain and acceptance.RULES[self._rule].needs_chain:
            raise ConfigError(f"spec: found a tree that branches with the rule {self._rule!r}, allowed: chains")
        launched, self._ahead = self._ahead, None
        if launched is None:
            self._admit()
            if not self._running:
                return []
            if any(r.computed < r.context_len for r in self._running):
                self._prefill()
                return []
            launched = self._launch(spec or self._next_spec())
        if self._runs_ahead():
            self._ahead = self._launch(self.spec, True)
        return self._collect(launched)

    def _next_spec(self) -> TreeSpec:
        """What is configured, or no drafts at all where the scheduler says that they would not pay."""
        if self.scheduler is None or not self.spec.num_drafts:
            return self.spec
        drafts = self.scheduler.drafts(self._seq_lens[: len(self._running)] - 1)
        return self.spec if drafts else TreeSpec.chain(0)

    def _admit(self) -> None:
        """First come, first served, while there are rows and pages for the whole context and one tree."""
        while self._waiting and len(self._running) < self.max_num_requests:
            request = self._waiting[0]
            need = self.pool.pages_for(request.context_len + self._nodes(self.spec))
            if need > self.pool.num_free:
                break
            self._waiting.popleft()
            row = len(self._running)
            self._running.append(request)
            self._load_row(row, request)
            self._grow(row, need)

    def _load_row(self, row: int, request: Request) -> None:
        committed = request.prompt + request.output
        self._tokens[row, : len(committed)] = torch.tensor(committed, device=self._tokens.device)
        self._seq_lens[row] = len(committed)
        self._limits[row] = request.limit
        self._num_outputs[row] = len(request.output)
        self._steps[row] = request.num_steps
        self._seeds[row] = request.seed
        self._temperature[row] = 0.0 if request.params.is_greedy else request.params.temperature
        self._generations[row] = self._next_generation
        self._next_generation += 1
        taken = {r.state_row for r in self._running if r is not request}
        request.state_row = min({*range(self.max_num_requests)} - taken)
        self._state_rows[row] = request.state_row
        self._page_table[row] = SCRATCH_PAGE
        self._sampling = None

    def _grow(self, row: int, need: int) -> None:
        """Give the request in `row` pages until it has `need`."""
        request = self._running[row]
        have = len(request.pages)
        if need > have:
            fresh = self.pool.take(need - have)
            request.pages += fresh
            # From pinned memory, so that a step under way is not waited for.
            ids = torch.tensor(fresh, dtype=torch.int32, pin_memory=self._page_table.is_cuda)
            self._page_table[row, have:need].copy_(ids, non_blocking=True)

    def _release(self, row: int) -> None:
        """Free the pages of the request in `row` and close the gap with the last row."""
        request = self._running[row]
        self.pool.give(request.pages)
        request.pages = []
        last = len(self._running) - 1
        if row != last:
            self._running[row] = self._running[last]
            for buffer in (
                self._tokens,
                self._seq_lens,
                self._limits,
                self._num_outputs,
                self._steps,
                self._seeds,
                self._temperature,
                self._generations,
                self._page_table,
                self._state_rows,
                *(self.scheduler.rows if self.scheduler is not None else ()),
            ):
                buffer[row] = buffer[last]
        self._running.pop()
        self._sampling = None
        if not self._running:
            self._ahead = None

    def _preempt_newest(self) -> None:
        """Put the newest request back to the queue's head; it keeps its tokens and computes its cache again."""
        row = max(range(len(self._running)), key=lambda i: self._running[i].request_id)
        request = self._running[row]
        self._release(row)
        request.computed = 0
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _prefill(self) -> None:
        """One pass over the next chunks of every context that is not yet in the cache."""
        start = time.perf_counter()
        budget = self.max_prefill_tokens
        rows: list[int] = []
        chunks: list[list[int]] = []
        for row, request in enumerate(self._running):
            left = request.context_len - request.computed
            if left and budget:
                committed = request.prompt + request.output
                chunks.append(committed[request.computed : request.computed + min(left, budget)])
                rows.append(row)
                budget -= len(chunks[-1])
        device = self.model.device
        starts = [self._running[row].computed for row in rows]
        lens = [len(c) for c in chunks]
        at = torch.tensor(rows, device=device)
        table = self._page_table[at]
        positions = [start + i for start, n in zip(starts, lens) for i in range(n)]
        owner = [i for i, n in enumerate(lens) for _ in range(n)]
        positions = torch.tensor(positions, device=device)
        slots = slots_of(table[torch.tensor(owner, device=device)], positions[:, None], self.pool.page_size).squeeze(1)
        offsets = torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)
        batch = PassBatch(
            token_ids=torch.tensor([t for c in chunks for t in c], device=device),
            positions=positions,
            request_offsets=offsets,
            context_lens=torch.tensor(starts, dtype=torch.int32, device=device),
            page_table=table,
            slot_mapping=slots,
            ancestor_masks=None,
            max_query_len=max(lens),
            max_kv_len=max(a + n for a, n in zip(starts, lens)),
            state_rows=self._state_rows[at],
        )
        active = self.drafter is not None and self.spec.num_drafts > 0
        _, features = self.model.forward(batch, self.cache, self.drafter.taps if active else ())
        if active:
            self.drafter.prefill(batch, features)
        for row, n in zip(rows, lens):
            self._running[row].computed += n
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.prefill_ms.append((time.perf_counter() - start) * 1e3)

    def _runs_ahead(self) -> bool:
        """Whether the next step may begin before the one under way is read: nobody waits for a row, no more than a stop
        token can end a request now, and there are pages for all that the requests may still become."""
        running = self._running
        if not self.async_scheduling or self._waiting or not running:
            return False
        if self.scheduler is not None or self.record_confidence or self.record_experts or not self._params().all_greedy:
            return False
        # A step emits a token at least.
        if any(r.params.stop or r.params.logprobs is not None or r.limit - r.seq_len <= 1 for r in running):
            return False
        nodes = self._nodes(self.spec)
        need = sum(self.pool.pages_for(r.limit - 1 + nodes) - len(r.pages) for r in running)
        return need <= self.pool.num_free

    def _params(self) -> SamplingState:
        running = self._running
        if self._sampling is None:
            self._sampling = SamplingState.build(
                [r.params for r in running],
                [len(r.prompt) for r in running],
                [tuple(r.stop_ids) for r in running],
                self.model.vocab_size,
                self.model.device,
            )
        return self._sampling

    def _launch(self, spec: TreeSpec, ahead: bool = False) -> _Launched:
        """Begin a decode step of all running requests. ahead: the one before it has not been read."""
        timer = PhaseTimer(self.model.device)
        active = self.drafter is not None and self.spec.num_drafts > 0
        unread = spec.depth + 1 if ahead else 0  # tokens that a request may have become longer by
        self._reserve(self._nodes(spec), unread)
        running = self._running
        num = len(running)
        params = self._params()
        wanted = [r.params.logprobs for r in running if r.params.logprobs is not None]
        num_logprobs = max(wanted) if wanted else None
        longest = max(min(r.seq_len + unread, r.limit) for r in running)

        def run(mark: Callable[[str], None], max_seq_len: int) -> StepResult:
            state = BatchState(
                tokens=self._tokens[:num],
                seq_lens=self._seq_lens[:num],
                page_table=self._page_table[:num],
                state_rows=self._state_rows[:num],
                max_drafts=(self._limits[:num] - self._seq_lens[:num] - 1).clamp(min=0, max=spec.depth),
                temperature=self._temperature[:num],
                seeds=self._seeds[:num],
                num_outputs=self._num_outputs[:num],
                max_seq_len=max_seq_len,
            )
            return decode(
                self.model,
                self.cache,
                self.drafter if active else None,
                state,
                params,
                spec,
                self._rule,
                self.synthetic,
                self.scheduler,
                self._steps[:num],
                self._can_sample and not params.all_greedy,
                num_logprobs,
                mark,
            )

        timer.begin_device()
        if self._graphs is not None and params.all_greedy and num_logprobs is None:
            result = self._graphs.replay(
                (num, spec, id(self.synthetic)),
                run,
                longest,
                self.max_model_len,
                (self._tokens, self._seq_lens, self._num_outputs, self._steps),
                timer.mark,
            )
        else:
            result = run(timer.mark, longest)
        # The step's only read of the device, but for what a caller asked to see; a replay writes the same tensor again.
        packed = result.packed.to("cpu", non_blocking=True)
        done = None
        if result.packed.is_cuda:
            done = torch.cuda.Event()
            done.record()
        return _Launched(list(running), result, packed, done, timer)

    def _reserve(self, nodes: int, unread: int) -> None:
        """Pages for every running request's context and tree, oldest first; preempts the newest when they run out.

        unread: tokens that the context may have beyond those that the host knows."""
        while True:
            short = 0
            for row in sorted(range(len(self._running)), key=lambda i: self._running[i].request_id):
                request = self._running[row]
                need = self.pool.pages_for(min(request.context_len + unread, request.limit - 1) + nodes)
                short = need - len(request.pages) - self.pool.num_free
                if short > 0:
                    break
                self._grow(row, need)
            if short <= 0:
                return
            self._preempt_newest()

    def _reader(self, request: Request) -> Callable[[list[int]], str] | None:
        """The caller's detokenizer, whose failure ends this request alone."""
        if self.detokenize is None:
            return None

        def read(tokens: list[int]) -> str:
            try:
                return self.detokenize(tokens)
            except Exception as error:  # a function of the caller's: anything may come out of it
                request.error = f"detokenize: {type(error).__name__}: {error}"
                return ""

        return read

    def _collect(self, launched: _Launched) -> list[RequestOutput]:
        """Read a step, hand its tokens to their requests, and end those that stop or are broken. A request that had ended
        before the step began has no part in it."""
        if launched.done is not None:
            launched.done.synchronize()
        lines = {r.request_id: line for r, line in zip(launched.requests, launched.packed.tolist())}
        result, confidence = launched.result, None
        if self.record_confidence and result.confidence is not None:
            confidence = result.confidence.tolist()
        running = list(self._running)
        context = sum(r.context_len for r in running)
        record = StepRecord([], [], [], [], 0, context, confidence=None if confidence is None else [])
        outputs: list[RequestOutput] = []
        ended: list[int] = []
        for row, request in enumerate(running):
            line = lines[request.request_id]
            emitted, nodes, broken, bad_draft = line[-4:]
            new: list[int] = []
            read = self._reader(request)
            if broken:
                request.error = f"logits: found NaN or infinity at output token {len(request.output)}"
            elif bad_draft >= 0:
                request.error = (
                    f"draft: found token id {bad_draft}, allowed: 0 to {self.model.vocab_size - 1} (the target's vocabulary)"
                )
            else:
                new = request.accept(line[:emitted], read)
                request.num_steps += 1
                request.num_drafted += nodes - 1
                request.num_accepted += emitted - 1
                request.computed = request.context_len
                if result.logprobs is not None and request.params.logprobs is not None:
                    request.logprobs += _logprobs(row, new, result.logprobs, request.params.logprobs)
                record.request_ids.append(request.request_id)
                record.drafted.append(nodes - 1)
                record.accepted.append(emitted - 1)
                record.emitted.append(len(new))
                if confidence is not None:
                    record.confidence.append(confidence[row][1:nodes])
            record.verified_tokens += nodes
            output = request.report(new, read)
            if request.error:
                request.finish_reason = output.finish_reason = "error"
                output.error = request.error
            if request.finish_reason:
                ended.append(row)
            outputs.append(output)
        for row in sorted(ended, reverse=True):
            self._release(row)
        record.ms = launched.timer.finish(self._finished)
        self._finished = time.perf_counter()
        if self.record_experts and result.experts:
            layers = torch.stack(result.experts).flatten(1).tolist()
            record.unique_experts = [len(set(layer)) for layer in layers]
        self.records.append(record)
        return outputs


def _logprobs(
    row: int, new: list[int], logprobs: tuple[Tensor, Tensor, Tensor], top_n: int
) -> list[TokenLogprob]:
    chosen, ids, values = (x[row, : len(new)].tolist() for x in logprobs)
    return [
        TokenLogprob(token, lp, dict(zip(i[:top_n], v[:top_n])))
        for token, lp, v, i in zip(new, chosen, values, ids)
    ]
