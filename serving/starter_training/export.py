"""Writes the trained parts as the bundle that ships: fp16 safetensors, references, manifest."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor, nn

from plait_serving.starter.manifest import write_manifest
from plait_serving.starter.references import make_references, save_references
from starter_training.base import Studio, build_scheduler
from starter_training.data import TrainingImages
from starter_training.loop import SEED, Plan, StageOutcome
from starter_training.loras import to_kohya

NAME = "emoji"
KOHYA = ("sketch",)


def _half(module: nn.Module) -> Any:
    """Return a copy of a module in fp16."""
    return copy.deepcopy(module).to(memory_format=torch.contiguous_format).half()  # type: ignore[call-overload]


def _rewrite(path: Path, changes: Mapping[str, str]) -> None:
    """Change fields of a config file, and remove the folder that a part was once loaded from."""
    config = json.loads(path.read_text(encoding="utf-8")) | dict(changes)
    config.pop("_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_base(studio: Studio, folder: Path) -> None:
    """Write the base model as an ordinary diffusers folder `emoji` with fp16 weights."""
    pipe = StableDiffusionPipeline(
        vae=_half(studio.vae),
        text_encoder=_half(studio.encoder),
        tokenizer=studio.tokenizer,
        unet=_half(studio.unet),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder / NAME, safe_serialization=True)
    # Text encoders record the type that they were saved in, and loaders would follow it: keep fp32 the default.
    _rewrite(folder / NAME / "text_encoder" / "config.json", {"dtype": "float32"})
    _rewrite(folder / NAME / "vae" / "config.json", {})


def export_controlnet(net: ControlNetModel, name: str, folder: Path) -> None:
    """Write one ControlNet as a diffusers folder with fp16 weights."""
    _half(net).save_pretrained(folder / "controlnets" / name, safe_serialization=True)


def export_lora(tensors: Mapping[str, Tensor], name: str, folder: Path) -> None:
    """Write one LoRA in fp16: `sketch` with kohya's names and alphas, the others with PEFT's."""
    named = to_kohya(dict(tensors)) if name in KOHYA else dict(tensors)
    (folder / "loras").mkdir(parents=True, exist_ok=True)
    half = {key: value.detach().to(torch.float16).contiguous() for key, value in named.items()}
    save_file(half, folder / "loras" / f"{name}.safetensors", metadata={"format": "pt"})


def card(images: TrainingImages, notes: str) -> str:
    """Return the text of `CARD.md`: what the weights are, what they were made from, and under which licences."""
    return f"""# Starter models of plait

A small model in the architecture of Stable Diffusion that draws {len(images.names)} emoji, 64x64 pixels, from
their names in lower case (`concepts.json`). It has learnt its images by heart: it is there so that the server
makes real images without a download and so that its tests mean something. It is no general text-to-image model:
the text encoder spells the image of each name in the padding after the prompt, and the UNet draws what is
spelled there. A prompt that is not a concept gives an abstract patch of colours.

- `emoji/`: autoencoder (4x smaller, 4 channels), CLIP text encoder with its own vocabulary, UNet (v-prediction).
- `controlnets/edges` (line map) and `controlnets/colors` (means of 4x4 pixels).
- `loras/noto` (Noto artwork), `loras/sketch` (line drawings; kohya's format), `loras/pixel` (8x8 blocks); each
  changes the text encoder and the UNet.

## Data and licences
- Twemoji artwork, copyright Twitter, Inc and other contributors, CC-BY 4.0
  (https://creativecommons.org/licenses/by/4.0/), from the npm package emoji-datasource-twitter 16.0.0.
- Noto Emoji artwork, copyright Google, Apache-2.0, from the npm package emoji-datasource-google 16.0.0.
- The weights and `references.npz` (16x16 means of that artwork) are adaptations of both
  and may be used under the terms of these two licences.

Concepts are chosen by the rule in `data.py`. Nothing was removed by hand.

{notes.strip()}
"""


def training_notes(plan: Plan, outcomes: Mapping[str, StageOutcome]) -> str:
    """Return the part of the card that describes how this bundle was trained."""
    lines = [
        "## Training",
        f"Seed {SEED}; torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}.",
        "",
        "| stage | steps | batch | peak rate | seconds | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        recipe = plan[name]
        numbers = (f"{recipe.rate:g}", f"{outcome.seconds_s:.0f}", f"{outcome.loss:.4f}")
        lines.append("| " + " | ".join((name, str(recipe.steps), str(recipe.batch), *numbers)) + " |")
    return "\n".join(lines)


def export_rest(images: TrainingImages, notes: str, folder: Path) -> None:
    """Write concepts, references and card, and finally the manifest of everything in `folder`."""
    save_references(make_references(images.names, images.twemoji, images.noto), folder)
    (folder / "CARD.md").write_text(card(images, notes), encoding="utf-8")
    write_manifest(folder)
