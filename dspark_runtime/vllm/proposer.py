"""Prompt lookup for vLLM's `method: custom_class`: drafts without a drafter's weights.

The road that vLLM leaves open for methods of one's own: it hands over token ids and takes lists of token ids. So there
are chains only, counted as certain drafts (no draft probabilities), and vLLM runs them on its older V1 runner without
asynchronous scheduling. vLLM passes no options on; the lengths are the classes' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from drafters.base import BatchState
from drafters.suffix import continuations

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NgramProposer:
    """Continues the most recent earlier occurrence of a request's last tokens, up to `longest` of them, at least
    `shortest`; the longest match wins."""

    longest, shortest = 4, 1

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.num_drafts: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM offers the target model; a lookup needs none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """sampled_token_ids: this step's tokens of each request, empty while its prompt is read; num_tokens_no_spec
        [R] int, tokens so far; token_ids_cpu [R, max_model_len] int32 -> at most num_speculative_tokens drafts each."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        room = np.minimum(self.max_model_len - num_tokens_no_spec[: len(drafts)], self.num_drafts)
        rows = [i for i, sampled in enumerate(sampled_token_ids) if sampled and room[i] > 0]
        if not rows:
            return drafts
        lengths = torch.as_tensor(num_tokens_no_spec[rows], dtype=torch.int64)
        longest = int(lengths.max())
        zeros = torch.zeros(len(rows), dtype=torch.int64)
        state = BatchState(
            tokens=torch.from_numpy(token_ids_cpu[rows, :longest].astype(np.int64)),
            seq_lens=lengths,
            page_table=zeros[:, None].int(),
            max_drafts=torch.as_tensor(room[rows], dtype=torch.int64),
            temperature=zeros.float(),
            seeds=zeros,
            num_outputs=zeros,
            max_seq_len=longest,
        )
        found = continuations(state, self.num_drafts, 1, self.longest, self.shortest).tokens[:, 0].tolist()
        for i, chain in zip(rows, found):
            drafts[i] = [token for token in chain if token >= 0]
        return drafts


class SuffixProposer(NgramProposer):
    """As NgramProposer with matches of 2 to 32 tokens: for agents and edits, whose text repeats in long pieces."""

    longest, shortest = 32, 2
