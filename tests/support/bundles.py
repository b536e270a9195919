"""Whole bundles of Stable Diffusion models, with their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from plait_serving.diffusion.families.encoders import SharedEncoders, TextEncoders
from plait_serving.diffusion.families.unet.bundle import Bundle, loaded, outline_bundle


def load_bundle(folder: Path, **options: Any) -> Bundle:
    """A folder's parts, as a model is loaded; `text_encoders` are those in memory."""
    outline = outline_bundle(folder, **options)
    encoders = TextEncoders(outline.texts, device=outline.device, adapts=True, among=SharedEncoders())
    encoders.hold(encoders, outline.texts)
    return replace(loaded(outline, encoders), text_encoders=tuple(encoders._modules.values()))
