"""The UNet's halves as prepared programs, LoRA sets as inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait_kernels.executors import Computation, PreparedProgram, RowFactors
from plait_kernels.executors.graphs import GraphMemory, GraphProgram
from plait_kernels.executors.torch_program import TorchProgram
from plait_serving.diffusion.families.preparation import GRAPH_PATIENCE
from plait_serving.diffusion.families.unet.computations import DecoderHalf, EncoderHalf
from plait_serving.diffusion.families.unet.halves import EncoderOutput

_ENCODED = ("sample", "embedding", "text")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledHalves:
    """Both halves of one UNet. Compute thread only: a half's output lives until the next call.

    `live`: they read the UNet's own weights, so LoRA sets that are merged into those hold for them, too. `offered`:
    they run calls whose LoRA sets are inputs, torch runs all others.
    """

    encoder: PreparedProgram
    decoder: PreparedProgram
    live: bool = False
    offered: bool = False

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
    encoder, decoder = _program(EncoderHalf(unet)), _program(DecoderHalf(unet))
    return CompiledHalves(encoder=encoder, decoder=decoder, live=True, offered=True)


def _program(half: nn.Module) -> TorchProgram:
    # Inputs and example are for executors that convert.
    return TorchProgram(Computation(module=half.eval(), inputs=(), example=(), takes_factors=True))


def graphed_halves(unet: Any, memory: GraphMemory) -> CompiledHalves:
    """Return both halves, captured when a shape recurs. They read the UNet's weights where they are, and the second
    what the first has written."""
    buffers = memory.buffers()
    encoder = GraphProgram(
        EncoderHalf(unet).eval(),
        buffers,
        name="the UNet's first half",
        inputs=lambda _: _ENCODED,
        outputs=_between,
        pads=True,
        patience=GRAPH_PATIENCE,
    )
    decoder = GraphProgram(
        DecoderHalf(unet).eval(),
        buffers,
        name="the UNet's second half",
        inputs=lambda many: ("mid", *_ENCODED[1:], *_between(many - 2)[:-1]),
        pads=True,
        patience=GRAPH_PATIENCE,
    )
    return CompiledHalves(encoder=encoder, decoder=decoder, live=True)


def _between(many: int) -> tuple[str, ...]:
    """Return the names of what the first half leaves for the second."""
    return (*(f"skip.{i}" for i in range(many - 1)), "mid")
