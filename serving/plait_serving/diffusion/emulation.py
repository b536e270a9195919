"""What bfloat16 costs on a CPU that has no instructions for it: measured where it was asked for, and said once."""

from __future__ import annotations

import functools
import logging
import timeit

import torch
from torch import nn

from plait_kernels.cores import has_bfloat16, instruction_set

_log = logging.getLogger(__name__)

_CHANNELS, _EDGE = 128, 16
"""A convolution of which AVX2 computes 20 in bfloat16 in a second, and more than 1,000 in float32 (torch 2.13)."""


@functools.cache
def warn_of_emulation() -> None:
    """Log, once a process, how much longer a convolution takes in bfloat16 if the CPU has no instructions for it."""
    if has_bfloat16():
        return
    narrow_ms, wide_ms = (_convolution_ms(dtype) for dtype in (torch.bfloat16, torch.float32))
    _log.warning(
        "images.dtype is bfloat16, for which this CPU (%s) has no instructions: a convolution takes %.3g ms here, in "
        "float32 %.3g ms; leave the dtype out",
        instruction_set(),
        narrow_ms,
        wide_ms,
    )


@torch.inference_mode()
def _convolution_ms(dtype: torch.dtype) -> float:
    convolution = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, dtype=dtype)
    sample = torch.zeros(1, _CHANNELS, _EDGE, _EDGE, dtype=dtype)
    _, *taken_s = timeit.repeat(lambda: convolution(sample), number=1, repeat=4)  # the first one chooses and compiles
    return min(taken_s) * 1e3
