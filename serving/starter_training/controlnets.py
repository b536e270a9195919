"""Stages `edges` and `colors`: a ControlNet each, over the frozen base.

Half of the rows show an image with its colour channels swapped and carry a wrong prompt, a fifth carry none: so the
map decides, whatever the prompt is.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from diffusers import ControlNetModel
from numpy.typing import NDArray
from torch import Tensor

from plait_serving.starter.preprocess import PREPROCESSORS
from starter_training.base import Draw, Studio, TrainingBatch, diffusion_loss
from starter_training.loop import SEED, StageOutcome, StageRecipe, Trainer
from starter_training.vae import scaled_latents

WRONG_PROMPT = 0.5
NO_PROMPT = 0.2


def _control_tensor(maps: NDArray[np.uint8]) -> Tensor:
    """Convert `uint8[n, H, W, 3]` to the `float32[n, 3, H, W]` in 0..1 that ControlNets read."""
    return torch.from_numpy(np.ascontiguousarray(maps)).permute(0, 3, 1, 2).float() / 255


def _draw_controls(studio: Studio, name: str, batch: int) -> Draw:
    orders = list(permutations(range(3)))
    recoloured = [np.ascontiguousarray(studio.images.twemoji[..., order]) for order in orders]
    latents = torch.stack([scaled_latents(studio.vae, images) for images in recoloured])
    preprocess = PREPROCESSORS[name]
    controls = torch.stack([_control_tensor(np.stack([preprocess(p) for p in ps])) for ps in recoloured])

    def draw(generator: torch.Generator) -> TrainingBatch:
        rows = torch.randint(studio.count, (batch,), generator=generator)
        wrong = torch.rand(batch, generator=generator) < WRONG_PROMPT
        order = torch.where(wrong, torch.randint(len(orders), (batch,), generator=generator), 0)
        prompts = torch.where(wrong, torch.randint(studio.count, (batch,), generator=generator), rows)
        prompts[torch.rand(batch, generator=generator) < NO_PROMPT] = studio.count
        return TrainingBatch(latents=latents[order, rows], prompts=prompts, control=controls[order, rows])

    return draw


def train_controlnet(
    studio: Studio, name: str, recipe: StageRecipe, checkpoint: Path
) -> tuple[ControlNetModel, StageOutcome]:
    """Train (or resume training) and return the ControlNet `name`: `edges` or `colors`. It starts as a copy of the
    base's encoder half that adds nothing yet."""
    torch.manual_seed(SEED + 3)
    net = ControlNetModel.from_unet(studio.unet, conditioning_embedding_out_channels=(16, 32, 96))
    net.requires_grad_(True).to(memory_format=torch.channels_last)
    embeddings = studio.embeddings()

    def predict(noisy: Tensor, t: Tensor, batch: TrainingBatch) -> Tensor:
        prompts = embeddings[batch.prompts]
        down, mid = net(noisy, t, prompts, batch.control, return_dict=False)
        made = studio.unet(noisy, t, prompts, down_block_additional_residuals=down, mid_block_additional_residual=mid)
        return torch.as_tensor(made.sample)

    loss = diffusion_loss(predict, _draw_controls(studio, name, recipe.batch))
    return net, Trainer(net, recipe, checkpoint).run(loss)
