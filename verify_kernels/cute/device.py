"""What the host side asks of a device."""

from __future__ import annotations

import functools

import torch

H200_MULTIPROCESSORS = 132


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; what is no GPU (the meta device, where passes only ask for kernels) counts as an H200."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
