"""Runs the stages in order, each from its checkpoint, and exports what they made."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from starter_training.base import build_studio, train_base, train_text
from starter_training.controlnets import train_controlnet
from starter_training.data import TrainingImages
from starter_training.export import export_base, export_controlnet, export_lora, export_rest
from starter_training.loop import SEED, StageOutcome
from starter_training.loras import train_lora
from starter_training.plan import Plan
from starter_training.text import build_tokenizer
from starter_training.vae import train_decoder, train_vae


def train_all(
    images: TrainingImages, plan: Plan, work: Path, out: Path, stages: tuple[str, ...]
) -> dict[str, StageOutcome]:
    """Train `stages` (the first four always) as far as their checkpoints in `work` are incomplete, write the bundle to
    `out`, and return each stage's outcome."""
    outcomes: dict[str, StageOutcome] = {}
    vae, outcomes["vae"] = train_vae(images, plan["vae"], work / "vae.pt")
    outcomes["decoder"] = train_decoder(vae, images, plan["decoder"], work / "decoder.pt")
    studio = build_studio(images, vae, build_tokenizer(images.names))
    outcomes["text"] = train_text(studio, plan["text"], work / "text.pt")
    outcomes["base"] = train_base(studio, plan["base"], work / "base.pt")
    export_base(studio, out)
    for name in ("edges", "colors"):
        if name in stages:
            net, outcomes[name] = train_controlnet(studio, name, plan[name], work / f"{name}.pt")
            export_controlnet(net, name, out)
    for name in ("noto", "sketch", "pixel"):
        if name in stages:
            tensors, done = train_lora(studio, name, plan, work)
            outcomes |= done
            export_lora(tensors, name, out)
    export_rest(images, training_notes(plan, outcomes), out)
    return outcomes


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
