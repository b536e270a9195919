"""The parts of a Stable Diffusion 3 or FLUX.1 model, loaded from a diffusers folder.

Anything that could silently make wrong images (missing weights, a transformer with inputs of another kind, quantized
weights) is a `ModelError` that names the file and the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import T5EncoderModel

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


def outline_bundle(
    folder: Path,
    kinds: Mapping[str, Any],
    *,
    may_lack: Collection[str],
    even: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> FlowBundle:
    """Return a folder's parts, of the classes `kinds`, without weights; those of `may_lack` that `model_index.json`
    says are not there are left out. `even`: of its schedule (`Schedules`). Raises `ModelError`."""
    index = read_json(folder / "model_index.json")
    absent = {part for part in may_lack if (index.get(part) or [None])[0] is None}
    found = {part: kind for part, kind in kinds.items() if part not in absent}
    for part in ("scheduler", *found):
        if not (folder / part).is_dir():
            raise ModelError(f"{folder / part}: missing")
    path = folder / "scheduler" / "scheduler_config.json"
    schedules = Schedules.of(read_json(path), path, even=even)
    for part in found:
        _refuse_quantized(folder / part / "config.json")
    # T5 in float16 clips, and makes other images.
    clipping = {part for part, kind in found.items() if kind is T5EncoderModel and dtype is torch.float16}
    bundle = FlowBundle.outline(folder, found, frozenset(clipping), dtype=dtype, device=device, schedules=schedules)
    for each in bundle.parts.values():
        for name, (file, info) in each.files.tensors.items():
            if info.dtype.startswith("F8"):
                raise ModelError(
                    f"{file}: {name} is {info.dtype}: an fp8 checkpoint is not supported; F16, BF16 and F32 are"
                )
    return bundle


def _refuse_quantized(path: Path) -> None:
    """Raise `ModelError` for the weights of a quantized model, by the method's name."""
    method = read_json(path).get("quantization_config")
    if method:
        name = method.get("quant_method", "") if isinstance(method, dict) else method
        raise ModelError(f"{path}: weights quantized by {name} are not supported; F16, BF16 and F32 are")


def check_widths(bundle: FlowBundle, *, channels: int, pooled: int, text: int | None) -> None:
    """Raise `ModelError` for a transformer that does not fit its VAE or text encoders."""
    path, config = bundle.folder / "transformer" / "config.json", bundle.config
    wanted = {"in_channels": channels, "pooled_projection_dim": pooled, "joint_attention_dim": text}
    for key, width in wanted.items():
        if width is not None and config[key] != width:
            raise ModelError(f"{path}: {key} is {config[key]}; the other parts of the model make {width}")
