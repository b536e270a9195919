"""Stages `vae` and `decoder`: the autoencoder, four times smaller in each direction, four channels.

`vae` trains both halves on the two sets of artwork, mirrored and with swapped colours. `decoder` keeps the encoder,
so that latents stay the same, and teaches the other half line drawings, blocks and noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

from plait_serving.starter.preprocess import pixel, sketch
from starter_training.data import TrainingImages
from starter_training.loop import SEED, StageOutcome, StageRecipe, Trainer

LATENT_WEIGHT = 1e-4
SLOPE_WEIGHT = 0.5
LATENT_NOISE = 0.05
DECODER_NOISE = 0.08


def build_vae() -> AutoencoderKL:
    """Return the untrained autoencoder; same weights every time."""
    torch.manual_seed(SEED)
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    )
    return vae.to(memory_format=torch.channels_last)


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Convert `uint8[n, H, W, 3]` to `float32[n, 3, H, W]` in -1..1, channels last."""
    plain = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return plain.contiguous(memory_format=torch.channels_last)


def styles(images: TrainingImages) -> dict[str, NDArray[np.uint8]]:
    """Return the four images of every concept, by style."""
    return {
        "twemoji": images.twemoji,
        "noto": images.noto,
        "sketch": np.stack([sketch(p) for p in images.twemoji]),
        "pixel": np.stack([pixel(p) for p in images.twemoji]),
    }


def _image_loss(y: Tensor, x: Tensor) -> Tensor:
    """Return the absolute and squared error plus the absolute error of the slopes, which keeps outlines sharp."""
    d = y - x
    slopes = (d[:, :, 1:] - d[:, :, :-1]).abs().mean() + (d[:, :, :, 1:] - d[:, :, :, :-1]).abs().mean()
    return d.abs().mean() + 0.5 * (d**2).mean() + SLOPE_WEIGHT * slopes


def _augment(x: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Mirror the images in every second step and swap their colour channels in every third."""
    x = x.flip(3) if step % 2 else x
    x = x[:, torch.randperm(3, generator=generator)] if step % 3 == 0 else x
    return x.contiguous(memory_format=torch.channels_last)


def train_vae(images: TrainingImages, recipe: StageRecipe, checkpoint: Path) -> tuple[AutoencoderKL, StageOutcome]:
    """Train (or resume training) and return the frozen autoencoder, which scales Twemoji's latents to deviation 1."""
    vae = build_vae()
    everything = to_tensor(np.concatenate([images.twemoji, images.noto]))

    def loss(step: int, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(everything), (recipe.batch,), generator=generator)
        x = _augment(everything[rows], step, generator)
        mean = vae.encode(x).latent_dist.mean
        y = vae.decode(mean + LATENT_NOISE * torch.randn(mean.shape, generator=generator)).sample
        return _image_loss(y, x) + LATENT_WEIGHT * torch.as_tensor(mean).square().mean()

    outcome = Trainer(vae, recipe, checkpoint).run(loss)
    spread = encode(vae, to_tensor(images.twemoji)).std()
    vae.register_to_config(scaling_factor=float(1 / spread))
    return vae, outcome


def train_decoder(vae: AutoencoderKL, images: TrainingImages, recipe: StageRecipe, checkpoint: Path) -> StageOutcome:
    """Train the decoder of `vae` in place on all four styles; the encoder is not touched."""
    sets = styles(images)
    everything = to_tensor(np.concatenate([sets["twemoji"], *sets.values()]))
    latents = encode(vae, everything)
    vae.decoder.requires_grad_(True)
    vae.post_quant_conv.requires_grad_(True)

    def loss(_: int, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(everything), (recipe.batch,), generator=generator)
        noise = torch.randn(latents[rows].shape, generator=generator)
        return _image_loss(vae.decode(latents[rows] + DECODER_NOISE * noise).sample, everything[rows])

    return Trainer(vae, recipe, checkpoint).run(loss)


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Return posterior means before scaling, `float32[n, 4, H/4, W/4]`, in slices of 32."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(images, 32)])


def scaled_latents(vae: AutoencoderKL, images: NDArray[np.uint8]) -> Tensor:
    """Return what the denoiser works on: posterior means times the scaling factor."""
    return encode(vae, to_tensor(images)) * float(vae.config.scaling_factor)
