"""What a number was measured on: machine, versions, commit. Nothing here starts a device that is not there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model name as the system states it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_state() -> tuple[str | None, bool | None]:
    """(commit, uncommitted changes) of the project's checkout; (None, None) where it is installed without one.

    A copy without git history names its commit in DSPARK_COMMIT.
    """
    if commit := os.environ.get("DSPARK_COMMIT"):
        return commit.removesuffix("-dirty"), commit.endswith("-dirty")

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("rev-parse", "--show-prefix") != "":  # not the root of a checkout
        return None, None
    return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain"))


def gpu_name(device: torch.device) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_driver(device: torch.device) -> str | None:
    """The NVIDIA driver's version, read from the driver's own tool."""
    if device.type != "cuda":
        return None
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def cpu_kernels() -> str | None:
    """The CPU kernels' own account of themselves, if they give one."""
    from verify_kernels import cpu

    status = getattr(cpu, "status", None)
    return str(status()) if status is not None else None


def write_result(
    path: Path, command: str, rows: list[dict[str, object]], device: str = "cpu", seed: int = 0, **extra: object
) -> None:
    """A result that is no bench run: command, environment (extra included), seed, rows. Raises ConfigError."""
    import torch

    facts = environment(torch.device(device), seed) | extra
    result = {"schema_version": 1, "command": command, "environment": facts, "seed": seed, "results": rows}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"json: {path}: {error.strerror or error}") from None


def environment(
    device: torch.device,
    seed: int,
    *,
    cuda_graph: bool = False,
    prompts: str | None = None,
    prompts_sha256: str | None = None,
    read_bandwidth_gbps: float | None = None,
    matmul_tflops: float | None = None,
    ceilings: str | None = None,
) -> dict[str, object]:
    """The environment block of a run, as `eval.schema.Environment` takes it."""
    import torch

    from verify_kernels import ops

    commit, dirty = git_state()
    return dict(
        machine=os.environ.get("DSPARK_MACHINE") or platform.node(),  # containers have no telling name of their own
        system=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        cores=cores(),
        gpu=gpu_name(device),
        driver=gpu_driver(device),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
        cutlass=version("nvidia-cutlass-dsl"),
        commit=commit,
        dirty=dirty,
        seed=seed,
        ops=ops.chosen(device.type),
        cpu_kernels=cpu_kernels() if device.type == "cpu" else None,
        cuda_graph=cuda_graph,
        prompts=prompts,
        prompts_sha256=prompts_sha256,
        read_bandwidth_gbps=read_bandwidth_gbps,
        matmul_tflops=matmul_tflops,
        ceilings=ceilings,
    )
