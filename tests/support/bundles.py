"""Whole bundles of Stable Diffusion models, with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait_serving.diffusion.families.unet.bundle import Bundle, loaded, outline_bundle


def load_bundle(folder: Path, **options: Any) -> Bundle:
    """A folder's parts, as a model is loaded."""
    return loaded(outline_bundle(folder, **options))
