"""The parts of a model's folder: copied, or written from what a checkpoint in one file holds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.loading import on_meta, translate
from plait_serving.diffusion.published.architectures import Architecture
from plait_serving.diffusion.published.configs import build_on_meta, published_name, stored, write_configs
from plait_serving.diffusion.sources.file_kinds import SUFFIX

INDEX = "model_index.json"
_PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth", "*.msgpack", "*.onnx*")


def copy_parts(folder: Path, staged: Path, *, but: Collection[str], link: bool = False) -> None:
    """Copy a model's index and the parts that it names, except `but`. `link`: files are links to those of the folder,
    which must be absolute. Pickles stay behind."""
    copy = os.symlink if link else shutil.copy2
    shutil.copyfile(folder / INDEX, staged / INDEX)
    named = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for part in folder.iterdir():  # an index may name what is outside
        if part.is_dir() and part.name in named and part.name not in but:
            ignore = shutil.ignore_patterns(*_PICKLES)
            shutil.copytree(part, staged / part.name, ignore=ignore, copy_function=copy)


def check_configs(config: Path) -> None:
    """Raise `ModelError` for a checkpoint's config that is no diffusers folder."""
    if not (config / INDEX).is_file():
        raise ModelError(
            f"{config / INDEX}: missing: a checkpoint's config is a diffusers folder, with configurations and "
            "tokenizers; its weights are not needed"
        )


def write_parts(
    path: Path,
    staged: Path,
    described: Architecture | Path,
    kinds: Mapping[str, Any],
    converted: Callable[[str, nn.Module, Path], Mapping[str, torch.Tensor]],
    *,
    link: bool = False,
) -> None:
    """Write the checkpoint `path` as a folder: the parts of the classes `kinds` with the weights that `converted` finds
    there for a part's module. `described`: the architecture that its configurations follow from, or the folder that
    they are copied from, and with them the other parts (`link`: as for `copy_parts`). Raises `ModelError`."""
    if isinstance(described, Architecture):
        write_configs(described, staged, {part.folder: build_on_meta(part) for part in described.parts})
    else:
        copy_parts(described, staged, but=kinds.keys(), link=link)
        for part in kinds:
            if (described / part).is_dir():
                (staged / part).mkdir()
                shutil.copyfile(described / part / "config.json", staged / part / "config.json")
    for part, kind in kinds.items():
        module = translate(staged / part, partial(on_meta, kind))
        _write_part(path, staged / part, module, translate(path, partial(converted, part, module)))


def _write_part(path: Path, place: Path, module: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Write a part's weights, found in the file `path`. Raises `ModelError` if one is missing, of another shape, or has
    no place."""
    is_text = place.name.startswith("text_encoder")
    wanted = {name: tensor.shape for name, tensor in stored(module).items()}
    if any(name.startswith("text_model.") for name in wanted):
        found = {published_name(key): tensor for key, tensor in found.items()}
    missing = sorted(wanted.keys() - found.keys())
    # Text encoders carry what no pipeline has a use for: position ids, a projection, a last layer.
    extra = [] if is_text else sorted(found.keys() - wanted.keys())
    strange = sorted(key for key, shape in wanted.items() if key in found and found[key].shape != shape)
    for keys, what in ((missing, "lacks"), (strange, "has another shape of"), (extra, "has unknown")):
        if keys:
            raise ModelError(f"{path}: {place.name} {what} {len(keys)} weights, for example {', '.join(keys[:3])}")
    name = "model" if is_text else "diffusion_pytorch_model"
    weights = {key: found[key].contiguous() for key in wanted}
    save_file(weights, place / f"{name}{SUFFIX}", metadata={"format": "pt"})


def beside_file(path: Path) -> Path:
    """Return where a checkpoint's own configuration would be, as A1111 has it."""
    return path.with_suffix(".yaml")
