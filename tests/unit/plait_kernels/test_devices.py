"""Memory that ran out is a matter of one request; a lost device is the end of its process."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.devices import is_device_lost, is_out_of_memory

LOST = [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported asynchronously",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
]
FULL = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes",
    "CUDA error: out of memory",
]


@pytest.mark.parametrize("text", LOST)
def test_a_device_that_is_lost_is_told_by_its_text(text: str) -> None:
    """As torch writes it, in whichever class."""
    for kind in (RuntimeError, torch.AcceleratorError):
        assert is_device_lost(kind(text))
        assert not is_out_of_memory(kind(text))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), MemoryError(), *map(RuntimeError, FULL)])
def test_memory_that_ran_out_is_not_a_lost_device(error: Exception) -> None:
    """A smaller batch may fit."""
    assert is_out_of_memory(error)
    assert not is_device_lost(error)


@pytest.mark.parametrize("error", [ValueError(LOST[0]), RuntimeError("shape mismatch"), KeyError("out of memory")])
def test_other_errors_are_neither(error: Exception) -> None:
    """A message of our own may quote anything."""
    assert not is_device_lost(error)
    assert not is_out_of_memory(error)
