"""The UNet's halves as prepared programs, LoRA sets as inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait_kernels.executors import PreparedProgram, RowFactors
from plait_serving.diffusion.denoisers.halves import EncoderOutput


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
