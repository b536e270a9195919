"""Folders that a run's server reads: LoRAs for the starter model, and copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from plait_serving.images.config import STARTER_FOLDER, STARTER_MODEL
from support.tiny import tiny_lora

__all__ = ["copy_models", "write_loras"]

_STARTER = STARTER_FOLDER / STARTER_MODEL


def write_loras(folder: Path, names: Iterable[str], *, rank: int = 4) -> int:
    """Write LoRAs of one size; return the bytes of one."""
    nbytes = 0
    for seed, name in enumerate(names):
        nbytes = tiny_lora(folder / f"{name}.safetensors", _STARTER, rank=rank, seed=seed).stat().st_size
    return nbytes


def copy_models(folder: Path, names: Iterable[str]) -> None:
    """Copy the starter model under each name."""
    for name in names:
        shutil.copytree(_STARTER, folder / name)
