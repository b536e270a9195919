"""The models that a configuration offers, read from its folders without loading any weights (no torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.families import family_row, kind_of_controlnet, row_of_file
from plait_serving.diffusion.lora.container import TensorInfo, inspect
from plait_serving.diffusion.lora.key_formats import format_of_keys
from plait_serving.diffusion.lora.listing import list_loras
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.models.folder import FolderOfModels
from plait_serving.diffusion.sources.file_kinds import read_json
from plait_serving.diffusion.weight_files import MAX_FILE_BYTES
from plait_serving.images.config import BaseSource, ImagesSection
from plait_serving.ranking.config import RankModelSection


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model. `folder` is a file (or the URL of one in a store) for a LoRA, and `owner/name@commit` for a hub id."""

    name: str
    kind: Literal["base", "controlnet", "lora", "recommender"]
    family: str
    folder: str
    format: str


def inventory(
    images: ImagesSection | None, ranking_models: Mapping[str, RankModelSection] | None = None
) -> list[ModelEntry]:
    """Return the base models, their ControlNets and LoRAs sorted by name, then the recommendation models.

    Raises `ModelError` for a broken folder that the configuration names.
    """
    ranking = [
        ModelEntry(name, "recommender", "graph", str(section.folder), _package(section))
        for name, section in sorted((ranking_models or {}).items())
    ]
    return [*([] if images is None else _of_images(images)), *ranking]


def _package(section: RankModelSection) -> str:
    """Return the format of a packaged model's folder."""
    return f"package {read_json(section.folder / 'package.json').get('format', '')}".strip()


def _of_images(images: ImagesSection) -> list[ModelEntry]:
    bases = [_base(name, base) for name, base in images.base_models.items()]
    bases += [_found(name, folder) for name, folder in more_models(images).items()]
    controlnets = [
        ModelEntry(name, "controlnet", kind_of_controlnet(section.folder), str(section.folder), "diffusers")
        for name, section in sorted(images.resolved_controlnets().items())
    ]
    families = {base.family for base in bases}
    return [*bases, *controlnets, *_loras(images, families.pop() if len(families) == 1 else "unknown")]


def lora_names(images: ImagesSection) -> Collection[str]:
    """Return the names of the LoRAs that a configuration offers."""
    folder, store = images.resolved_lora_folder(), images.loras.store
    return list_loras(folder).files if folder is not None else () if store is None else store.entries


def more_models(images: ImagesSection) -> dict[str, Path]:
    """Return what is served of `images.models_folder`, by name: a folder that has a name already is not, by another."""
    named = {Path(base.folder).resolve() for base in images.base_models.values()}
    more: dict[str, Path] = {}
    found = {} if images.models_folder is None else FolderOfModels(images.models_folder).list()
    for name, model in found.items():
        if name not in images.base_models and model.folder not in (*named, *more.values()):
            more[name] = model.folder
    return more


def _base(name: str, base: BaseSource) -> ModelEntry:
    folder = Path(base.folder)
    if base.is_hub_id:
        return ModelEntry(name, "base", "unknown", f"{base.model}@{base.revision}", "diffusers")
    if base.is_file:
        return ModelEntry(name, "base", _kind_of_file(folder), base.folder, "single file")
    return ModelEntry(name, "base", family_row(folder).kind(folder), base.folder, "diffusers")


def _found(name: str, folder: Path) -> ModelEntry:
    """Return what lies in a folder of models, where one that is broken keeps no other from being listed."""
    try:
        return _base(name, BaseSource(model=str(folder)))
    except ModelError:
        return ModelEntry(name, "base", "unknown", str(folder), "unreadable")


def _loras(images: ImagesSection, family: str) -> list[ModelEntry]:
    if (store := images.loras.store) is not None:
        root, entries = store.url.rstrip("/"), sorted(store.entries.items())
        return [ModelEntry(name, "lora", family, f"{root}/{entry.path}", "unknown") for name, entry in entries]
    folder = images.resolved_lora_folder()
    files = {} if folder is None else FolderSource(folder).files()
    return [
        ModelEntry(name, "lora", family, str(path), format_of_keys(tensors_of(path))) for name, path in files.items()
    ]


def _kind_of_file(path: Path) -> str:
    try:
        return row_of_file(tensors_of(path))[0]
    except ModelError:
        return "unknown"


def tensors_of(path: Path) -> Mapping[str, TensorInfo]:
    """Return the tensors of a safetensors file by name; a file that is damaged or of another format has none."""
    try:
        return inspect(path, max_bytes=MAX_FILE_BYTES).tensors
    except LoraError:
        return {}
