"""Sampling parameters of a request, and the target's distribution under them.

Names, defaults and the order of the logits processors are vLLM's. Every processor sees each node of a draft tree as
plain decoding would see it: after all committed tokens and the drafts on the node's own path.
torch is imported where it is used: reading and checking parameters must not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_runtime.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drafters.base import BatchState
    from drafters.tree import DraftTree

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM."""


def _check(ok: bool, field: str, found: Any, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{field}: found {found!r}, allowed: {allowed}")


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any, low: float, high: float) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and low <= x <= high


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it ends.

    temperature 0 is greedy; unset is 1. top_k 0 or -1 is off. min_tokens keeps stop ids away until that many tokens
    were emitted. logprobs: None gives none, n the chosen token's and the n best. seed None: the engine picks one.
    Raises RequestError for a value outside its range; `validate` checks ids against a vocabulary.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, (str, list, tuple)), name, value, "a list")
        bias = self.logit_bias
        _check(bias is None or isinstance(bias, dict), "logit_bias", bias, "a dictionary of token ids and numbers")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check(_is_number(self.temperature, 0, 1e30), "temperature", self.temperature, "a finite number >= 0, up to 1e30")
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for off")
        _check(_is_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _check(_is_number(self.min_p, 0, 1), "min_p", self.min_p, "a number in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value, -2, 2), name, value, "a number in [-2, 2]")
        penalty = self.repetition_penalty
        _check(_is_number(penalty, 1e-6, 1e6), "repetition_penalty", penalty, "a finite number > 0, from 1e-6 to 1e6")
        for token, bias in (self.logit_bias or {}).items():
            _check(_is_int(token) and token >= 0, "logit_bias", token, "token ids >= 0")
            _check(_is_number(bias, -100, 100), f"logit_bias[{token}]", bias, "a number in [-100, 100]")
        _check(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        n, allowed = self.min_tokens, f"an integer from 0 to max_tokens ({self.max_tokens})"
        _check(_is_int(n) and 0 <= n <= self.max_tokens, "min_tokens", n, allowed)
        for text in stop:
            _check(isinstance(text, str) and text != "", "stop", text, "strings that are not empty")
        for token in self.stop_token_ids:
            _check(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids >= 0")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        n = self.logprobs
        _check(n is None or (_is_int(n) and n >= 0), "logprobs", n, "none or an integer >= 0")
        seed = self.seed
        _check(seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63), "seed", seed, "none or a 64-bit integer")

    def validate(self, vocab_size: int) -> None:
        """Check every id, and the number of log-probabilities, against a vocabulary. Raises RequestError."""
        for field, ids in (("logit_bias", self.logit_bias or {}), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                _check(token < vocab_size, field, token, f"token ids from 0 to {vocab_size - 1}")
        _check((self.logprobs or 0) <= vocab_size, "logprobs", self.logprobs, f"at most the vocabulary, {vocab_size}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass
class SamplingState:
    """The parameters of a batch as device tensors, row r for request r, and host facts that say what can be skipped.

    temperature, log_min_p, presence, frequency, repetition [R] float32; top_p [R] float64; top_k, prompt_lens,
    min_tokens [R] int64; stop_ids [R, S] int64, -1 padded; bias_ids [R, B] int64 with bias_values [R, B] float32,
    padded with id 0 and value 0. Rows that are greedy carry no top_k, top_p and min_p, which cannot move an arg-max.

    all_greedy: the arg-max of the raw logits is every row's answer. max_top_k: 0 if no row has one.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    prompt_lens: Tensor
    min_tokens: Tensor
    stop_ids: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    all_greedy: bool
    any_greedy: bool
    any_penalty: bool
    any_bias: bool
    any_min_tokens: bool
    any_min_p: bool
    any_top_p: bool
    max_top_k: int

    @property
    def any_filter(self) -> bool:
        return self.any_min_p or self.any_top_p or self.max_top_k > 0

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        prompt_lens: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str,
    ) -> SamplingState:
        """stop_ids: every id that ends each request (its own and end-of-sequence); min_tokens keeps them away.

        Copies from the host, so it belongs where the batch changes and not in a step.
        """
        import torch

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def padded(lists: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
            width = max(map(len, lists), default=0)
            return column([[*x, *[fill] * (width - len(x))] for x in lists], dtype).reshape(len(lists), width)

        sampled = [not p.is_greedy for p in params]
        top_k = [min(p.top_k, vocab_size) if on and 0 < p.top_k < vocab_size else 0 for p, on in zip(params, sampled)]
        top_p = [p.top_p if on else 1.0 for p, on in zip(params, sampled)]
        min_p = [p.min_p if on else 0.0 for p, on in zip(params, sampled)]
        biases = [p.logit_bias or {} for p in params]
        any_penalty = any(p.has_penalty for p in params)
        any_bias = any(biases)
        any_min_tokens = any(p.min_tokens > 0 and ids for p, ids in zip(params, stop_ids))
        return cls(
            temperature=column([p.temperature if on else 0.0 for p, on in zip(params, sampled)]),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p, torch.float64),
            log_min_p=column([math.log(x) if x > 0 else -math.inf for x in min_p]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
            prompt_lens=column(prompt_lens, torch.int64),
            min_tokens=column([p.min_tokens for p in params], torch.int64),
            stop_ids=padded(stop_ids, -1, torch.int64),
            bias_ids=padded([list(b) for b in biases], 0, torch.int64),
            bias_values=padded([list(b.values()) for b in biases], 0.0, torch.float32),
            all_greedy=not any(sampled) and not any_penalty and not any_bias and not any_min_tokens,
            any_greedy=not all(sampled),
            any_penalty=any_penalty,
            any_bias=any_bias,
            any_min_tokens=any_min_tokens,
            any_min_p=any(x > 0 for x in min_p),
            any_top_p=any(x < 1 for x in top_p),
            max_top_k=max(top_k, default=0),
        )


def target_probs(
    logits: Tensor, state: SamplingState, batch_state: BatchState, tree: DraftTree, rows: Tensor
) -> Tensor:
    """The distribution that plain decoding would sample from after each node. -> [N, V] float32.

    logits [N, V] float32 (left as they are); node (r, j) owns row rows[r, j], rows [R, n] int64 (anything for padding
    nodes). Order: min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p. Penalties count every committed
    token and the drafts from below the root to the node itself. At temperature 0 a row is exactly one-hot at the
    arg-max (ties: lowest id). top_k and top_p keep every token that ties with the last one kept, so their choice
    depends on no sorting order.
    """
    import torch

    total, vocab = logits.shape
    r, n = rows.shape
    real = tree.tokens >= 0
    # Which node owns each row; rows of nobody (padding of the pass) count as the first request's root.
    where = torch.where(real, rows, total).flatten()
    owner_node = torch.zeros(total + 1, dtype=torch.int64, device=logits.device)
    owner_node = owner_node.scatter(0, where, torch.arange(r * n, device=logits.device))[:total]
    owner = owner_node // n

    if state.any_min_tokens:
        depth = tree.depths().flatten()[owner_node]
        early = batch_state.num_outputs[owner] + depth < state.min_tokens[owner]
        ids = state.stop_ids[owner]
        ban = torch.where(early[:, None] & (ids >= 0), -torch.inf, 0.0)
        logits = logits.scatter_add(1, ids.clamp(min=0), ban)
    if state.any_bias:
        logits = logits.scatter_add(1, state.bias_ids[owner], state.bias_values[owner])
    if state.any_penalty:
        logits = _penalise(logits, state, batch_state, tree, owner_node)

    temperature = state.temperature[owner][:, None]
    scaled = logits / temperature.masked_fill(temperature == 0, 1.0)
    if state.any_min_p:
        floor = scaled.amax(1, keepdim=True) + state.log_min_p[owner][:, None]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if state.max_top_k:
        k = state.top_k[owner][:, None]
        kth = scaled.topk(state.max_top_k, dim=1).values.gather(1, (k - 1).clamp(min=0))
        scaled = scaled.masked_fill((k > 0) & (scaled < kth), -torch.inf)
    probs = scaled.softmax(1)
    if state.any_top_p:
        limit = state.top_p[owner][:, None]
        probs = torch.where((limit >= 1) | (probs >= _top_p_floor(probs, limit)), probs, 0.0)
        probs = probs / probs.sum(1, keepdim=True)
    if state.any_greedy:
        one_hot = torch.zeros_like(probs).scatter(1, logits.argmax(1, keepdim=True), 1.0)
        probs = torch.where(temperature == 0, one_hot, probs)
    return probs


def _top_p_floor(probs: Tensor, limit: Tensor) -> Tensor:
    """The least kept probability of each row, [N, 1]: x stays if all tokens likelier than x have less than `limit`.

    A bisection over the bit patterns of [0, 1], which order non-negative floats: exact, and far cheaper than sorting a
    vocabulary on a CPU.
    """
    import torch

    low = torch.zeros_like(limit, dtype=torch.int32)
    high = torch.full_like(low, 0x3F800000)  # 1.0
    above = torch.empty_like(probs)
    for _ in range(30):
        middle = (low + high) // 2
        torch.gt(probs, middle.view(torch.float32), out=above)
        enough = above.mul_(probs).sum(1, keepdim=True, dtype=torch.float64) < limit
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return high.view(torch.float32)


def _penalise(
    logits: Tensor, state: SamplingState, batch_state: BatchState, tree: DraftTree, owner_node: Tensor
) -> Tensor:
    """Repetition over prompt and output, then frequency and presence over the output only."""
    import torch

    vocab = logits.shape[1]
    r, n = tree.tokens.shape
    owner, node = owner_node // n, owner_node % n
    history = batch_state.tokens[:, : batch_state.max_seq_len]
    index = torch.arange(history.shape[1], device=logits.device)
    committed = index < batch_state.seq_lens[:, None]
    in_prompt = index < state.prompt_lens[:, None]
    ids = history.clamp(0, vocab - 1)  # undefined beyond seq_lens: weight 0
    empty = logits.new_zeros(r, vocab)
    output = empty.scatter_add(1, ids, (committed & ~in_prompt).float())
    prompt = empty.scatter_add(1, ids, (committed & in_prompt).float())

    # Only the drafts: the root is committed, so it is counted above.
    drafted = (tree.tokens >= 0) & (torch.arange(n, device=logits.device) > 0)
    on_path = tree.ancestors()[owner, node] & drafted[owner]
    output = output[owner].scatter_add(1, tree.tokens[owner].clamp(min=0), on_path.float())

    repetition = torch.where((output > 0) | (prompt[owner] > 0), state.repetition[owner][:, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - state.frequency[owner][:, None] * output - state.presence[owner][:, None] * (output > 0)


def logprobs_of(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the model's own logits, before any processor (vLLM's "raw_logprobs").

    logits [M, V] float32: the rows behind M emitted tokens; ids [M] int64. -> (log-probability of each id [M] float32,
    the top_n best ids [M, top_n] int64, best first, and their log-probabilities [M, top_n] float32).
    """
    logprobs = logits.log_softmax(1)
    best, best_ids = logprobs.topk(top_n, dim=1)
    return logprobs.gather(1, ids[:, None]).squeeze(1), best_ids, best
