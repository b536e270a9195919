"""The families of image models, and the only module that says which there are.

A family is a folder of this package: all that differs between architectures, and nothing else. It has

- a `Family` (`family`): what is known of one model without its weights: its kind, sizes, what requests may say and come
  to, what LoRAs may change, which ControlNets fit; `load` brings the weights into memory,
- a `Denoiser` (`protocols.py`), which `load` returns: conditioning, latents, schedule, a step with its guidance,
  decoding, and the mergers of LoRA sets.

What is in this folder beside them is shared by families: rows of a batch (`rows`), LoRA sets as inputs (`factors`),
executors' programs (`preparation`) and the weights beside them (`resident_weights`). A family is imported when the
first model of it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.sources.file_kinds import read_json

if TYPE_CHECKING:
    from torch import nn

    from plait_serving.diffusion.families.family import Family
    from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
    from plait_serving.diffusion.settings import EngineSettings, Host

    ControlNetRunner: TypeAlias = ControlNetModelRunner

__all__ = [
    "FAMILIES", "ControlNetRunner", "FamilyRow", "components", "family_row", "load_controlnet", "open_family",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """A family. `load` imports it, and the libraries that it needs; `kind` says without them what the LoRAs and
    ControlNets of a folder's model are made for, and raises `ModelError`."""

    load: Callable[[], type[Family]]
    kind: Callable[[Path], str]


def _unet() -> type[Family]:
    from plait_serving.diffusion.families.unet.family import UNetFamily

    return UNetFamily


def _kind_of_unet(folder: Path) -> str:
    from plait_serving.diffusion.families.unet.config import family_of

    return str(family_of(read_json(folder / "unet" / "config.json")))


_UNET = FamilyRow(_unet, _kind_of_unet)


def _sd3() -> type[Family]:
    from plait_serving.diffusion.families.sd3.family import Sd3Family

    return Sd3Family


def _flux() -> type[Family]:
    from plait_serving.diffusion.families.flux.family import FluxFamily

    return FluxFamily


_SD3 = FamilyRow(_sd3, lambda _: "sd3")
_FLUX = FamilyRow(_flux, lambda _: "flux1")

FAMILIES: dict[str, FamilyRow] = {
    "StableDiffusion3*": _SD3,
    "StableDiffusion*": _UNET,
    "LatentConsistencyModel*": _UNET,
    "FluxPipeline": _FLUX,
    "FluxImg2ImgPipeline": _FLUX,
    "FluxInpaintPipeline": _FLUX,
    "FluxKontext*": _FLUX,
}
"""The families by the class of their pipelines in diffusers: patterns, of which the first that fits counts."""

_LOOK_ALIKES: Mapping[str, str] = {
    "StableDiffusion3ControlNet*": "a ControlNet of Stable Diffusion 3 in a pipeline; name the base model's own folder",
    "FluxFill*": "FLUX.1 Fill has inputs of its own for a mask and the masked image",
    "FluxControlNet*": "a ControlNet of FLUX.1 in a pipeline; name the base model's own folder",
    "FluxControl*": "FLUX.1 Canny and Depth have an input of their own for a control image",
    "FluxPriorRedux*": "FLUX.1 Redux turns images into prompts; it is no base model",
}
"""Why pipelines are not served whose names or shapes are nearly those of a family."""


def family_row(folder: Path) -> FamilyRow:
    """Return the family of the model in a diffusers folder. Raises `ModelError`, naming the pipeline if none serves
    it."""
    path = folder / "model_index.json"
    pipeline = read_json(path).get("_class_name")
    if not isinstance(pipeline, str):
        raise ModelError(f"{path}: it names no pipeline (_class_name)")
    for pattern, why in _LOOK_ALIKES.items():
        if fnmatchcase(pipeline, pattern):
            raise ModelError(f"{path}: {pipeline} is not supported: {why}")
    found = next((row for pattern, row in FAMILIES.items() if fnmatchcase(pipeline, pattern)), None)
    if found is None:
        raise ModelError(f"{path}: {pipeline} is not supported; {', '.join(FAMILIES)} are")
    return found


def open_family(folder: Path, settings: EngineSettings, host: Host) -> Family:
    """Return what is known of the model in a diffusers folder. Raises `ModelError`."""
    return family_row(folder).load()(folder, settings, host)


def components(folder: Path) -> Mapping[str, nn.Module]:
    """Return the modules of the model in a diffusers folder that LoRAs change, by component, without weights. Raises
    `ModelError`."""
    return family_row(folder).load().components(folder)


def load_controlnet(folder: Path, **options: Any) -> ControlNetRunner:
    """Load a ControlNet from a diffusers folder, of whatever family it is. Raises `ModelError`."""
    from plait_serving.diffusion.families.unet import controlnet

    return controlnet.load_controlnet(folder, **options)
