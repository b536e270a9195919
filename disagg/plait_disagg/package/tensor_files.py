"""Files of tensors that whoever may read their neighbours may read too."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the mode that the umask gives a new file; the library makes it its owner's own."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path)
    path.chmod(mode)
