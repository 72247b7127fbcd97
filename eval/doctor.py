"""`dspark doctor`: what this machine has and what a run would use. Nothing is downloaded and nothing is changed."""

from __future__ import annotations

import platform

from eval import environment as env


def doctor() -> str:
    """One fact a line."""
    import torch

    from dspark_runtime import targets, vllm
    from verify_kernels import cute, ops
    from verify_kernels.errors import KernelError

    commit, dirty = env.git_state()
    lines = [
        f"machine       {platform.node()}: {env.cpu_name()}, {env.cores()} cores, {platform.platform(terse=True)}",
        f"python        {platform.python_version()}",
        f"torch         {torch.__version__}, {torch.get_num_threads()} threads",
        f"transformers  {env.version('transformers') or 'not installed'}",
        f"cutlass       {env.version('nvidia-cutlass-dsl') or 'not installed (extra: cuda)'}",
        f"commit        {commit or 'unknown'}{' with uncommitted changes' if dirty else ''}",
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        lines.append(
            f"GPU           {env.gpu_name(device)}, sm_{major}{minor}, {memory:.0f} GiB, "
            f"driver {env.gpu_driver(device)}, CUDA {torch.version.cuda}"
        )
    else:
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        lines.append(f"GPU           none ({why}); runs use the CPU")
    lines.append(env.cpu_kernels() or "CPU kernels: none")
    lines.append(f"operations    on {device.type}:")
    try:
        for name, module in ops.chosen(device.type).items():
            rule = f"; {cute.TORCH_RUNS[name]}" if module == cute.__name__ and name in cute.TORCH_RUNS else ""
            lines.append(f"  {name:20s}  {module}{rule}")
    except KernelError as error:
        lines.append(f"  none: {error}")
    lines += [f"{key:13s} {value}" for key, value in targets.cache_status().items()]
    lines += [f"{part:13s} {text}" for part, text in vllm.status()]
    return "\n".join(lines) + "\n"
