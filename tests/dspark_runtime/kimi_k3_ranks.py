"""All ranks of a small model of Kimi-K3's form in one process: a thread each, with collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dspark_runtime.configs import find
from dspark_runtime.models.kimi_k3 import KimiK3, KimiK3Config, kimi_k3_config, rank_tensors
from dspark_runtime.models.shards import Shard
from verify_kernels import ops

Result = TypeVar("Result")


def divisible(folder: Path) -> str:
    """kimi-k3-tiny with heads and experts that four ranks can share: the path of its file."""
    text = find("models", "kimi-k3-tiny").read_text().replace("heads: 2,", "heads: 4,")
    text = text.replace("per_tok: 2, intermediate_size: 32", "per_tok: 2, intermediate_size: 128")
    path = folder / "kimi-k3-small.yaml"
    path.write_text(text)
    return str(path)


def divisible_config(folder: Path) -> KimiK3Config:
    return kimi_k3_config(divisible(folder))


class Exchange:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = size, threading.Barrier(size, timeout=60), [None] * size


class ThreadGroup:
    """A rank's collectives; sums in float64, in order of the ranks."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, exchange.size
        self.names: list[str] = []

    def _all(self, x: Tensor, name: str) -> list[Tensor]:
        self.names.append(name)
        self.exchange.slots[self.rank] = (name, x.clone())
        self.exchange.barrier.wait()
        found = list(self.exchange.slots)
        self.exchange.barrier.wait()
        assert {n for n, _ in found} == {name}  # no rank is elsewhere
        return [x for _, x in found]

    def all_reduce(self, x: Tensor, name: str = "") -> Tensor:
        return torch.stack([y.double() for y in self._all(x, name)]).sum(0).to(x.dtype)

    def all_reduce_norm(
        self, x: Tensor, residual: None, weight: Tensor, eps: float, name: str = ""
    ) -> tuple[Tensor, Tensor]:
        y = self.all_reduce(x, name)
        return ops.rms_norm(y, weight, eps), y

    def all_gather(self, x: Tensor, name: str = "") -> Tensor:
        return torch.cat(self._all(x, name), dim=-1)


def ranks(c: KimiK3Config, tensors: dict[str, Tensor], size: int, parallel: str, dtype: torch.dtype) -> list[KimiK3]:
    exchange = Exchange(size)
    made = []
    for rank in range(size):
        part = c.of_rank(Shard(rank, size, parallel))
        group = ThreadGroup(exchange, rank)
        made.append(KimiK3(part, rank_tensors(tensors, c, part), name="rank", dtype=dtype, device="cpu", group=group))
    return made


def together(models: list[KimiK3], run: Callable[[KimiK3], Result]) -> list[Result]:
    """`run` on every rank at once."""

    def one(model: KimiK3) -> Result:
        try:
            return run(model)
        except BaseException:
            model.group.exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(one, models))
