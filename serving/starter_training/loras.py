"""Stages `noto`, `sketch` and `pixel`: low-rank changes of the frozen base.

First the text encoder learns to spell the new image (as in stage `text`, against the same head), then the denoiser
to draw it. While training, a layer's weight is W0 + B A, computed once a step, which on a small network is cheaper
than a second branch. Rank and alpha are equal, so the stored factors need no scale.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from starter_training.base import Studio, diffusion_loss, draw_images, predicted
from starter_training.loop import SEED, Loss, Plan, StageOutcome, StageRecipe, Trainer
from starter_training.text import spelling_loss
from starter_training.vae import scaled_latents, styles

Fitted = tuple[dict[str, Tensor], StageOutcome]
# Noto's images are new and need room; the two others change how known images are drawn.
RANKS = {
    "unet": {"noto": 20, "sketch": 4, "pixel": 4},
    "text_encoder": {"noto": 48, "sketch": 32, "pixel": 16},
}
LAYERS = {
    "unet": (
        *(".to_q", ".to_k", ".to_v", ".to_out.0", ".proj_in", ".proj_out", ".ff.net.0.proj", ".ff.net.2"),
        *(".conv1", ".conv2", ".conv_shortcut", ".time_emb_proj"),
    ),
    "text_encoder": (".q_proj", ".k_proj", ".v_proj", ".out_proj", ".fc1", ".fc2"),
}


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


def _fit(module: nn.Module, part: str, name: str, loss: Loss, *, recipe: StageRecipe, checkpoint: Path) -> Fitted:
    """Train low-rank changes of a part, which keeps them; return them in PEFT's names."""
    generator = torch.Generator().manual_seed(SEED + 4)
    changes: dict[str, tuple[nn.Module, LowRank]] = {}
    for each, layer in [found for found in module.named_modules() if found[0].endswith(LAYERS[part])]:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        changes[each] = layer, LowRank(weight, RANKS[part][name], generator)
        parametrize.register_parametrization(layer, "weight", changes[each][1])
    # Names with dots are not allowed in a ModuleDict.
    added = nn.ModuleDict({each.replace(".", "/"): change for each, (_, change) in changes.items()})
    outcome = Trainer(added, recipe, checkpoint).run(loss)
    tensors: dict[str, Tensor] = {}
    for each, (layer, change) in changes.items():
        parametrize.remove_parametrizations(layer, "weight")
        tensors[f"{part}.{each}.lora_B.weight"], tensors[f"{part}.{each}.lora_A.weight"] = change.factors()
    return tensors, outcome


def train_lora(studio: Studio, name: str, plan: Plan, work: Path) -> tuple[dict[str, Tensor], dict[str, StageOutcome]]:
    """Train (or resume training) LoRA `name`; return its tensors in PEFT's names, and the outcomes of its two stages.

    `studio` is not changed: the work is done on copies of its text encoder and denoiser.
    """
    latents = scaled_latents(studio.vae, styles(studio.images)[name])
    own = replace(studio, encoder=copy.deepcopy(studio.encoder), unet=copy.deepcopy(studio.unet))
    text, image = plan[f"{name}_text"], plan[name]
    spelling = spelling_loss(own.encoder, own.head, own.ids, latents, text.batch)
    words, first = _fit(own.encoder, "text_encoder", name, spelling, recipe=text, checkpoint=work / f"{name}_text.pt")
    drawing = diffusion_loss(predicted(own), draw_images(own, latents, image.batch))
    strokes, second = _fit(own.unet, "unet", name, drawing, recipe=image, checkpoint=work / f"{name}.pt")
    return words | strokes, {f"{name}_text": first, name: second}


def to_kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same LoRA in kohya's names, with an `alpha` (equal to the rank) for every layer."""
    prefixes, factors = {"unet": "lora_unet_", "text_encoder": "lora_te_"}, {"lora_A": "lora_down", "lora_B": "lora_up"}
    made: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        part, _, rest = key.partition(".")
        layer, factor, _ = rest.rsplit(".", 2)
        name = prefixes[part] + layer.replace(".", "_")
        made[f"{name}.{factors[factor]}.weight"] = tensor
        if factor == "lora_A":
            made[f"{name}.alpha"] = torch.tensor(float(tensor.shape[0]))
    return made
