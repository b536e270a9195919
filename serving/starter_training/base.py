"""Stage `base`: the denoiser, and what all diffusion stages share.

Legend: `x` clean latents, `e` noise, `a` = sqrt(alpha_bar_t), `s` = sqrt(1 - alpha_bar_t);
noisy = a x + s e; the network predicts v = a e - s x. The squared error is not weighted, and noisy steps are drawn
more often (t = 1000 u^0.6): there the prompt alone decides the image. (min-SNR weights, arXiv:2303.09556, were
tried first: after 1500 steps the network still ignored the prompt.) Samplers start at the last step
("trailing"), where nearly nothing of x is left, so that flat white backgrounds come out white.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from starter_training.data import TrainingImages
from starter_training.loop import SEED, Loss, StageOutcome, StageRecipe, Trainer
from starter_training.text import WIDTH, build_head, build_text_encoder, embed, spelling_loss, tokenize
from starter_training.vae import scaled_latents

CHANNELS = (48, 96, 144)
NO_PROMPT = 0.1
NOISE_BIAS = 0.6


@dataclass(frozen=True, kw_only=True)
class Studio:
    """What the diffusion stages work with.

    `head` reads images from the text encoder's states. Row `count` of `ids`, one past the names, is the empty
    prompt.
    """

    images: TrainingImages
    vae: AutoencoderKL
    tokenizer: CLIPTokenizer
    encoder: CLIPTextModel
    head: nn.ModuleDict
    unet: UNet2DConditionModel
    latents: Tensor
    ids: Tensor

    @property
    def count(self) -> int:
        """The number of concepts."""
        return len(self.images.names)

    @torch.no_grad()
    def embeddings(self) -> Tensor:
        """Return the embeddings of all `ids`, `float32[count + 1, 77, WIDTH]`, with the encoder's current weights."""
        return torch.cat([embed(self.encoder, ids) for ids in torch.split(self.ids, 64)])


def build_unet() -> UNet2DConditionModel:
    """Return the untrained denoiser; same weights every time."""
    torch.manual_seed(SEED + 2)
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=CHANNELS,
        layers_per_block=1,
        attention_head_dim=(2, 4, 6),
        cross_attention_dim=WIDTH,
        norm_num_groups=16,
    )
    return unet.to(memory_format=torch.channels_last)


def build_scheduler() -> DDIMScheduler:
    """Return the noise schedule of the bundle; the other samplers are made from its configuration."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def build_studio(images: TrainingImages, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> Studio:
    """Return an untrained denoiser and text encoder beside a trained autoencoder, with latents and token ids."""
    return Studio(
        images=images,
        vae=vae,
        tokenizer=tokenizer,
        encoder=build_text_encoder(tokenizer),
        head=build_head(),
        unet=build_unet(),
        latents=scaled_latents(vae, images.twemoji),
        ids=tokenize(tokenizer, [*images.names, ""]),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Clean latents `[b, 4, 16, 16]`, prompts as rows of the studio's `ids`, control images if there are any."""

    latents: Tensor
    prompts: Tensor
    control: Tensor | None = None


Predict = Callable[[Tensor, Tensor, TrainingBatch], Tensor]
Draw = Callable[[torch.Generator], TrainingBatch]


def diffusion_loss(predict: Predict, draw: Draw) -> Loss:
    """Return the v loss. `draw(generator)` gives a batch, `predict(noisy, t, batch)` is the network."""
    alphas = build_scheduler().alphas_cumprod

    def loss(_: int, generator: torch.Generator) -> Tensor:
        batch = draw(generator)
        u = torch.rand(len(batch.latents), generator=generator)
        t = (len(alphas) * u**NOISE_BIAS).long().clamp(max=len(alphas) - 1)
        noise = torch.randn(batch.latents.shape, generator=generator)
        power = alphas[t]
        a, s = power.sqrt()[:, None, None, None], (1 - power).sqrt()[:, None, None, None]
        noisy = (a * batch.latents + s * noise).contiguous(memory_format=torch.channels_last)
        return nn.functional.mse_loss(predict(noisy, t, batch), a * noise - s * batch.latents)

    return loss


def draw_images(studio: Studio, latents: Tensor, batch: int) -> Draw:
    """Draw rows of `latents` with their own prompt, which is left out for one in ten (classifier-free guidance)."""

    def draw(generator: torch.Generator) -> TrainingBatch:
        rows = torch.randint(studio.count, (batch,), generator=generator)
        without = torch.rand(batch, generator=generator) < NO_PROMPT
        return TrainingBatch(latents=latents[rows], prompts=torch.where(without, studio.count, rows))

    return draw


def predicted(studio: Studio) -> Predict:
    """Return the denoiser's prediction from the prompts as the text encoder embeds them now."""
    prompts = studio.embeddings()

    def predict(noisy: Tensor, t: Tensor, batch: TrainingBatch) -> Tensor:
        return torch.as_tensor(studio.unet(noisy, t, prompts[batch.prompts]).sample)

    return predict


def train_text(studio: Studio, recipe: StageRecipe, checkpoint: Path) -> StageOutcome:
    """Train (or resume training) the text encoder of `studio` and its head in place, then freeze them."""
    both = nn.ModuleDict({"encoder": studio.encoder, "head": studio.head})
    loss = spelling_loss(studio.encoder, studio.head, studio.ids, studio.latents, recipe.batch)
    return Trainer(both, recipe, checkpoint).run(loss)


def train_base(studio: Studio, recipe: StageRecipe, checkpoint: Path) -> StageOutcome:
    """Train (or resume training) the denoiser of `studio` in place, then freeze it. The text encoder is frozen."""
    draw = draw_images(studio, studio.latents, recipe.batch)
    return Trainer(studio.unet, recipe, checkpoint).run(diffusion_loss(predicted(studio), draw))
