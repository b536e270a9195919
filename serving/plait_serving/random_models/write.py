"""A whole model as a folder that diffusers, and plait, load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from plait_serving.diffusion.sources.staging import new_folder
from plait_serving.random_models.architectures import Architecture, ModelPart, SchedulerPart
from plait_serving.random_models.names import DtypeName
from plait_serving.random_models.tensor_file import write_tensors
from plait_serving.random_models.vocabulary import write_tokenizer
from plait_serving.random_models.weights import build_on_meta, drawn_weights

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
    drawn = [(part, module, drawn_weights(part, module)) for part, module in modules]
    total = sum(tensor.nbytes(dtype) for _, _, tensors in drawn for tensor in tensors)
    written = 0
    with new_folder(folder, needed_bytes=total) as staged:
        for part, module, tensors in drawn:
            name = part.folder or folder.name

            def wrote(count: int, name: str = name) -> None:
                nonlocal written
                written += count
                report(name, written, total)

            place = staged / part.folder
            place.mkdir(exist_ok=True)
            file = place / _FILES[part.library]
            write_tensors(file, tensors, seed=seed, dtype=dtype, metadata=_METADATA, wrote=wrote)
            _write_config(place, part, module)
        for name, pad_token in architecture.pad_tokens.items():
            write_tokenizer(staged / name, pad_token=pad_token)
        if architecture.scheduler is not None:
            _write_scheduler(staged / "scheduler", architecture.scheduler)
        if architecture.pipeline is not None:
            _write_json(staged / "model_index.json", _index(architecture))


def _write_config(place: Path, part: ModelPart, module: nn.Module) -> None:
    """Write `config.json` as the part's own library does, with the defaults filled in."""
    config: Any = module.config
    if part.library == "diffusers":
        module.save_config(place)  # type: ignore[operator]
        return
    # float32 is what to compute in if nothing else is asked for: Stable Diffusion 1's own file says so, too.
    config.update({"architectures": [part.class_name], "dtype": "float32"})
    config.save_pretrained(place)


def _write_scheduler(place: Path, part: SchedulerPart) -> None:
    scheduler = getattr(diffusers, part.class_name).from_config(dict(part.config))
    scheduler.save_pretrained(place)


def _index(architecture: Architecture) -> dict[str, Any]:
    assert architecture.scheduler is not None
    parts = {part.folder: [part.library, part.class_name] for part in architecture.parts}
    tokenizers = {name: ["transformers", "CLIPTokenizer"] for name in architecture.pad_tokens}
    return {
        "_class_name": architecture.pipeline,
        "_diffusers_version": diffusers.__version__,
        **architecture.index,
        **parts,
        **tokenizers,
        "scheduler": ["diffusers", architecture.scheduler.class_name],
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
