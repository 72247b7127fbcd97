"""The kernels that write to peers' memory, in Triton's interpreter: ranks are processes that share boxes in this
machine's memory, run at their own speeds and wait for one another through nothing but the messages."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.verify_kernels.comm.ranks import agree, check, spawn, values

pytest.importorskip("triton", reason="Triton is not installed")
from verify_kernels.comm import Alone, Distributed, symmetric  # noqa: E402
from verify_kernels.comm.symmetric import Box, Symmetric, box_bytes, two_shot  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="boxes in a CPU's memory: Triton's interpreter")
ROOM = 1 << 17
CUT = {torch.bfloat16: 2, torch.float16: 1, torch.float32: 1}
"""Roundings of a sum: Triton's interpreter cuts off where a GPU rounds to bfloat16."""


def boxes(size: int) -> list[Tensor]:
    return [torch.full((box_bytes(size, ROOM),), 255, dtype=torch.uint8).share_memory_() for _ in range(size)]


def box_of(rank: int, memories: list[Tensor]) -> Box:
    addresses = torch.tensor([m.data_ptr() for m in memories])
    return Box(rank, addresses, torch.zeros(1, dtype=torch.int32), ROOM, memories)


class Never(Alone):
    """Fails if anything is left to it."""

    def __getattribute__(self, name: str) -> object:
        assert not name.startswith("_sum") and name not in ("_scatter", "_gather", "_exchange"), name
        return super().__getattribute__(name)


def patient() -> None:
    """A poll leaves the core to the rank that it waits for."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self, *args):  # the last argument: whether it is volatile
        if args[-1]:
            time.sleep(0.001)
        return load(self, *args)

    InterpreterBuilder.create_masked_load = create_masked_load


def of_processes(rank: int, memories: list[Tensor], hop: int) -> None:
    patient()
    symmetric.HOP = hop
    box = box_of(rank, memories)
    group = Symmetric(box, Never(rank, len(memories)))
    pause = torch.Generator().manual_seed(rank)
    shapes = [(3, 24, torch.bfloat16), (1, 1100, torch.float32), (4, 16, torch.float16), (2, 512, torch.bfloat16)]
    for i, (rows, width, dtype) in enumerate({2: shapes, 3: shapes[:2], 4: shapes[3:]}[group.size]):
        agree(check(group, rows, width, dtype, i, CUT[dtype], device="cpu"))
    for i in range(12):  # no rank waits here for anything but its messages
        time.sleep(float(torch.rand((), generator=pause)) * 0.004)
        shape = (1 + i % 3, 8 + 8 * (i % 4))
        parts = [values(r, shape, torch.float32, i) for r in range(group.size)]
        found = group.all_reduce(parts[rank]) if i % 2 else group.all_gather(parts[rank])
        want = sum(p.double() for p in parts) if i % 2 else torch.cat(parts, 1).double()
        assert (found.double() - want).abs().max() < 1e-5
    torch.distributed.barrier()
    assert memories[rank].eq(255).all()  # all that came was taken, and the box is empty again


@pytest.mark.parametrize(("size", "hop"), [(2, 1 << 30), (3, -1), (4, 1 << 30)], ids=["2 one", "3 two", "4 one"])
def test_processes(size: int, hop: int) -> None:
    spawn(size, of_processes, boxes(size), hop)


def test_one_rank() -> None:
    memories = boxes(1)
    group = Symmetric(box_of(0, memories), Never())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(group, 3, 1040, dtype, 1, CUT[dtype], device="cpu")
    assert memories[0].eq(255).all()


def test_numbers_that_look_like_nothing_arrive() -> None:
    group = Symmetric(box_of(0, boxes(1)), Never())
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        x = torch.full((2, 8), -1, dtype=bits).view(dtype)
        x[0] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.0, -1.0, 3e-8, float("nan")])
        found = group.all_gather(x)
        assert found.isnan().tolist() == x.isnan().tolist()
        assert torch.equal(found[0, :7].view(bits), x[0, :7].view(bits))  # the sign of zero too


def test_what_does_not_fit_goes_to_the_rest() -> None:
    class Rest(Alone):
        asked: list[str] = []

        def _sum(self, x: Tensor) -> Tensor:
            self.asked.append("sum")
            return x

        def _gather(self, x: Tensor) -> Tensor:
            self.asked.append("gather")
            return x

    group = Symmetric(box_of(0, boxes(1)), Rest())
    wide = torch.ones(1, ROOM // 2 + 1, dtype=torch.bfloat16)
    group.all_reduce(wide[:, 1:])
    assert not Rest.asked
    group.all_reduce(wide)
    group.all_gather(wide)
    group.all_reduce(torch.ones(2, 2, dtype=torch.float64))
    group.all_reduce_norm(wide, None, torch.ones_like(wide[0]), 1e-6)
    assert Rest.asked == ["sum", "gather", "sum", "sum"]
    assert sum(group.sent.values()) == 5 and not group.rest.sent


def test_shots_by_bytes() -> None:
    """Two shots pay when what one shot sends more than they do takes the link longer than a flight."""
    row = 7168 * 2
    assert not two_shot(8 * row, 8) and two_shot(16 * row, 8)
    assert not any(two_shot(1 << 30, n) for n in (1, 2))  # two ranks send each other everything either way
    for n in (4, 8, 16):
        least = next(size for size in range(0, 1 << 24, 1024) if two_shot(size, n))
        assert (n - 1) * least - 2 * (n - 1) / n * least == pytest.approx(symmetric.HOP, rel=0.01)
