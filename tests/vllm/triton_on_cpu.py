"""Becomes the sitecustomize.py of an environment made by make_venv.sh; does nothing unless VLLM_TRITON_ON_CPU=1.

vLLM's V2 runner, the only one with DSpark, needs Triton. On a CPU Triton has an interpreter, slow but exact; here it is
presented as the "cpu" backend that vLLM looks for.
"""

import os


def pretend() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from types import SimpleNamespace

    import numpy
    import triton.backends
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        compiler, driver = None, Driver

    triton.backends.backends["cpu"] = Backend()

    def with_bool_mask(name: str, index: int) -> None:
        """vLLM's sampling kernels pass masks of integers, which a GPU takes and the interpreter does not."""
        original = getattr(InterpreterBuilder, name)

        def call(self, *args, **kwargs):
            mask = args[index] if len(args) > index else None
            if getattr(mask, "data", None) is not None:
                mask.data = numpy.asarray(mask.data).astype(bool)
            return original(self, *args, **kwargs)

        setattr(InterpreterBuilder, name, call)

    with_bool_mask("create_masked_load", 1)
    with_bool_mask("create_masked_store", 2)
    # The interpreter patches Triton's language again at every call between functions, which takes most of its time.
    patch, running = interpreter._patch_lang, []

    def patch_once(fn):
        if running:
            return None
        scope = patch(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        restore = scope.restore

        def end() -> None:
            running.clear()
            restore()

        scope.restore = end
        running.append(scope)
        return scope

    interpreter._patch_lang = patch_once

    # What the interpreter's library lacks.
    libdevice.log1p = lambda x, _semantic=None: tl.log(x + 1.0)
    libdevice.expm1 = lambda x, _semantic=None: tl.exp(x) - 1.0


if os.environ.get("VLLM_TRITON_ON_CPU") == "1":
    pretend()
