"""The parts of a model: read from a diffusers folder without their weights, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import CLIPTokenizer, T5TokenizerFast

from plait_kernels.executors import PreparedProgram
from plait_serving.diffusion.families.encoders import Parts, WeightedPart, tokenizer_of
from plait_serving.diffusion.loading import outline_module
from plait_serving.diffusion.lora.key_formats import is_text
from plait_serving.diffusion.protocols import EncodedImage
from plait_serving.diffusion.weight_files import find_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """Modules in eval mode, without gradients, on one device, by part. Frozen; LoRA merges write into the parameters.

    `denoiser`: the part that steps run. In an outline the modules have no weights, and there are the text encoders,
    too, which never have; `parts`: what all are loaded from. `tokenizers` by text encoder.
    """

    denoiser: ClassVar[str]

    folder: Path
    modules: Mapping[str, Any]
    tokenizers: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    parts: Parts = field(default_factory=dict)

    @classmethod
    def outline(
        cls,
        folder: Path,
        kinds: Mapping[str, Any],
        wide: frozenset[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        **own: Any,
    ) -> Self:
        """Read the parts of a folder, of the classes `kinds`; those of `wide` compute in float32. `own`: what a family
        has beside. Raises `ModelError`."""
        files = {part: (find_weights(folder / part), torch.float32 if part in wide else dtype) for part in kinds}
        modules = {part: outline_module(kind, *files[part]) for part, kind in kinds.items()}
        parts = {part: WeightedPart(kind, *files[part], modules[part].config) for part, kind in kinds.items()}
        readers = {part: T5TokenizerFast if _is_t5(parts[part]) else CLIPTokenizer for part in kinds if is_text(part)}
        return cls(
            folder=folder,
            modules=modules,
            tokenizers={part: tokenizer_of(folder, part, kind) for part, kind in readers.items()},
            dtype=dtype,
            device=device,
            parts=parts,
            **own,
        )

    def loaded(self, *, mapped: frozenset[str] = frozenset()) -> Self:
        """Return the parts with their weights, but the text encoders. `mapped`: those that stay as the files hold them.
        Raises `ModelError`."""
        modules = {
            name: part.mapped() if name in mapped else part.load(self.device)
            for name, part in self.parts.items()
            if not is_text(name)
        }
        return replace(self, modules=modules)

    @property
    def config(self) -> Any:
        """The configuration of the part that steps run."""
        return self.modules[self.denoiser].config

    @property
    def vae(self) -> Any:
        """The VAE; its `config` says how latents are scaled."""
        return self.modules["vae"]

    @property
    def clips(self) -> Parts:
        """The text encoders that LoRAs may change."""
        return {name: part for name, part in self.parts.items() if is_text(name) and not _is_t5(part)}

    @property
    def readers(self) -> Parts:
        """The others."""
        return {name: part for name, part in self.parts.items() if is_text(name) and _is_t5(part)}

    @property
    def lora_components(self) -> dict[str, nn.Module]:
        """All that LoRAs may change, of an outline."""
        return {part: self.modules[part] for part in (self.denoiser, *self.clips)}

    @property
    def weights_bytes(self) -> int:
        """What all but the text encoders take in memory."""
        return sum(part.nbytes for name, part in self.parts.items() if not is_text(name))

    @property
    def vae_factor(self) -> int:
        """Pixels per latent, along an edge."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def decoding_bytes_per_pixel(self) -> int:
        """The memory that decoding an image takes: the decoder's last level has full size and twice the channels of the
        configuration's first, about four times over (3.8 to 4.7 KB a pixel were measured for SD 1.5 in float32). A step
        of the UNet takes less."""
        return 4 * 2 * int(self.vae.config.block_out_channels[0]) * self.parts["vae"].dtype.itemsize

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return `(c, h, w)` of one image's latents; pixels are rounded down to whole latents, like in diffusers."""
        return int(self.vae.config.latent_channels), height // self.vae_factor, width // self.vae_factor

    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Return what the VAE, run by torch, makes of one image, `float32 (1, 3, H, W)` in [-1, 1].

        Latents are scaled as in diffusers' pipelines; SDXL's may have a mean and a deviation per channel. The XL
        Inpaint pipelines leave those out here; the Img2Img pipelines have them in both places, as this has.
        """
        config = self.vae.config
        found = self.vae.encode(pixels.to(device=self.device, dtype=self.dtype).to(self.parts["vae"].dtype)).latent_dist
        centre: torch.Tensor | float = float(config.shift_factor or 0.0)
        factor: torch.Tensor | float = float(config.scaling_factor)
        if config.latents_mean is not None:
            centre, spread = _by_channel(config, device=self.device, dtype=self.dtype)
            factor = config.scaling_factor / spread
        return EncodedImage(mean=found.mean, deviation=found.std, centre=centre, factor=factor, dtype=self.dtype)

    def decode(self, latents: torch.Tensor, program: PreparedProgram | None = None) -> torch.Tensor:
        """Decode `(n, c, h, w)` to `float32 (n, 3, H, W)` in [0, 1]. `program`: the VAE's decoder prepared by an
        executor; None: torch runs the VAE.

        Images are decoded one by one: a batch of 8 needed 34.7 GB at 1024x1024, and an image must not depend on its
        neighbours. diffusers' inpainting pipeline for SD3 leaves the shift out here, by mistake; this does not.
        """
        config, latents = self.vae.config, latents.to(device=self.device, dtype=self.parts["vae"].dtype)
        if config.latents_mean is None:
            scaled = latents / config.scaling_factor
        else:
            centre, spread = _by_channel(config, device=latents.device, dtype=latents.dtype)
            scaled = latents * spread / config.scaling_factor + centre
        if config.shift_factor:
            scaled = scaled + config.shift_factor
        rows = [scaled[i : i + 1] for i in range(len(scaled))]
        images = [
            self.vae.decode(row, return_dict=False)[0] if program is None else program.run([row])[0] for row in rows
        ]
        return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)


def _by_channel(config: Any, **where: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation of a VAE's latents, each `(1, c, 1, 1)`."""
    mean, deviation = (
        torch.tensor(each, **where).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std)
    )
    return mean, deviation


def _is_t5(part: WeightedPart) -> bool:
    return str(part.config.model_type) == "t5"
