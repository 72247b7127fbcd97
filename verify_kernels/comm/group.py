"""What ranks send one another: the interface, a rank alone, and torch.distributed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

import torch
from torch import Tensor, distributed

from verify_kernels import ops

# torch 2.13 names these anew and warns of the names before.
_gather_single = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter_single = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class Group(ABC):
    """The ranks among which a model is divided, seen from one of them.

    rank, size: of this process, and how many. sent: how often each (name, kind, bytes of this rank's x) was asked for;
    name says what the message is (default: the operation), kind is all_reduce, all_gather, reduce_scatter or
    all_to_all. A CUDA graph counts when it is captured, not when it is replayed.

    Every rank calls the same operations in the same order with the same shapes; all of them get the same bits from
    all_reduce and all_reduce_norm. No operation waits on the host. A result may be the argument's own memory.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank: found {rank} of {size}, allowed: 0 to size - 1")
        self.rank, self.size = rank, size
        self.sent: Counter[tuple[str, str, int]] = Counter()

    def all_reduce(self, x: Tensor, name: str = "all_reduce") -> Tensor:
        """The sum of every rank's x, of any shape."""
        return self._sum(self._note(x, name, "all_reduce"))

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, name: str = "all_reduce_norm"
    ) -> tuple[Tensor, Tensor]:
        """x [N, H] and residual [N, H] (None: zero), the residual the same on all ranks -> (rms_norm(y), y) with y the
        sum of every rank's x and the residual: what `ops.add_rms_norm` makes of the sum."""
        return self._sum_norm(self._note(x, name, "all_reduce"), residual, weight, eps)

    def reduce_scatter(self, x: Tensor, name: str = "reduce_scatter") -> Tensor:
        """x [N, size * K] -> [N, K]: this rank's columns of the sum of every rank's x."""
        if x.ndim != 2 or x.shape[1] % self.size:
            raise ValueError(f"x: found {list(x.shape)}, allowed: [N, K] with K a multiple of {self.size} ranks")
        return self._scatter(self._note(x, name, "reduce_scatter"))

    def all_gather(self, x: Tensor, name: str = "all_gather") -> Tensor:
        """x [N, K] of every rank -> [N, size * K], in order of the ranks."""
        if x.ndim != 2:
            raise ValueError(f"x: found {list(x.shape)}, allowed: [N, K]")
        return self._gather(self._note(x, name, "all_gather"))

    def all_to_all(
        self, x: Tensor, counts: Tensor | None = None, name: str = "all_to_all"
    ) -> tuple[Tensor, Tensor | None]:
        """x [size, C, K], rows for each rank -> (y [size, C, K], rows from each rank; how many from each).

        counts [size] int32, 0 to C: how many of x's rows for each rank are meant (None: all, and so is the second
        result). Rows of y past a rank's count mean nothing.
        """
        if x.ndim != 3 or len(x) != self.size:
            raise ValueError(f"x: found {list(x.shape)}, allowed: [{self.size} ranks, C, K]")
        if counts is not None and (counts.shape != (self.size,) or counts.dtype != torch.int32):
            raise ValueError(f"counts: found {counts.dtype} {list(counts.shape)}, allowed: torch.int32 [{self.size}]")
        return self._exchange(self._note(x, name, "all_to_all"), counts)

    def _note(self, x: Tensor, name: str, kind: str) -> Tensor:
        self.sent[name, kind, x.nbytes] += 1
        return x

    # What a group does, with arguments that were checked and noted.

    @abstractmethod
    def _sum(self, x: Tensor) -> Tensor: ...

    def _sum_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y = self._sum(x)
        return (ops.rms_norm(y, weight, eps), y) if residual is None else ops.add_rms_norm(y, residual, weight, eps)

    @abstractmethod
    def _scatter(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _exchange(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


class Alone(Group):
    """One rank without the others: what each collective would carry is counted in `sent`, nothing travels, and its own
    part stands for every rank's. With size 1 that is all there is to do."""

    def _sum(self, x: Tensor) -> Tensor:
        return x

    def _scatter(self, x: Tensor) -> Tensor:
        columns = x.shape[1] // self.size
        return x[:, self.rank * columns : (self.rank + 1) * columns]

    def _gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.size)

    def _exchange(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return x, counts


class Distributed(Group):
    """The ranks of a process group of torch.distributed (None: the world): NCCL between GPUs, gloo on CPUs."""

    def __init__(self, processes: distributed.ProcessGroup | None = None) -> None:
        super().__init__(distributed.get_rank(processes), distributed.get_world_size(processes))
        self.processes = processes

    def _sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        distributed.all_reduce(x, group=self.processes)
        return x

    def _scatter(self, x: Tensor) -> Tensor:
        parts = torch.cat(x.chunk(self.size, dim=1))  # [size * N, K]
        out = parts.new_empty(len(x), parts.shape[1])
        _scatter_single(out, parts, group=self.processes)
        return out

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * len(x), x.shape[1])
        _gather_single(parts, x.contiguous(), group=self.processes)
        return parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)

    def _exchange(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All C rows travel: how many are meant is known on the device alone."""
        out, found = torch.empty_like(x, memory_format=torch.contiguous_format), None
        distributed.all_to_all_single(out, x.contiguous(), group=self.processes)
        if counts is not None:
            found = torch.empty_like(counts)
            distributed.all_to_all_single(found, counts.contiguous(), group=self.processes)
        return out, found
