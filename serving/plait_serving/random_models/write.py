"""A whole model as a folder that diffusers, and plait, load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait_serving.diffusion.published.architectures import Architecture
from plait_serving.diffusion.published.configs import build_on_meta, write_configs
from plait_serving.diffusion.sources.staging import new_folder
from plait_serving.random_models.names import DtypeName
from plait_serving.random_models.tensor_file import write_tensors
from plait_serving.random_models.weights import drawn_weights

Report = Callable[[str, int, int], None]
"""Receives what is being written, the bytes that are written, and all bytes."""

# The published files were saved by torch, and loaders look for this.
_METADATA = {"format": "pt"}
_FILES = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}


def write_model(architecture: Architecture, folder: Path, *, seed: int, dtype: DtypeName, report: Report) -> None:
    """Write a new folder; the same arguments give the same bytes.

    Raises `ModelError` if the folder is not empty or the disk too full, and `OSError` as the file system does.
    """
    modules = [(part, build_on_meta(part)) for part in architecture.parts]
    drawn = [(part, drawn_weights(part, module)) for part, module in modules]
    total = sum(tensor.nbytes(dtype) for _, tensors in drawn for tensor in tensors)
    written = 0
    with new_folder(folder, needed_bytes=total) as staged:
        write_configs(architecture, staged, {part.folder: module for part, module in modules})
        for part, tensors in drawn:
            name = part.folder or folder.name

            def wrote(count: int, name: str = name) -> None:
                nonlocal written
                written += count
                report(name, written, total)

            file = staged / part.folder / _FILES[part.library]
            write_tensors(file, tensors, seed=seed, dtype=dtype, metadata=_METADATA, wrote=wrote)
