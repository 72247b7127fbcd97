"""A rank alone, and ranks as processes joined by gloo, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.verify_kernels.comm.ranks import agree, check, spawn, values
from verify_kernels.comm import Alone, Distributed


def of_processes(rank: int) -> None:
    group = Distributed()
    for i, dtype in enumerate((torch.bfloat16, torch.float32)):
        # gloo adds in steps, and rounds each.
        agree(check(group, 5, 24, dtype, i, roundings=group.size, device="cpu"))
    assert sum(group.sent.values()) == 18 and group.sent["all_reduce", "all_reduce", 5 * 24 * 2] == 1


@pytest.mark.parametrize("size", [2, 3])
def test_processes(size: int) -> None:
    spawn(size, of_processes)


def test_one_rank_is_a_group() -> None:
    group = Alone()
    check(group, 3, 16, torch.bfloat16, 0, roundings=1, device="cpu")
    assert sum(group.sent.values()) == 9


def test_a_rank_alone_sends_nothing_and_counts_everything() -> None:
    group = Alone(1, 4)
    x, weight = values(1, (2, 8), torch.bfloat16, 0), torch.ones(8, dtype=torch.bfloat16)
    assert torch.equal(group.all_reduce(x, "attention"), x) and torch.equal(group.all_reduce(x, "attention"), x)
    assert torch.equal(group.all_reduce_norm(x, None, weight, 1e-6, "experts")[1], x)
    assert torch.equal(group.reduce_scatter(x, "latent"), x[:, 2:4])
    assert torch.equal(group.all_gather(x), torch.cat([x] * 4, 1))
    rows = x.view(4, 2, 2)
    assert torch.equal(group.all_to_all(rows)[0], rows)
    assert dict(group.sent) == {
        ("attention", "all_reduce", 32): 2, ("experts", "all_reduce", 32): 1, ("latent", "reduce_scatter", 32): 1,
        ("all_gather", "all_gather", 32): 1, ("all_to_all", "all_to_all", 32): 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.reduce_scatter(torch.ones(2, 9)), r"x: found \[2, 9\], allowed: .*multiple of 4"),
        (lambda g: g.all_gather(torch.ones(9)), r"x: found \[9\], allowed"),
        (lambda g: g.all_to_all(torch.ones(3, 2, 2)), r"x: found \[3, 2, 2\], allowed: \[4 ranks"),
        (lambda g: g.all_to_all(torch.ones(4, 2, 2), torch.ones(4)), "counts: found torch.float32"),
        (lambda g: Alone(4, 4), "rank: found 4 of 4"),
    ],
)
def test_errors_name_the_field(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Alone(1, 4))
