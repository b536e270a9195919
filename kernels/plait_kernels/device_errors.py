"""Which errors of torch mean that memory ran out, and which that the device is lost to this process.

After a device error a CUDA context answers every call with the same error, so that only a new process helps. torch
raises `AcceleratorError` for those since 2.8, and a plain RuntimeError for errors of cuBLAS and cuDNN, and for host
memory; there the text is the only sign (c10/cuda/CUDAException.cpp, aten/src/ATen/cuda/Exceptions.h).
"""

from __future__ import annotations

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
