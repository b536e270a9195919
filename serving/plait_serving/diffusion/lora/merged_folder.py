"""A base model with a LoRA set in its weights, as a folder: what most published checkpoints are.

The merge is the engine's own, in the dtype of the files; everything that no LoRA changes is copied as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families import open_family
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.knobs import ExecutorName
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import ModuleRef, live_parameter
from plait_serving.diffusion.memory import check_memory
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.sources.parts import copy_parts
from plait_serving.diffusion.sources.resolve import resolve_source
from plait_serving.diffusion.sources.staging import new_folder, require_new_folder
from plait_serving.diffusion.values import LoraRef
from plait_serving.diffusion.weight_files import WeightFiles

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A LoRA to merge."""

    name: str
    path: Path
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPart:
    """What was done to one component. `tolerance`: what rounding to the files' dtype may take off a weight, relative to
    it; with the LoRA as an input of each step nothing is rounded."""

    component: str
    weights: int
    changed: int
    dtype: str
    tolerance: float


def write_merged(
    source: str | Path,
    loras: Sequence[LoraFile],
    out: Path,
    *,
    revision: str | None = None,
    config: Path | None = None,
) -> tuple[MergedPart, ...]:
    """Write `source` (as for `resolve_source`) with the LoRAs in its weights into the new folder `out`.

    Takes memory for twice the parts that change. Raises `ModelError` and `LoraError`, and OSError as the file system
    does.
    """
    require_new_folder(out)
    folder = resolve_source(source, revision, config=config)
    settings = EngineSettings(
        model=folder, dtype="float32", device="cpu", executor=ExecutorName.TORCH, safety_checker=False
    )
    family = open_family(folder, settings, Host(knobs=lambda: settings.knobs, encoders=SharedEncoders()))
    loaded = {lora.name: parse(lora.name, lora.path, family.lora_targets) for lora in loras}
    touched = {ref.component for lora in loaded.values() for ref in lora.factors}
    parts = {name: part for name, part in family.parts.items() if name in touched}
    files = {name: part.files for name, part in parts.items()}
    check_memory(str(folder), 2 * sum(part.nbytes_as(part.stored_dtype) for part in files.values()), family.device)
    modules = {name: part.mapped() for name, part in parts.items()}
    merger = Merger(modules)
    merger.switch(tuple(LoraRef(name=lora.name, scale=lora.scale) for lora in loras), loaded)
    with new_folder(out, needed_bytes=_size_bytes(folder)) as staged:
        copy_parts(folder, staged, but=files.keys())
        return tuple(
            _write_part(staged / name, part, modules[name], _changed(name, loaded)) for name, part in files.items()
        )


def _changed(component: str, loaded: Mapping[str, LoadedLora]) -> list[ModuleRef]:
    """Return what the LoRAs change in a component."""
    return list({ref: None for lora in loaded.values() for ref in lora.factors if ref.component == component})


def _write_part(place: Path, files: WeightFiles, module: torch.nn.Module, changed: Sequence[ModuleRef]) -> MergedPart:
    """Write the weights of one part under the names that its files have, and its configuration as it is."""
    tensors: dict[str, torch.Tensor] = {}
    for path in files.files:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name, (holder, _) in files.tensors.items() if holder == path}
    for ref in changed:
        key = _key(ref, files)
        live = live_parameter(module.get_submodule(ref.module), ref.parameter)
        tensors[key] = live.to(tensors[key].dtype).reshape(tensors[key].shape).contiguous()
    place.mkdir()
    shutil.copyfile(files.folder / _CONFIG, place / _CONFIG)
    stem = files.files[0].name.split(".")[0].split("-")[0]
    save_file(tensors, place / f"{stem}.safetensors", metadata={"format": "pt"})
    return MergedPart(
        component=place.name,
        weights=len(tensors),
        changed=len(changed),
        dtype=str(files.stored_dtype).removeprefix("torch."),
        tolerance=torch.finfo(files.stored_dtype).eps / 2,
    )


def _key(ref: ModuleRef, files: WeightFiles) -> str:
    """Return the name of a weight or bias in the files: those of text encoders begin with what newer classes
    dropped."""
    names = (f"{ref.module}.{ref.parameter}", f"text_model.{ref.module}.{ref.parameter}")
    for name in names:
        if name in files.tensors:
            return name
    raise ModelError(f"{files.folder}: has no weight {names[0]}: the files have names of an older time")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*") if path.is_file())
