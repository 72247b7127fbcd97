"""What every rank sends, what it should receive by float64, and ranks as processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from verify_kernels.comm import Group

EPS = 1e-5
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""What one rounding may change, relatively."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """What a rank sends; every rank can make every other's."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=g).mul_(3).to(dtype)


def near(found: Tensor, want: Tensor, scale: Tensor, roundings: int, terms: int) -> None:
    """found is `want` (float64) to so many roundings of its dtype, and to those of a float32 sum of so many terms, of
    numbers as large as `scale`."""
    assert found.shape == want.shape
    error = (found.double() - want).abs() / (scale + 1e-30)
    allowed = roundings * ROUNDING[found.dtype] + terms * ROUNDING[torch.float32]
    assert error.max() <= allowed, f"{error.max():.3e} of {found.dtype}, allowed {allowed:.3e}"


def check(
    group: Group, rows: int, width: int, dtype: torch.dtype, seed: int, roundings: int, device: str
) -> list[Tensor]:
    """Every operation once. roundings: to `dtype` that the sum may take. Returns what all ranks should agree on."""
    rank, size = group.rank, group.size

    def every(shape: tuple[int, ...], k: int) -> list[Tensor]:
        return [values(r, shape, dtype, seed + k) for r in range(size)]

    def sums(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        return sum(p.double() for p in parts), sum(p.double().abs() for p in parts)

    agreed = []
    parts = every((rows, width), 1)
    found = group.all_reduce(parts[rank].clone().to(device)).cpu()
    near(found, *sums(parts), roundings, size)
    agreed.append(found)

    parts, weight = every((rows, width), 2), values(0, (width,), dtype, seed)
    for residual in (values(0, (rows, width), dtype, seed + 3), None):
        given = residual if residual is None else residual.to(device)
        normed, y = group.all_reduce_norm(parts[rank].clone().to(device), given, weight.to(device), EPS)
        total, scale = sums(parts if residual is None else [*parts, residual])
        near(y.cpu(), total, scale, roundings + 1, size + 1)
        exact = y.cpu().double()  # the norm is of the sum as it was rounded
        want = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        near(normed.cpu(), want, want.abs() + 1e-3, 4, width)
        agreed += [normed.cpu(), y.cpu()]

    parts = every((rows, size * width), 4)
    total, scale = (x[:, rank * width : (rank + 1) * width] for x in sums(parts))
    near(group.reduce_scatter(parts[rank].to(device)).cpu(), total, scale, roundings, size)

    for sent in (dtype, torch.float64, torch.int64):
        parts = [p.to(sent) for p in every((rows, width), 5)]
        parts[-1].view(torch.uint8).fill_(255)  # a NaN, or -1
        found = group.all_gather(parts[rank].to(device)).cpu()
        want = torch.cat(parts, dim=1)
        assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(), want.nan_to_num())
        agreed.append(found.nan_to_num())

    parts = every((size, rows, width), 6)
    received, none = group.all_to_all(parts[rank].to(device))
    assert none is None and torch.equal(received.cpu(), torch.stack([p[rank] for p in parts]))
    counts = [[(3 * r + 5 * d + seed) % (rows + 1) for d in range(size)] for r in range(size)]
    own = torch.tensor(counts[rank], dtype=torch.int32, device=device)
    received, found = group.all_to_all(parts[rank].to(device), own)
    assert found.dtype == torch.int32 and found.tolist() == [c[rank] for c in counts]
    for r, count in enumerate(found.tolist()):
        assert torch.equal(received[r, :count].cpu(), parts[r][rank, :count])
    return agreed


def agree(agreed: list[Tensor]) -> None:
    """All ranks hold the same bits."""
    for x in agreed:
        mine = x.contiguous().view(torch.uint8)
        first = mine.clone()
        distributed.broadcast(first, 0)
        assert torch.equal(mine, first)


def spawn(size: int, work: Callable[..., None], *args: object) -> None:
    """work(rank, *args) in processes that gloo joins; fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (size, port, work, args), nprocs=size)


def _rank(rank: int, size: int, port: int, work: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        work(rank, *args)
    finally:
        distributed.destroy_process_group()
