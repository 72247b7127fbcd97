"""Compiles every Triton kernel for sm_90, as its wrapper launches it for a drafter's real shapes, without a GPU.

Run as a program, without Triton's interpreter; prints one line of JSON: variants and bytes of shared memory by kernel.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

compiled: dict[str, dict[str, int]] = {}


class Driver:
    """A GPU that is only compiled for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.setdefault(self.__name__, {"variants": 0, "shared": 0})
    compiled[self.__name__]["variants"] = sum(len(x[0]) for x in self.device_caches.values())
    compiled[self.__name__]["shared"] = max(compiled[self.__name__]["shared"], kernel.metadata.shared)
    return kernel


run = JITFunction.run


@triton.jit
def noise(seeds, step, positions, tokens):
    return ((seeds ^ (tl.cast(step, tl.int64) << 32)) + positions + tokens).to(tl.float32)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # nothing is written to it
    from verify_kernels.markov import Markov
    from verify_kernels.reference.growth import Nodes
    from verify_kernels.triton import implementations
    from verify_kernels.triton.markov import vocabulary_chain

    ops = implementations(unmeasured=True)
    r, n, depth, vocab, d, rank, m, slots, layers, heads, dim = 2, 32, 7, 151936, 4096, 256, 32, 7, 5, 8, 128
    ids = lambda *shape: torch.zeros(shape, dtype=torch.int64)  # noqa: E731
    half = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    real = lambda *shape: torch.zeros(shape)  # noqa: E731
    tokens, parents, one = ids(r, n), ids(r, n), ids(r)
    table = torch.zeros(r, 100, dtype=torch.int32)
    ops["tree_masks"](parents, depth)
    ops["prune_tree"](tokens, parents, tokens > 0, depth)
    for chain in (False, True):
        ops["place_tree"](tokens, parents, one, table, 16, depth, vocab, chain)
    ops["place_block"](one, table, slots, 16, 4096)
    ops["place_block"](one, table, slots + 1, 16, 4096, one)
    ops["follow_tree"](tokens, parents, tokens, depth)
    ops["reach_tree"](tokens, parents, tokens, one, depth)
    for even in (False, True):
        ops["synthetic_drafts"](one, one, torch.zeros(depth, dtype=torch.float64), even)
    ops["commit_tokens"](ids(r, 2000), one, one, one, ids(r, depth + 1), one, one, real(r, n), one)
    cos_sin = real(4096, dim)
    pages = half(layers, 100, 16, heads, dim)
    where = (pages, pages, ids(9), ids(9))
    ops["append_context"](half(9, layers, 2, heads, dim), *where, cos_sin, half(layers, dim), 1e-6)
    ops["append_context"](half(9, layers, 2, 3, 64), *where, real(4096, 64), None, 1e-6)
    for x in (half(slots, vocab), real(slots, 49152)):
        ops["top"](x, m)
    ops["top"](half(8, vocab), 1)
    for rows in (1, 8, 64):
        ops["arg_max"](half(rows, vocab))
        ops["arg_max"](half(rows, 49152))
    gates = {"gated": ((rank, d + rank), (rank,)), "rnn": ((3 * rank, 2 * rank + d), (3 * rank,))}
    for kind in ("vanilla", "gated", "rnn"):
        head = Markov(kind, half(1000, rank), half(1000, rank), *(half(*shape) for shape in gates.get(kind, ())))
        sure = None if kind == "gated" else (half(1, d + rank), half(1))
        ops["draft_chain"](
            real(r, slots, m), ids(r, slots, m), half(r, slots, d), one, one, real(r), head, None, sure,
            None if sure is None else real(slots),
        )  # fmt: skip
        base, block = half(r, slots, vocab), half(r, slots, d)
        ops["draw_chain"](base, block, one, head, real(r), one, one)
        vocabulary_chain(head, base, block, one)
        vocabulary_chain(
            head, base, block, one, logits=half(9, slots, vocab), temperature=real(9), seeds=ids(9),
            request=ids(r * slots), positions=ids(r * slots), noise=noise,
        )  # fmt: skip
    ops["draft_chain"](real(r, slots, 1), ids(r, slots, 1), half(r, slots, d), one, one, real(r), None)
    for budget in (32, 64):
        keep = budget - 1
        nodes = Nodes.room(one, 1 + depth * keep)
        first, count, total = 0, 1, 1
        for k in range(depth):
            level = nodes.tokens[:, first : first + count]
            w2 = w1 = half(1000, rank)
            q = ops["candidate_logits"](real(r, slots, m)[:, k], ids(r, slots, m)[:, k], w2, w1, level, real(r))
            ops["grow_level"](nodes, q, ids(r, slots, m)[:, k, None], one, k, first, total, min(keep, count * m), True)
            first, count, total = total, min(keep, count * m), total + min(keep, count * m)
        ops["best_tree"](nodes, total, budget)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
