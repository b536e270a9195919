"""The parts of a Stable Diffusion 3 or FLUX.1 model, loaded from a diffusers folder.

Anything that could silently make wrong images (missing weights, a transformer with inputs of another kind, quantized
weights) is a `ModelError` that names the file and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.bundle import Bundle
from plait_serving.diffusion.families.flow.schedules import Schedules
from plait_serving.diffusion.sources.file_kinds import read_json

_PATCH = 2
"""A token is two by two latents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowBundle(Bundle):
    """The parts of one model, and what its scheduler makes of requests."""

    denoiser: ClassVar[str] = "transformer"

    schedules: Schedules

    @property
    def pixels_per_token(self) -> int:
        """Along an edge: widths and heights must be multiples of this."""
        return _PATCH * self.vae_factor

    def tokens(self, width: int, height: int) -> int:
        """Return how many tokens an image of so many pixels is."""
        return (width // self.pixels_per_token) * (height // self.pixels_per_token)


def refuse_quantized(path: Path) -> None:
    """Raise `ModelError` for a configuration of quantized weights, by the method's name."""
    method = read_json(path).get("quantization_config")
    if method:
        name = method.get("quant_method", "") if isinstance(method, dict) else method
        raise ModelError(f"{path}: weights quantized by {name} are not supported; F16, BF16 and F32 are")


def refuse_fp8(bundle: FlowBundle) -> None:
    """Raise `ModelError` for weights in fp8, by the name of one."""
    for part in bundle.parts.values():
        for name, (file, info) in part.files.tensors.items():
            if info.dtype.startswith("F8"):
                raise ModelError(
                    f"{file}: {name} is {info.dtype}: an fp8 checkpoint is not supported; F16, BF16 and F32 are"
                )
