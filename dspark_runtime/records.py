"""What every step reports. Bench, tuner, simulator and reports read these records and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepRecord:
    """One draft-and-verify step over a batch.

    emitted and drafted are per request, in `request_ids` order. emitted counts the tokens that the step appended after
    all stops and limits (bonus or correction included); accepted counts the drafts that the acceptance rule took, before
    stops cut them. Milliseconds: draft, verify (forward, logits and arg-max), accept (rule, sampling, commit), other
    (all host work of the step), total = their sum. confidence (where the engine was asked for it, and the drafter states
    one): of each request's drafts, in order, the estimated probability that it is accepted, given that its parent was.
    unique_experts (likewise): in each MoE layer, the different experts that the pass's tokens met, padding included.
    """

    request_ids: list[int]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    verified_tokens: int
    context_tokens: int
    ms: dict[str, float] = field(default_factory=dict)
    unique_experts: list[int] | None = None
    confidence: list[list[float]] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)
