"""Stages `noto`, `sketch` and `pixel`: low-rank changes of the frozen base.

First the text encoder learns to spell the new image (as in stage `text`, against the same head), then the denoiser
to draw it. While training, a layer's weight is W0 + B A, computed once a step, which on a small network is cheaper
than a second branch. Rank and alpha are equal, so the stored factors need no scale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from starter_training.base import Studio, TrainingBatch, diffusion_loss, draw_images
from starter_training.loop import SEED, Loss, StageOutcome, Trainer, load_average
from starter_training.plan import Plan
from starter_training.text import spelling_loss
from starter_training.vae import scaled_latents, styles

Fitted = tuple[dict[str, Tensor], StageOutcome]
# Noto's images are new and need room; the two others change how known images are drawn.
UNET_RANKS = {"noto": 20, "sketch": 4, "pixel": 4}
TEXT_RANKS = {"noto": 48, "sketch": 32, "pixel": 16}
UNET_LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
)
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class LowRank(nn.Module):
    """Adds `up @ down` to a weight `[out, in]` or `[out, in, k, k]`; starts by adding nothing."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = weight.shape
        inputs = weight[0].numel()
        self.down = nn.Parameter((torch.rand(rank, inputs, generator=generator) * 2 - 1) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the changed weight, same shape and memory layout."""
        changed = weight + (self.up @ self.down).view(self.shape)
        return changed.contiguous(memory_format=torch.channels_last) if changed.dim() == 4 else changed

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return `up` and `down` in the shapes that LoRA files use: convolutions keep their kernel in `down`."""
        up, down = self.up.detach().clone(), self.down.detach().clone()
        if len(self.shape) == 2:
            return up, down
        return up[:, :, None, None], down.view(-1, *self.shape[1:])


def _layers(module: nn.Module, endings: tuple[str, ...]) -> list[str]:
    return [name for name, _ in module.named_modules() if name.endswith(tuple("." + end for end in endings))]


@contextmanager
def low_rank(module: nn.Module, endings: tuple[str, ...], rank: int) -> Iterator[dict[str, LowRank]]:
    """Make the layers of `module` with these names trainable within the context; after it they keep the change."""
    generator = torch.Generator().manual_seed(SEED + 4)
    added: dict[str, LowRank] = {}
    for name in _layers(module, endings):
        layer = module.get_submodule(name)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        added[name] = LowRank(weight, rank, generator)
        parametrize.register_parametrization(layer, "weight", added[name])
    try:
        yield added
    finally:
        for name in added:
            parametrize.remove_parametrizations(module.get_submodule(name), "weight")


def _fit(added: dict[str, LowRank], trainer: Callable[[nn.Module], tuple[Trainer, Loss]], prefix: str) -> Fitted:
    """Train the added factors, leave their averages in place and return them in PEFT's names."""
    # Names with dots are not allowed in a ModuleDict.
    module = nn.ModuleDict({name.replace(".", "/"): part for name, part in added.items()})
    loop, loss = trainer(module)
    outcome = loop.run(loss)
    load_average(module, outcome.weights)
    tensors: dict[str, Tensor] = {}
    for name, part in added.items():
        up, down = part.factors()
        tensors[f"{prefix}.{name}.lora_A.weight"], tensors[f"{prefix}.{name}.lora_B.weight"] = down, up
    return tensors, outcome


def train_lora(studio: Studio, name: str, plan: Plan, work: Path) -> tuple[dict[str, Tensor], dict[str, StageOutcome]]:
    """Train (or resume training) LoRA `name`; return its tensors in PEFT's names, and the outcomes of its two stages.

    `studio` is not changed: the work is done on copies of its text encoder and denoiser.
    """
    latents = scaled_latents(studio.vae, styles(studio.images)[name])
    own = replace(studio, encoder=copy.deepcopy(studio.encoder), unet=copy.deepcopy(studio.unet))
    text, image = plan[f"{name}_text"], plan[name]
    with low_rank(own.encoder, TEXT_LAYERS, TEXT_RANKS[name]) as added:
        spelling = spelling_loss(own.encoder, own.head, own.ids, latents, text.batch)
        words, first = _fit(
            added, lambda m: (Trainer(f"{name}_text", m, text, work / f"{name}_text.pt"), spelling), "text_encoder"
        )
    prompts = own.embeddings()

    def predict(noisy: Tensor, t: Tensor, batch: TrainingBatch) -> Tensor:
        return torch.as_tensor(own.unet(noisy, t, prompts[batch.prompts]).sample)

    with low_rank(own.unet, UNET_LAYERS, UNET_RANKS[name]) as added:
        drawing = diffusion_loss(predict, draw_images(own, latents, image.batch))
        strokes, second = _fit(added, lambda m: (Trainer(name, m, image, work / f"{name}.pt"), drawing), "unet")
    return words | strokes, {f"{name}_text": first, name: second}


def to_kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same LoRA in kohya's names, with an `alpha` (equal to the rank) for every layer."""
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
    made: dict[str, Tensor] = {}
    for key, down in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        full = key.removesuffix(".lora_A.weight")
        part, _, layer = full.partition(".")
        name = prefixes[part] + layer.replace(".", "_")
        made[f"{name}.lora_down.weight"] = down
        made[f"{name}.lora_up.weight"] = tensors[f"{full}.lora_B.weight"]
        made[f"{name}.alpha"] = torch.tensor(float(down.shape[0]))
    return made
