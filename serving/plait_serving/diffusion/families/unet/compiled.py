"""The UNet's halves as prepared programs, LoRA sets as inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait_kernels.executors import Computation, PreparedProgram, RowFactors
from plait_kernels.executors.graphs import Capture, GraphProgram
from plait_kernels.executors.torch_program import TorchProgram
from plait_serving.diffusion.families.unet.computations import DecoderHalf, EncoderHalf
from plait_serving.diffusion.families.unet.halves import EncoderOutput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledHalves:
    """Both halves of one UNet. Compute thread only: a half's output lives until the next call.

    `live`: they read the UNet's own weights, so LoRA sets that are merged into those hold for them, too.
    """

    encoder: PreparedProgram
    decoder: PreparedProgram
    live: bool = False

    @property
    def settled(self) -> bool:
        """Whether the last calls of both halves were as fast as such calls will be."""
        return self.encoder.settled and self.decoder.settled

    def encode(
        self, sample: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor, factors: RowFactors | None
    ) -> EncoderOutput:
        """Compute the first half; the skips may be added to in place."""
        *skips, mid = self.encoder.run([sample, embedding, text], factors, copy=False)
        return EncoderOutput(mid, tuple(skips), embedding, text)

    def decode(self, half: EncoderOutput, factors: RowFactors | None) -> torch.Tensor:
        """Compute the second half: the model output `(R, c, h, w)`, in memory of its own."""
        return self.decoder.run([half.sample, half.embedding, half.text, *half.skips], factors)[0]


def row_wise_halves(unet: Any) -> CompiledHalves:
    """Return both halves as torch programs that take factors, of a UNet in float32 on a CPU. Nothing is copied."""
    return CompiledHalves(encoder=_program(EncoderHalf(unet)), decoder=_program(DecoderHalf(unet)), live=True)


def _program(half: nn.Module) -> TorchProgram:
    # Inputs and example are for executors that convert.
    return TorchProgram(Computation(module=half.eval(), inputs=(), example=(), takes_factors=True))


def graphed_halves(unet: Any, capture: Capture) -> CompiledHalves:
    """Return both halves, captured by `capture` when a shape recurs. They read the UNet's weights where they are."""
    return CompiledHalves(
        encoder=GraphProgram(EncoderHalf(unet).eval(), capture, name="the UNet's first half"),
        decoder=GraphProgram(DecoderHalf(unet).eval(), capture, name="the UNet's second half"),
        live=True,
    )
