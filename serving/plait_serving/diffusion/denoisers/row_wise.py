"""A UNet on torch with LoRA sets as inputs: rows of different sets share a call over its own weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from plait_kernels.executors import Computation
from plait_kernels.executors.torch_program import TorchProgram
from plait_serving.diffusion.denoisers.compiled import CompiledHalves
from plait_serving.diffusion.denoisers.computations import DecoderHalf, EncoderHalf

__all__ = ["row_wise_halves"]


def row_wise_halves(unet: Any) -> CompiledHalves:
    """Return both halves as torch programs that take factors, of a UNet in float32 on a CPU. Nothing is copied."""
    return CompiledHalves(encoder=_program(EncoderHalf(unet)), decoder=_program(DecoderHalf(unet)), live=True)


def _program(half: nn.Module) -> TorchProgram:
    # Inputs and example are for executors that convert.
    return TorchProgram(Computation(module=half.eval(), inputs=(), example=(), takes_factors=True))
