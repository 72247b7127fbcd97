"""The shape of one flattened forward pass, shared by models, drafters and kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SCRATCH_PAGE = 0
"""Page 0 of every cache belongs to nobody: padding tokens write there, and nobody reads it."""


@dataclass
class Records:
    """What one speculative pass would do to the recurrent states of a layer: R requests of up to n new tokens each.

    inputs      [R, n, C]       what enters the short convolution
    keys        [R, n, H, Dk]   normalised
    log_decay   [R, n, H, Dk]
    updates     [R, n, H, Dv]   beta * (value - what the decayed state holds under the key)
    """

    inputs: Tensor
    keys: Tensor
    log_decay: Tensor
    updates: Tensor


@dataclass
class RecurrentStates:
    """States of a model's recurrent layers, one row a running request. A request without context starts from zeros,
    whatever its row holds.

    state       [layers, rows, H, Dv, Dk] float32 (float64 in a float64 model)
    window      [layers, rows, K - 1, C]: the newest inputs of the short convolution, oldest first
    records     of each layer, from a speculative pass to its commit
    """

    state: Tensor
    window: Tensor
    records: list[Records] = field(default_factory=list)

    @property
    def bytes_per_request(self) -> int:
        return sum(x[:, 0].numel() * x.element_size() for x in (self.state, self.window))


@dataclass
class KVCache:
    """What one model remembers of its requests: keys and values, in pages that all requests share, and recurrent
    states where it has such layers.

    Page ids are common to every model of an engine, so target and drafter read one page table.

    k, v: [layers, pages, page_size, kv_heads, head_dim]; page 0 is the scratch page. Of latent attention k holds the
    latents [layers, pages, page_size, 1, width], and v has head_dim 0.
    """

    k: Tensor
    v: Tensor
    states: RecurrentStates | None = None

    @classmethod
    def allocate(
        cls,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def bytes_per_token(self) -> int:
        return sum(x[:, 0, 0].numel() * x.element_size() for x in (self.k, self.v))


@dataclass
class PassBatch:
    """N new tokens of R requests, flattened without padding between requests.

    Request r owns tokens request_offsets[r] : request_offsets[r + 1]. Its new token j sits at logical cache
    index context_lens[r] + j, whatever its RoPE position.

    token_ids        [N] int64
    positions        [N] int64      RoPE positions (committed length + depth in the tree)
    request_offsets  [R + 1] int32
    context_lens     [R] int32      tokens already in the cache
    page_table       [R, P] int32
    slot_mapping     [N] int64      page * page_size + offset of each new token; scratch slots for padding
    ancestor_masks   [N] int64      bit j set: attends new token j of its own request (itself included); the 64-bit
                                    pattern of an unsigned word. None: causal chain, any number of tokens
    max_query_len    host int       upper bound of new tokens in one request
    max_kv_len       host int       upper bound of context + new tokens in one request
    first_query      host int       the queries are their request's new tokens first_query, first_query + 1, ...: the
                                    ones before are in the cache already (the same number for every request). Mask bits
                                    and logical indices count all new tokens
    state_rows       [R] int64      rows of `RecurrentStates`; None for models without
    speculative      host bool      the new tokens may be rejected: recurrent states stay as they are, and what the
                                    tokens would do to them is recorded for `ops.commit_states`
    plan             filled by `ops.plan_attention`, once for all layers of the pass
    experts          filled by the model: [N, k] int64 ids of each MoE layer, in order
    """

    token_ids: Tensor
    positions: Tensor
    request_offsets: Tensor
    context_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    ancestor_masks: Tensor | None
    max_query_len: int
    max_kv_len: int
    first_query: int = 0
    state_rows: Tensor | None = None
    speculative: bool = False
    plan: Any = None
    experts: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]


def slots_of(page_table: Tensor, logical: Tensor, page_size: int) -> Tensor:
    """Cache slots of logical token indices. page_table [R, P], logical [R, n] -> int64 [R, n]."""
    pages = page_table.long().gather(1, logical // page_size)
    return pages * page_size + logical % page_size
