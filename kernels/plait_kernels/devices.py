"""What a GPU is, and what plait asks of one: the only place that tells devices apart by their kind, beside CUDA graphs.

Any device that is not the CPU counts, through the module that torch registers for its kind: what is said here of its
caching allocator holds for CUDA's, and others have it too.

After a device error a CUDA context answers every call with the same error, so that only a new process helps. torch
raises `AcceleratorError` for those since 2.8, and a plain RuntimeError for errors of cuBLAS and cuDNN, and for host
memory; there the text is the only sign (c10/cuda/CUDAException.cpp, aten/src/ATen/cuda/Exceptions.h).
"""

from __future__ import annotations

from typing import Any

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "out of memory")
_LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "hardware stack error",
    "uncorrectable",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, the device's or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Return whether nothing that this process asks of its device can succeed any more."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return any(text in str(error) for text in _LOST)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
