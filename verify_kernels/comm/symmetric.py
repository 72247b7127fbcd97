"""Collectives through memory that all ranks share: the host side of `kernels`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from verify_kernels.comm import kernels
from verify_kernels.comm.group import Distributed, Group

CAPACITY = 1 << 20
"""Bytes of a message to one rank that a box has room for: 64 rows of 7168 in 16 bits and some. More than that is a
matter of bandwidth, and torch.distributed's."""

HOP = 900_000
"""Bytes that a link carries in the time of one more flight to a peer: about 2 us (inferred; `eval.bench_comm` times
both) at the 450 GB/s of NVLink 4."""

BLOCK = 1024  # elements of a program of 4 warps: 16 bytes a thread and rank
WORDS = {torch.bfloat16: tl.int16, torch.float16: tl.int16, torch.float32: tl.int32}


def two_shot(size: int, ranks: int) -> bool:
    """Whether an all-reduce of `size` bytes takes two shots: a rank then sends 2 (n - 1) / n times the message, where
    one shot takes n - 1 times as much, but the message flies twice."""
    return size * (ranks - 1) * (ranks - 2) / ranks > HOP


@dataclass(frozen=True)
class Box:
    """One rank's memory that all ranks write to, with that of the others. boxes [size] int64: the addresses of every
    rank's, as this process sees them, each of box_bytes() and all ones at first; turns [1] int32: zero at first, this
    rank's alone; capacity: bytes of a slot, a multiple of 64; memory: what must live as long."""

    rank: int
    boxes: Tensor
    turns: Tensor
    capacity: int
    memory: object = None


def box_bytes(size: int, capacity: int = CAPACITY) -> int:
    return 2 * (size + 1) * capacity


def open_box(processes: distributed.ProcessGroup | None = None, capacity: int = CAPACITY) -> Box:
    """On the current GPU, over torch's symmetric memory; every rank of the process group calls it. Raises RuntimeError
    (torch's) where GPUs cannot reach one another."""
    from torch.distributed import _symmetric_memory

    # Binding memory to multicast objects needs rights that not every machine gives, and nothing here uses them.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    processes = distributed.group.WORLD if processes is None else processes
    rank, device = distributed.get_rank(processes), torch.device("cuda", torch.cuda.current_device())
    memory = _symmetric_memory.empty(box_bytes(processes.size(), capacity), dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(memory, processes)
    memory.fill_(255)
    torch.cuda.synchronize()
    distributed.barrier(processes)  # no rank writes before all boxes are empty
    apart = memory.data_ptr() - handle.buffer_ptrs[rank]  # the same on all ranks: they allocate alike
    boxes = torch.tensor([p + apart for p in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return Box(rank, boxes, torch.zeros(1, dtype=torch.int32, device=device), capacity, (memory, handle))


class Symmetric(Group):
    """The ranks that share a box, and `rest`, the same ranks, for what is not the kernels': messages that the box has
    no room for, empty ones, and sums of other dtypes than bfloat16, float16 and float32. Values of other dtypes travel
    as their bytes. Called on one stream (see `kernels`).
    """

    def __init__(self, box: Box | None = None, rest: Group | None = None) -> None:
        rest = Distributed() if rest is None else rest
        super().__init__(rest.rank, rest.size)
        self.box, self.rest = open_box() if box is None else box, rest

    def _fits(self, x: Tensor, rows: int, width: int, header: int = 0) -> bool:
        units = rows * triton.cdiv(width, BLOCK)
        return x.dtype in WORDS and 0 < units * (BLOCK + header) * x.itemsize <= self.box.capacity

    def _common(self, x: Tensor) -> dict[str, object]:
        return dict(N=self.size, PEERS=triton.next_power_of_2(self.size), WORD=WORDS[x.dtype])

    def _sum(self, x: Tensor) -> Tensor:
        if not self._fits(x, 1, x.numel()):
            return self.rest._sum(x)
        return self._reduced(x.contiguous(), 1, x.numel(), BLOCK)[0]

    def _sum_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        block = max(BLOCK, triton.next_power_of_2(width))
        if not self._fits(x, rows, block):
            return self.rest._sum_norm(x, residual, weight, eps)
        residual = residual if residual is None else residual.contiguous()
        y, normed = self._reduced(x.contiguous(), rows, width, block, residual, weight.contiguous(), eps)
        return normed, y

    def _reduced(
        self, x: Tensor, rows: int, width: int, block: int, residual: Tensor | None = None,
        weight: Tensor | None = None, eps: float = 0.0,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(sum, its norm)."""
        box, out, normed = self.box, x.new_empty(x.shape), None if weight is None else x.new_empty(x.shape)
        kernels.all_reduce[rows, triton.cdiv(width, block)](
            box.boxes, box.turns, x, residual, weight, out, normed, box.rank, width, box.capacity // x.itemsize, eps,
            TWO_SHOT=two_shot(x.nbytes, self.size), ADD=residual is not None, NORM=weight is not None, BLOCK=block,
            num_warps=min(32, block // 256), **self._common(x),
        )  # fmt: skip
        return out, normed

    def _scatter(self, x: Tensor) -> Tensor:
        rows, width = len(x), x.shape[1] // self.size
        if not self._fits(x, rows, width):
            return self.rest._scatter(x)
        out = x.new_empty(rows, width)
        self._exchanged(x.contiguous(), out, rows, width, (x.shape[1], width), (width, 0), SPLIT=True, SUM=True)
        return out

    def _gather(self, x: Tensor) -> Tensor:
        if x.dtype not in WORDS:
            return _unpacked(self._gather(_packed(x)), x.dtype)
        rows, width = x.shape
        if not self._fits(x, rows, width):
            return self.rest._gather(x)
        out = x.new_empty(rows, self.size * width)
        strides = (width, 0), (out.shape[1], width)
        self._exchanged(x.contiguous(), out, rows, width, *strides, SPLIT=False, SUM=False)
        return out

    def _exchange(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.dtype not in WORDS:
            y, found = self._exchange(_packed(x), counts)
            return _unpacked(y, x.dtype), found
        _, rows, width = x.shape
        if not self._fits(x, rows, width, kernels.HEADER.value):
            return self.rest._exchange(x, counts)
        out, found = x.new_empty(x.shape), None if counts is None else counts.new_empty(self.size)
        strides = (width, rows * width)
        self._exchanged(x.contiguous(), out, rows, width, strides, strides, counts, found, SPLIT=True, SUM=False)
        return out, found

    def _exchanged(
        self, x: Tensor, out: Tensor, rows: int, width: int, given: tuple[int, int], taken: tuple[int, int],
        counts: Tensor | None = None, found: Tensor | None = None, **what: bool,
    ) -> None:  # fmt: skip
        """given, taken: elements between rows, and between ranks, of x and of out."""
        box = self.box
        kernels.exchange[rows, triton.cdiv(width, BLOCK)](
            box.boxes, box.turns, x, counts, out, found, box.rank, width, box.capacity // x.itemsize, *given, *taken,
            COUNTED=counts is not None, BLOCK=BLOCK, num_warps=4, **self._common(x), **what,
        )  # fmt: skip


def _packed(x: Tensor) -> Tensor:
    """Bytes as numbers that the kernels carry exactly."""
    return x.contiguous().view(torch.uint8).to(torch.bfloat16)


def _unpacked(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.uint8).view(dtype)
