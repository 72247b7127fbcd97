"""Compiles the collectives for sm_90 without a GPU.

Run as a program, without Triton's interpreter; prints one line of JSON: of each kernel how many variants, bytes of
shared memory, and its volatile loads, by their width.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.verify_kernels.triton_compile import Driver
from verify_kernels.comm import Alone, symmetric
from verify_kernels.comm.symmetric import Box, Symmetric

compiled: dict[str, dict] = {}
run = JITFunction.run


def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    name = self.__name__ + (" by counts" if kwargs.get("COUNTED") else "")
    found = compiled.setdefault(name, {"variants": 0, "shared": 0, "polls": Counter()})
    found["variants"] += 1
    found["shared"] = max(found["shared"], kernel.metadata.shared)
    found["polls"] += Counter(re.findall(r"ld\.volatile\.global[.\w]*", kernel.asm["ptx"]))
    return kernel


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    for size in (1, 2, 8):
        rank = size - 1
        boxes, turns = torch.zeros(size, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        group = Symmetric(Box(rank, boxes, turns, symmetric.CAPACITY), Alone(rank, size))
        x, residual = (torch.zeros(8, 7168, dtype=torch.bfloat16) for _ in range(2))
        for symmetric.HOP in (1 << 40, -1):
            group.all_reduce(x)
            for y in (None, residual):
                group.all_reduce_norm(x, y, x[0], 1e-6)
        group.all_gather(x[:, : 7168 // 16])
        group.reduce_scatter(x)
        rows = torch.zeros(size, 8, 3584, dtype=torch.bfloat16)
        for counts in (None, torch.zeros(size, dtype=torch.int32)):
            group.all_to_all(rows, counts)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
