"""A request on the host, and what its caller sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dspark_runtime.sampling import SamplingParams


@dataclass
class TokenLogprob:
    """Log-probability of one emitted token, and of the most likely ones, under the model's raw distribution."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class RequestOutput:
    """The state of a request after a step that changed it.

    finish_reason: None while it runs; "stop" (end of sequence, stop token or stop string), "length" (max_tokens or the
    context limit), "abort", "error" (then `error` says what). num_drafted and num_accepted count the drafts that were
    verified and that the acceptance rule took, over num_steps verify steps.
    """

    request_id: int
    prompt_len: int
    token_ids: list[int]
    new_token_ids: list[int]
    text: str | None
    finish_reason: str | None
    error: str | None
    logprobs: list[TokenLogprob] | None
    num_steps: int
    num_drafted: int
    num_accepted: int


@dataclass
class Request:
    """Host state of one request. Its committed tokens are prompt + output; the last one is the root of the next tree."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int  # committed tokens may not exceed this: prompt + max_tokens, or the context limit
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    state_row: int = 0  # of its recurrent states, while it runs
    computed: int = 0  # context tokens whose keys and values are in the cache
    finish_reason: str | None = None
    error: str | None = None
    text: str | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def seq_len(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def context_len(self) -> int:
        """Tokens that belong in the cache: all but the root."""
        return self.seq_len - 1

    def accept(self, tokens: list[int], detokenize: Callable[[list[int]], str] | None) -> list[int]:
        """Append a step's tokens up to the first stop or limit; sets finish_reason there. Returns what was kept."""
        params = self.params
        kept: list[int] = []
        for token in tokens:
            self.output.append(token)
            kept.append(token)
            count = len(self.output)
            if token in self.stop_ids and count >= params.min_tokens:
                self.finish_reason = "stop"
            elif params.stop and count >= params.min_tokens and self._stop_string(detokenize):
                self.finish_reason = "stop"
            elif self.seq_len >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return kept

    def _stop_string(self, detokenize: Callable[[list[int]], str] | None) -> bool:
        text = detokenize(self.output)
        ends = [at for at in map(text.find, self.params.stop) if at >= 0]
        if ends:
            self.text = text[: min(ends)]
        return bool(ends)

    def report(self, new: list[int], detokenize: Callable[[list[int]], str] | None) -> RequestOutput:
        text = self.text
        if text is None and detokenize is not None:
            text = detokenize(self.output)
        return RequestOutput(
            request_id=self.request_id,
            prompt_len=len(self.prompt),
            token_ids=list(self.output),
            new_token_ids=new,
            text=text,
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            num_steps=self.num_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )
