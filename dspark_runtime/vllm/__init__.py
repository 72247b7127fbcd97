"""The plugin that vLLM loads: with this package installed, vLLM's DSpark drafts with this project's model class.

vLLM calls `register` in every process that it starts. Nothing here imports torch, and the model class is imported only
where a DSpark drafter is loaded.
"""

from __future__ import annotations

import os
from importlib import metadata

from dspark_runtime.errors import ConfigError

NAME = "dspark"
"""Of the entry point, for VLLM_PLUGINS."""
SWITCH = "DSPARK_VLLM_PLUGIN"
"""Environment variable: 0 leaves vLLM as it is, 1 or unset plugs in."""
SUPPORTED = "0.33"
"""vLLM's internals that the model class builds on are those of this release series."""
ARCHITECTURE = "Qwen3DSparkModel"
MODEL = "dspark_runtime.vllm.model:DSparkForCausalLM"
PROPOSER = "dspark_runtime.vllm.proposer.NgramProposer"
_WARNED = "_DSPARK_VLLM_WARNED"  # inherited by the processes that vLLM starts, so that one of them warns


def enabled() -> bool:
    """Whether `SWITCH` leaves the plugin on. Raises ConfigError on a value that is neither."""
    found = os.environ.get(SWITCH, "1")
    if found not in ("0", "1"):
        raise ConfigError(f"{SWITCH}: found {found!r}, allowed: 0, 1")
    return found == "1"


def supports(version: str) -> bool:
    """Whether a vLLM version ("0.33.0", "0.33.1+cpu") is one that this plugin is written for."""
    return version.split(".")[:2] == SUPPORTED.split(".")


def register() -> None:
    """Entry point of `vllm.general_plugins`: our class in place of vLLM's for DSpark drafters. May run repeatedly."""
    if not enabled():
        return
    import vllm

    if not supports(vllm.__version__):
        if not os.environ.get(_WARNED):
            os.environ[_WARNED] = "1"
            from vllm.logger import init_logger

            init_logger("vllm.dspark_runtime").warning(
                "dspark-runtime is not plugged in: found vLLM %s, supported: %s.x; vLLM's own DSpark runs",
                vllm.__version__,
                SUPPORTED,
            )
        return
    vllm.ModelRegistry.register_model(ARCHITECTURE, MODEL)


def _installed() -> str | None:
    """Version of the installed vLLM, whatever its distribution is called; None without one."""
    for name in metadata.packages_distributions().get("vllm", ()):
        return metadata.version(name)
    return None


def status() -> list[tuple[str, str]]:
    """(part, what is plugged into vLLM or why it is not), for `dspark doctor`. Imports neither torch nor vLLM."""
    version = _installed()
    if version is None:
        return [("vLLM", "not installed (extra: vllm); nothing to plug into")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not supports(version):
        why = f"not plugged: supported is vLLM {SUPPORTED}.x; vLLM's own DSpark runs"
    elif not enabled():
        why = f"not plugged: {SWITCH}=0; vLLM's own DSpark runs"
    elif allowed is not None and NAME not in allowed.split(","):
        why = f"not plugged: VLLM_PLUGINS={allowed!r} does not name {NAME}; vLLM's own DSpark runs"
    elif not metadata.entry_points(group="vllm.general_plugins", name=NAME):
        why = "not plugged: this package is not installed (pip install -e .); vLLM's own DSpark runs"
    else:
        why = f"plugged: {ARCHITECTURE} is {MODEL}"
    plugged = why.startswith("plugged")
    loop = "one torch function on a CPU; Triton kernels on CUDA, not yet run on a GPU" if plugged else "vLLM's"
    return [
        ("vLLM", version),
        ("  drafter", why),
        ("  Markov loop", loop),
        ("  token level", f"by name: method custom_class, model {PROPOSER}"),
        ("  attention", "not built yet: vLLM's own backend verifies"),
        ("  linear, MoE", "not built yet: vLLM's own layers run"),
    ]
