"""The floor of a step: the time below which this machine cannot do it, whatever the code.

floor = max(bytes that must be read / read bandwidth, flops / matrix rate). Bandwidth and rate are measured here (about
a second), or taken from configs/hardware for a GPU that was measured with better tools than a torch reduction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_runtime.configs import read_yaml
from verify_kernels import ops
from verify_kernels.quantized import Quantized

HARDWARE = Path(__file__).resolve().parent.parent / "configs" / "hardware"


@dataclass(frozen=True)
class Ceilings:
    """read_bandwidth in GB/s (1e9 bytes), matmul in TFLOP/s of the run's dtype; source says where they come from."""

    read_bandwidth_gbps: float
    matmul_tflops: float
    source: str


@dataclass(frozen=True)
class ModelCost:
    """What one pass of a model reads and computes.

    dense_bytes: weights that every pass reads. expert_bytes: all experts of all layers; a pass reads those that it
    touches. flops_per_token: 2 per weight that a token meets.
    kv_bytes_per_token: keys and values of one context token, all layers.
    """

    dense_bytes: int
    expert_bytes: int
    num_experts: int
    experts_per_token: int
    flops_per_token: int
    kv_bytes_per_token: int

    def bytes_of_step(self, tokens: float, context_tokens: float, experts: float | None = None) -> float:
        """experts: different ones that a layer touches, mean over layers; None: as many as uniform routing would."""
        share = 0.0
        if self.num_experts:
            uniform = 1 - (1 - self.experts_per_token / self.num_experts) ** tokens
            share = uniform if experts is None else experts / self.num_experts
        return self.dense_bytes + share * self.expert_bytes + context_tokens * self.kv_bytes_per_token


def floor_ms(ceilings: Ceilings, passes: list[tuple[ModelCost, float, float, float | None]]) -> float:
    """Floor of passes that run one after the other, each (cost, tokens, context tokens, experts of a layer; see
    `ModelCost.bytes_of_step`), in milliseconds."""
    return sum(
        1e3
        * max(
            cost.bytes_of_step(tokens, context, experts) / (ceilings.read_bandwidth_gbps * 1e9),
            cost.flops_per_token * tokens / (ceilings.matmul_tflops * 1e12),
        )
        for cost, tokens, context, experts in passes
    )


def weights(model: Any) -> Iterator[tuple[str, Tensor | Quantized]]:
    """(path, tensor) of every distinct floating-point tensor, and of every quantised one, that a model holds in public
    attributes, lists or dictionaries; private ones are tables and buffers."""
    seen: set[int] = set()

    def walk(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        if id(value) in seen:
            return
        if isinstance(value, (Tensor, Quantized)):
            seen.add(id(value))
            if isinstance(value, Quantized) or value.is_floating_point():
                yield path, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from walk(f"{path}.{i}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(f"{path}.{key}", item)
        elif (
            hasattr(value, "__dict__") and not isinstance(value, type) and not callable(getattr(value, "__get__", None))
        ):
            seen.add(id(value))
            for key, item in vars(value).items():
                if key.startswith("_"):
                    continue
                yield from walk(f"{path}.{key}" if path else key, item)

    storages: set[int] = set()
    for path, tensor in walk("", model):
        if tensor.data_ptr() not in storages:  # tied embeddings are one tensor, read once
            storages.add(tensor.data_ptr())
            yield path, tensor


def model_cost(model: Any, kv_bytes_per_token: int) -> ModelCost:
    """Cost of a model, from the tensors it holds: matrices [N, K], experts [E, N, K]. An embedding that is not also
    the LM head is not read as a whole and does not count; nor do vectors (norms, RoPE tables), which are small."""
    dense = experts = flops = num_experts = 0
    config = getattr(model, "config", None)
    per_token = next(
        (getattr(config, name) for name in ("num_experts_per_tok", "experts_per_token") if getattr(config, name, None)),
        0,
    )
    found = [(path, w) for path, w in weights(model) if w.dim() in (2, 3)]
    untied = any("lm_head" in path for path, _ in found)
    for path, w in found:
        if untied and "embed" in path:
            continue
        if w.dim() == 3:
            num_experts = w.shape[0]
            experts += w.nbytes
            flops += 2 * w.numel() // num_experts * per_token
        else:
            dense += w.nbytes
            flops += 2 * w.numel()
    return ModelCost(dense, experts, num_experts, per_token, flops, kv_bytes_per_token)


def known_hardware(gpu: str) -> dict[str, Any] | None:
    """The entry of configs/hardware whose `gpu` is part of the device's name and whose ceilings were measured."""
    for path in sorted(HARDWARE.glob("*.yaml")):
        entry = read_yaml(path)
        if entry["gpu"] in gpu and "read_bandwidth_gbps" in entry:
            return entry | {"file": f"configs/hardware/{path.name}"}
    return None


def measure_ceilings(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> Ceilings:
    """Read bandwidth and matrix rate of a device: the best of several runs within about a second."""
    name = str(dtype).removeprefix("torch.")
    known = known_hardware(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known and name in known["matmul_tflops"]:
        return Ceilings(known["read_bandwidth_gbps"], known["matmul_tflops"][name], f"from {known['file']}")

    def best(run: Any) -> float:
        run()
        times, end = [], time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    megabytes = 256 if device.type == "cpu" else 2048
    data = torch.arange(megabytes << 17, device=device)
    bandwidth = data.numel() * 8 / best(data.sum) / 1e9
    del data
    n = 1024 if device.type == "cpu" else 8192
    # On a CPU the best rate may be torch's in float32 or the project's own kernel: the floor takes the best of all.
    rates = []
    for kind in {dtype, torch.float32} if device.type == "cpu" else {dtype}:
        a = torch.randn(n, n, device=device).to(kind)
        for product in (torch.nn.functional.linear, ops.linear):
            rates.append(2 * n**3 / best(lambda: product(a, a)) / 1e12)
    return Ceilings(bandwidth, max(rates), "measured on this machine before the run")
