"""Triton kernels for what a step does between its large products: one small launch where torch needs many.

They have the reference's signatures, run on any GPU that Triton serves, and in its interpreter on a CPU
(TRITON_INTERPRET=1), where the tests check them. Sizes that differ from step to step are not specialised on: one
compilation serves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def implementations(*, unmeasured: bool = False) -> dict[str, Callable[..., Any]]:
    """Operation name -> implementation. None is served by itself until `eval.bench_draft` has passed on a GPU: only to
    those who ask for what is unmeasured."""
    if not unmeasured:
        return {}
    from verify_kernels.triton import argmax, drafting, growth, markov, trees

    modules = (argmax, drafting, growth, markov, trees)
    return {name: getattr(module, name) for module in modules for name in module.__all__}
