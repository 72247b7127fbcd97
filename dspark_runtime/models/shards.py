"""One rank's part of a model: which slice of each tensor it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark_runtime.errors import ConfigError

PARALLEL = ("tp", "ep")


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`. Heads, columns of the dense and shared MLPs, and the vocabulary are divided by all ranks;
    routed experts by slicing each of them ("tp") or by giving every rank its own ("ep")."""

    rank: int = 0
    size: int = 1
    parallel: Literal["tp", "ep"] = "tp"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"rank_of: found {self.size}, allowed: 1 or more")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank: found {self.rank}, allowed: 0 to {self.size - 1}")
        if self.parallel not in PARALLEL:
            raise ConfigError(f"parallel: found {self.parallel!r}, allowed: {', '.join(PARALLEL)}")

    def part(self, field: str, total: int, unit: int = 1) -> int:
        """How many of `total` a rank holds, in multiples of `unit`. Raises ConfigError naming the dimension."""
        if total % (self.size * unit):
            allowed = f"numbers of ranks that divide the {total} of {field}"
            raise ConfigError(f"rank_of: found {self.size}, allowed: {allowed}{f' into {unit}s' if unit > 1 else ''}")
        return total // self.size


class RankTensors(Mapping[str, Tensor]):
    """A rank's slices of a whole model's tensors, cut when asked for.

    whole, part: the shapes of the model's tensors and of the rank's. A tensor is cut in the dimension in which the two
    differ, rank after rank; halves: the names (by their ends) of those that hold two matrices one above the other, of
    which each is cut. A tensor of another shape than `whole` says is handed on as it is, for the reader to refuse.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        whole: Mapping[str, tuple[int, ...]],
        part: Mapping[str, tuple[int, ...]],
        rank: int,
        halves: tuple[str, ...],
    ) -> None:
        self._tensors, self._whole, self._part, self._rank, self._halves = tensors, whole, part, rank, halves

    def __getitem__(self, key: str) -> Tensor:
        tensor, whole, part = self._tensors[key], self._whole.get(key), self._part.get(key)
        if tuple(tensor.shape) != whole or whole == part:
            return tensor
        (dim,) = (d for d, sizes in enumerate(zip(whole, part)) if sizes[0] != sizes[1])
        pieces = 2 if dim == len(whole) - 2 and key.endswith(self._halves) else 1
        size = part[dim] // pieces
        return torch.cat([half.narrow(dim, self._rank * size, size) for half in tensor.chunk(pieces, dim)], dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
