"""Stages ``noto``, ``sketch`` and ``pixel``: low-rank changes of the frozen base.

While training, a layer's weight is W0 + B A, computed once a step, which on a small network is cheaper than
a second branch beside the layer. Rank and alpha are equal, so the stored factors need no scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from plait_serving.starter.train.base import Studio, diffusion_loss, draw_pictures, plain_predict
from plait_serving.starter.train.loop import SEED, Outcome, Trainer
from plait_serving.starter.train.plan import Recipe
from plait_serving.starter.train.vae import scaled_latents, styles

RANKS = {"noto": 32, "sketch": 8, "pixel": 8}
TEXT_RANKS = {"noto": 16}
UNET_LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
)
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class LowRank(nn.Module):
    """Adds ``up @ down`` to a weight ``[out, in]`` or ``[out, in, k, k]``; starts by adding nothing."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = weight.shape
        inputs = weight[0].numel()
        self.down = nn.Parameter((torch.rand(rank, inputs, generator=generator) * 2 - 1) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weight, same shape and memory layout."""
        changed = weight + (self.up @ self.down).view(self.shape)
        return changed.contiguous(memory_format=torch.channels_last) if changed.dim() == 4 else changed

    def factors(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """``up`` and ``down`` in the shapes that LoRA files use: convolutions keep their kernel in ``down``."""
        if len(self.shape) == 2:
            return up, down
        return up[:, :, None, None], down.view(-1, *self.shape[1:])


def _layers(module: nn.Module, endings: tuple[str, ...]) -> list[str]:
    return [name for name, _ in module.named_modules() if name.endswith(tuple("." + end for end in endings))]


def targets(studio: Studio, name: str) -> dict[str, tuple[nn.Module, int]]:
    """The layers that LoRA ``name`` changes, by full name (``unet.…`` or ``text_encoder.…``), with the rank."""
    found: dict[str, tuple[nn.Module, int]] = {}
    parts = [("unet", studio.unet, UNET_LAYERS, RANKS[name])]
    if name in TEXT_RANKS:
        parts.append(("text_encoder", studio.encoder, TEXT_LAYERS, TEXT_RANKS[name]))
    for prefix, module, endings, rank in parts:
        for layer in _layers(module, endings):
            found[f"{prefix}.{layer}"] = (module.get_submodule(layer), rank)
    return found


@contextmanager
def low_rank(studio: Studio, name: str) -> Iterator[dict[str, LowRank]]:
    """Within the block the layers of LoRA ``name`` are trainable; after it ``studio`` is as it was."""
    generator = torch.Generator().manual_seed(SEED + 4)
    layers = targets(studio, name)
    added: dict[str, LowRank] = {}
    for full, (layer, rank) in layers.items():
        weight = layer.weight
        assert isinstance(weight, Tensor)
        added[full] = LowRank(weight, min(rank, weight.shape[0], weight[0].numel()), generator)
        parametrize.register_parametrization(layer, "weight", added[full])
    try:
        yield added
    finally:
        for layer, _ in layers.values():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def train_lora(studio: Studio, name: str, recipe: Recipe, checkpoint: Path) -> tuple[dict[str, Tensor], Outcome]:
    """Train (or go on training) LoRA ``name``; its tensors in PEFT's names (``….lora_A.weight``)."""
    latents = scaled_latents(studio.vae, styles(studio.pictures)[name])
    with low_rank(studio, name) as added:
        # Names with dots are not allowed in a ModuleDict.
        module = nn.ModuleDict({full.replace(".", "/"): part for full, part in added.items()})
        loss = diffusion_loss(plain_predict(studio), draw_pictures(studio, latents, recipe.batch))
        outcome = Trainer(name, module, recipe, checkpoint).run(loss)
        tensors: dict[str, Tensor] = {}
        for full, part in added.items():
            key = full.replace(".", "/")
            up, down = part.factors(outcome.weights[f"{key}.up"], outcome.weights[f"{key}.down"])
            tensors[f"{full}.lora_A.weight"], tensors[f"{full}.lora_B.weight"] = down, up
    return tensors, outcome


def to_kohya(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same LoRA in kohya's names, with an ``alpha`` (equal to the rank) for every layer."""
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
