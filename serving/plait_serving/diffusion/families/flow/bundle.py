"""The parts of a Stable Diffusion 3 or FLUX.1 model, loaded from a diffusers folder.

Anything that could silently make wrong images (missing weights, a transformer with inputs of another kind, quantized
weights) is a `ModelError` that names the file and the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import Parts, WeightedPart, tokenizer_of
from plait_serving.diffusion.families.flow.schedules import Schedules
from plait_serving.diffusion.loading import outline_module
from plait_serving.diffusion.sources.file_kinds import read_json
from plait_serving.diffusion.weight_files import WeightFiles, find_weights

OWN = ("transformer", "vae")
"""What no other model has."""
_PATCH = 2
"""A token is two by two latents."""
_T5 = "t5"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowBundle:
    """Modules in eval mode, without gradients, on one device, by part: "transformer" and "vae"; LoRA merges write into
    the parameters. In an outline they have no weights, and there are the text encoders, too; `parts`: what those and
    all others are loaded from. `tokenizers` by text encoder."""

    folder: Path
    modules: Mapping[str, Any]
    tokenizers: Mapping[str, Any]
    schedules: Schedules
    dtype: torch.dtype
    device: torch.device
    parts: Parts = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The transformer's configuration."""
        return self.modules["transformer"].config

    @property
    def vae(self) -> Any:
        """The VAE; its `config` has the factor and the shift of latents."""
        return self.modules["vae"]

    @property
    def clips(self) -> Parts:
        """The text encoders that LoRAs may change."""
        return {name: part for name, part in self.parts.items() if _text_kind(part.config) not in ("", _T5)}

    @property
    def readers(self) -> Parts:
        """The others."""
        return {name: part for name, part in self.parts.items() if _text_kind(part.config) == _T5}

    @property
    def lora_components(self) -> dict[str, nn.Module]:
        """All that LoRAs may change, of an outline."""
        return {part: self.modules[part] for part in ("transformer", *self.clips)}

    @property
    def pixels_per_latent(self) -> int:
        """Along an edge."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def pixels_per_token(self) -> int:
        """Along an edge: widths and heights must be multiples of this."""
        return _PATCH * self.pixels_per_latent

    @property
    def decoding_bytes_per_pixel(self) -> int:
        """The memory that decoding an image takes: the decoder's last level has full size and twice the channels of the
        configuration's first, about four times over."""
        return 4 * 2 * int(self.vae.config.block_out_channels[0]) * self.dtype.itemsize

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return `(c, h, w)` of one image's latents."""
        factor = self.pixels_per_latent
        return int(self.vae.config.latent_channels), height // factor, width // factor

    def tokens(self, width: int, height: int) -> int:
        """Return how many tokens an image of so many pixels is."""
        return (width // self.pixels_per_token) * (height // self.pixels_per_token)

    def encode(self, pixels: torch.Tensor) -> Any:
        """Return the VAE's distribution of one image, `float32 (1, 3, H, W)` in [-1, 1]."""
        return self.vae.encode(pixels.to(device=self.device, dtype=self.dtype)).latent_dist

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode `(n, c, h, w)` to `float32 (n, 3, H, W)` in [0, 1], one image at a time.

        diffusers' inpainting pipeline for SD3 leaves the shift out here, by mistake; this does not.
        """
        scaled = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        images = [self.vae.decode(scaled[i : i + 1], return_dict=False)[0] for i in range(len(scaled))]
        return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)


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
    files = {part: (_weights(folder / part), _dtype(kind, dtype)) for part, kind in found.items()}
    modules = {part: outline_module(kind, *files[part]) for part, kind in found.items()}
    return FlowBundle(
        folder=folder,
        modules=modules,
        tokenizers={
            part: tokenizer_of(folder, part, T5TokenizerFast if kind == _T5 else CLIPTokenizer)
            for part, kind in ((part, _text_kind(module.config)) for part, module in modules.items())
            if kind
        },
        schedules=schedules,
        dtype=dtype,
        device=device,
        parts={part: WeightedPart(kind, *files[part], modules[part].config) for part, kind in found.items()},
    )


def loaded(outline: FlowBundle) -> FlowBundle:
    """Return the parts with their weights, but the text encoders. Raises `ModelError`."""
    own = {name: outline.parts[name] for name in OWN}
    return replace(outline, modules={name: part.load(outline.device) for name, part in own.items()})


def _text_kind(config: Any) -> str:
    """Return the kind of a text encoder; nothing for what reads no text."""
    return str(getattr(config, "model_type", ""))


def _dtype(kind: Any, dtype: torch.dtype) -> torch.dtype:
    """Return what a part computes in: T5 in float16 clips, and makes other images."""
    return torch.float32 if kind is T5EncoderModel and dtype is torch.float16 else dtype


def _weights(folder: Path) -> WeightFiles:
    """Return a part's weights. Raises `ModelError` for those of a quantized model, by the method's name."""
    method = read_json(folder / "config.json").get("quantization_config")
    if method:
        name = method.get("quant_method", "") if isinstance(method, dict) else method
        raise ModelError(
            f"{folder / 'config.json'}: weights quantized by {name} are not supported; F16, BF16 and F32 are"
        )
    files = find_weights(folder)
    for name, (path, info) in files.tensors.items():
        if info.dtype.startswith("F8"):
            raise ModelError(
                f"{path}: {name} is {info.dtype}: an fp8 checkpoint is not supported; F16, BF16 and F32 are"
            )
    return files


def check_widths(bundle: FlowBundle, *, channels: int, pooled: int, text: int | None) -> None:
    """Raise `ModelError` for a transformer that does not fit its VAE or text encoders."""
    path, config = bundle.folder / "transformer" / "config.json", bundle.config
    wanted = {"in_channels": channels, "pooled_projection_dim": pooled, "joint_attention_dim": text}
    for key, width in wanted.items():
        if width is not None and config[key] != width:
            raise ModelError(f"{path}: {key} is {config[key]}; the other parts of the model make {width}")
