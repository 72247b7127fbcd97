"""Host side of Kimi delta attention: which variants run, what a pass's layers share, and the calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.batch import PassBatch, Records
from verify_kernels.cute.device import H200_MULTIPROCESSORS
from verify_kernels.cute.variants import GatedNormVariant, KdaCommitVariant, KdaVerifyVariant
from verify_kernels.errors import INSTEAD, KernelError

Kernel = Callable[..., None]

DIM, WIDTH = 128, 4  # channels of a head, taps of the convolution
MAX_NODES = 32
_ROOM = 120
"""Factors of decays (`verify`) lie between 2^-120 and 2^lift, their inverses between 2^-lift and 2^120."""
_MOST_LIFT = 112  # what the state holds under a key may be 2^15 then


@dataclass
class LayerRecords(Records):
    """A layer's part of `stack`, the records of several layers one after the other."""

    stack: Records
    index: int


@dataclass
class RecurrencePlan:
    """What all recurrent layers of a pass share. stack: room for the records of layers to come, from `used` on."""

    batch: PassBatch
    fresh: bool = True
    stack: Records | None = None
    used: int = 0

    def records(self, state: Tensor, channels: int, dtype: torch.dtype) -> LayerRecords:
        """Room for the next layer: beside the others', as far as the layers whose states lie together go."""
        if self.stack is None or self.used == len(self.stack.keys):
            layers = max(1, state.untyped_storage().nbytes() // max(1, state.nbytes))
            requests, nodes = self.batch.num_requests, self.batch.max_query_len
            shape = (layers, requests, nodes, *state.shape[1:3])
            inputs = torch.empty(*shape[:3], channels, dtype=dtype, device=state.device)
            self.stack = Records(inputs, *(torch.empty(shape, device=state.device) for _ in range(3)))
            self.used = 0
        index, self.used = self.used, self.used + 1
        s = self.stack
        return LayerRecords(s.inputs[index], s.keys[index], s.log_decay[index], s.updates[index], s, index)


def _name(dtype: torch.dtype, what: str) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"{what}: dtype: found {dtype}, allowed: torch.bfloat16, torch.float16, {INSTEAD}")
    return str(dtype).removeprefix("torch.")


def even(t: Tensor) -> Tensor:
    """t, copied where its rows start at odd elements: kernels read pairs."""
    starts = (*t.stride()[:-1], t.data_ptr() // t.element_size())
    return t if t.stride(-1) == 1 and all(n % 2 == 0 for n in starts) else t.contiguous()


def choose(
    dtype: torch.dtype,
    requests: int,
    heads: int,
    nodes: int,
    tree: bool,
    *,
    dim: int = DIM,
    width: int = WIDTH,
    multiprocessors: int = H200_MULTIPROCESSORS,
) -> KdaVerifyVariant:
    """The variant for so many requests of up to `nodes` nodes. Every CTA makes all keys of its head, so columns are as
    few as give each multiprocessor a CTA at most (of 32 columns: two), and with more heads as many as go."""
    for field, found, good, allowed in (
        ("nodes", nodes, 1 <= nodes <= MAX_NODES, f"1 to {MAX_NODES}"),
        ("head_dim", dim, dim == DIM, DIM),
        ("conv_kernel", width, width == WIDTH, WIDTH),
    ):
        if not good:
            raise KernelError(f"kda_verify: {field}: found {found}, allowed: {allowed}, {INSTEAD}")
    padded = max(8, 1 << (nodes - 1).bit_length())
    fit = (c for c, each in ((8, 1), (16, 1), (32, 2)) if requests * heads * (DIM // c) <= each * multiprocessors)
    most = 32 if padded == MAX_NODES else 64  # 64 would leave four warps to a multiprocessor
    return KdaVerifyVariant(_name(dtype, "kda_verify"), padded, next(fit, most), tree)


def choose_commit(dtype: torch.dtype, nodes: int) -> KdaCommitVariant:
    """The variant for paths of up to `nodes` nodes."""
    if not 1 <= nodes <= MAX_NODES:
        raise KernelError(f"commit_states: path: found {nodes} nodes, allowed: 1 to {MAX_NODES}, {INSTEAD}")
    return KdaCommitVariant(_name(dtype, "commit_states"), 16 if nodes <= 16 else MAX_NODES)


def choose_norm(dtype: torch.dtype, dim: int) -> GatedNormVariant:
    """The variant of the gated norm of rows of `dim`."""
    if dim != DIM:
        raise KernelError(f"gated_rms_norm: head_dim: found {dim}, allowed: {DIM}, {INSTEAD}")
    return GatedNormVariant(_name(dtype, "gated_rms_norm"))


def lift_of(nodes: int, lower_bound: float) -> float:
    """The power of two that keeps decays along up to `nodes` nodes, and their inverses, within float32."""
    lift = max(0, math.ceil(nodes * -lower_bound * math.log2(math.e)) - _ROOM)
    if lift > _MOST_LIFT:
        most = (_MOST_LIFT + _ROOM) / math.log2(math.e) / nodes
        raise KernelError(f"kda_verify: lower_bound: found {lower_bound}, allowed with {nodes} nodes: -{most:.2f} to 0")
    return 2.0**lift


def verify(
    kernel: Kernel,
    plan: RecurrencePlan,
    x: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    window: Tensor,
) -> tuple[Tensor, LayerRecords]:
    """The reference's `kda_verify` by a compiled `choose`. Capturable. Rows of records past a request's nodes, and of y
    past the last request's, are not written."""
    batch = plan.batch
    y = x.new_empty(len(x), *dt_bias.shape)
    records = plan.records(state, x.shape[1], x.dtype)
    kernel(
        even(x), even(raw_gate), raw_beta, conv, a_log, dt_bias, lower_bound, lift_of(batch.max_query_len, lower_bound), state,
        window, batch.state_rows, batch.context_lens, batch.request_offsets, batch.ancestor_masks, y, records.inputs,
        records.keys, records.log_decay, records.updates, int(plan.fresh),
    )  # fmt: skip
    plan.fresh = False
    return y, records


def commit(
    kernel: Kernel,
    state: Tensor,
    window: Tensor,
    records: list[LayerRecords],
    rows: Tensor,
    context_lens: Tensor,
    path: Tensor,
) -> None:
    """The reference's `commit_states` by a compiled `choose_commit`: one launch for layers whose records lie together.
    Capturable."""
    first = 0
    while first < len(records):
        stack, begin = records[first].stack, records[first].index
        count = 1
        while first + count < len(records) and _follows(records[first + count], stack, begin + count):
            count += 1
        layers, part = slice(first, first + count), slice(begin, begin + count)
        kernel(
            state[layers], window[layers], stack.inputs[part], stack.keys[part], stack.log_decay[part],
            stack.updates[part], rows, context_lens.long(), path.contiguous(),
        )  # fmt: skip
        first += count


def _follows(records: LayerRecords, stack: Records, index: int) -> bool:
    return records.stack is stack and records.index == index


def gated_norm(kernel: Kernel, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The reference's `gated_rms_norm` by a compiled `choose_norm`: x [N, H, 128] without gaps, gate alike but for its
    strides. Capturable."""
    out = torch.empty_like(x)
    kernel(x, weight, even(gate), eps, out)
    return out
