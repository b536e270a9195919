"""What a GPU is, and what plait asks of one: the only place that tells devices apart by their kind, beside CUDA graphs.

Any device that is not the CPU counts, through the module that torch registers for its kind: what is said here of its
caching allocator holds for CUDA's, and others have it too.
"""

from __future__ import annotations

from typing import Any

import torch


def is_gpu(device: torch.device | str) -> bool:
    """Return whether a device computes beside the CPU, in memory of its own."""
    return torch.device(device).type not in ("cpu", "meta")


def default_device() -> str:
    """Return what "auto" means on this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was given to do."""
    if is_gpu(device):
        _module(device).synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back to a GPU what torch keeps of it without using it."""
    if is_gpu(device):
        _module(device).empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return what can still be allocated on a GPU: what is free, and what torch keeps there without using it."""
    module = _module(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def allocated_bytes(device: torch.device) -> int:
    """Return what the tensors of this process take of a GPU."""
    return int(_module(device).memory_allocated(device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
