"""The `Drafter` protocol: what the engine asks of anything that proposes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import KVCache, PassBatch


@dataclass
class BatchState:
    """The running requests as device tensors; row r is one request. Views of the engine's buffers, never copied back.

    tokens         [R, L] int64   committed tokens (prompt, then output); undefined from seq_lens on
    seq_lens       [R] int64      committed tokens, the root included; the root is tokens[r, seq_lens[r] - 1]
    page_table     [R, P] int32
    max_drafts     [R] int64      no draft may lie deeper than this (context limit, max_tokens); may be 0
    temperature    [R] float32    0 is greedy
    seeds          [R] int64      key of the request's counter-based random numbers
    num_outputs    [R] int64      tokens emitted so far: the counter of this step's random draws
    max_seq_len    host int       upper bound of seq_lens
    state_rows     [R] int64      rows of the target's recurrent states; None for targets without
    """

    tokens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    max_drafts: Tensor
    temperature: Tensor
    seeds: Tensor
    num_outputs: Tensor
    max_seq_len: int
    state_rows: Tensor | None = None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def context_lens(self) -> Tensor:
        """[R] int64: tokens whose keys and values are in the target's cache (all but the root)."""
        return self.seq_lens - 1

    @property
    def roots(self) -> Tensor:
        """[R] int64: the last committed token of each request."""
        return self.tokens.gather(1, (self.seq_lens - 1)[:, None]).squeeze(1)


@runtime_checkable
class Drafter(Protocol):
    """Proposes one tree per request and step. All tensor work; no host reads, so that a step fits in a CUDA graph.

    A drafter keeps no state per request outside its `kv` (whose pages move with the request) and what it reads from
    `BatchState`, so preemption, resumption and reordering of requests need nothing from it.
    """

    name: str
    vocab_size: int | None
    """Ids it can propose are below this; None: it only repeats what it saw. Must equal the target's."""
    max_depth: int
    """Deepest draft it can make (a block drafter's block size); TreeSpecs beyond it are refused at start."""
    can_tree: bool
    """Whether it fills trees that are no chains."""
    can_sample: bool
    """Whether it can draw its drafts and return `DraftTree.probs`; if not, every tree it makes is deterministic."""
    taps: tuple[int, ...]
    """Decoder layers of the target whose outputs it needs as features (0-based output of layer i, -1 for the
    embeddings; `drafters.taps.Mixed`: what layer i + 1 reads); () for none."""
    lookahead: int
    """Cache slots past the context that its own passes write, whatever the tree: the engine has them ready."""
    kv: KVCache | None
    """Its own cache in the engine's pages, after `allocate`, if accepted paths must be made contiguous in it."""

    def allocate(self, pages: int, page_size: int, device: torch.device) -> None:
        """Called once, before any request: allocate `kv`."""

    def prefill(self, batch: PassBatch, features: Tensor | None) -> None:
        """Sees every chunk of a prompt right after the target: the same tokens and slots (causal), and the tapped
        features [N, taps * H]. After a prompt's last chunk its cache covers the whole context."""

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        """One tree per request, no deeper than spec.depth and state.max_drafts, no wider than spec.num_nodes.

        sample=True (only where `can_sample`): rows with temperature > 0 draw their children, without replacement among
        siblings, and `probs` is set; rows at temperature 0 take the best, with one-hot probs. sample=False:
        deterministic, probs None.
        """

    def observe(self, state: BatchState, features: Tensor | None, kept: Tensor) -> None:
        """After acceptance: the target's tapped features of the tokens that entered the context.

        features [R, depth + 1, taps * H] (None without taps) of the root and the accepted drafts in order, at context
        positions state.context_lens + i; kept [R] int64 says how many are valid. `state` is the one `propose` saw.
        """
