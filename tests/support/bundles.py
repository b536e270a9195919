"""Whole bundles of Stable Diffusion models, with their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from plait_serving.diffusion.families.encoders import SharedEncoders, TextEncoders
from plait_serving.diffusion.families.unet.bundle import UNetBundle, outline_bundle


def load_bundle(folder: Path, **options: Any) -> UNetBundle:
    """A folder's parts, as a model is loaded, and the text encoders in memory among its modules."""
    outline = outline_bundle(folder, **options)
    encoders = TextEncoders(outline.clips, device=outline.device, adapts=True, among=SharedEncoders())
    encoders.hold(encoders, outline.clips)
    loaded = outline.loaded()
    return replace(loaded, encoders=encoders, modules={**loaded.modules, **encoders._modules})


def texts_of(bundle: UNetBundle) -> list[Any]:
    """Its text encoders."""
    return [bundle.modules[name] for name in bundle.clips]
