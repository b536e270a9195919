"""A UNet on a GPU: both halves as graphs over its own weights."""

from __future__ import annotations

from typing import Any

from plait_kernels.executors.graphs import Capture, GraphProgram
from plait_serving.diffusion.denoisers.compiled import CompiledHalves
from plait_serving.diffusion.denoisers.computations import DecoderHalf, EncoderHalf

__all__ = ["graphed_halves"]


def graphed_halves(unet: Any, capture: Capture) -> CompiledHalves:
    """Return both halves, captured by `capture` when a shape recurs. They read the UNet's weights where they are."""
    return CompiledHalves(
        encoder=GraphProgram(EncoderHalf(unet).eval(), capture, name="the UNet's first half"),
        decoder=GraphProgram(DecoderHalf(unet).eval(), capture, name="the UNet's second half"),
        live=True,
    )
