"""The families of image models, and the only module that says which there are.

A family is a folder of this package: all that differs between architectures, and nothing else. It has

- a `Family` (`family`): what is known of one model without its weights: its kind, sizes, what requests may say and come
  to, what LoRAs may change, which ControlNets fit; `bring` brings the weights into memory,
- a `Denoiser` (`protocols.py`), which `bring` returns: conditioning, latents, schedule, a step with its guidance,
  decoding, and the mergers of LoRA sets.

What is in this folder beside them is shared by families: a model's parts (`bundle`), text encoders (`encoders`), rows
of a batch (`rows`), schedulers (`samplers`), LoRA sets as inputs (`factors`), executors' programs (`preparation`) and
the weights beside them (`resident_weights`), and all that transformers with flow schedules have in common (`flow`). A
family is imported when the first model of it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.flow import checkpoints as flow_files
from plait_serving.diffusion.families.unet import config as unet_config
from plait_serving.diffusion.families.unet.config import check_controlnet
from plait_serving.diffusion.sources.file_kinds import SINGLE_CONTROLNET, is_controlnet, read_json

if TYPE_CHECKING:
    import torch

    from plait_serving.diffusion.families.family import Family
    from plait_serving.diffusion.families.preparation import Preparer
    from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
    from plait_serving.diffusion.lora.container import Header, TensorInfo
    from plait_serving.diffusion.settings import EngineSettings, Host

__all__ = [
    "FAMILIES", "FamilyRow", "check_controlnet", "family_row", "kind_of_controlnet", "load_controlnet", "open_family",
    "row_of_file",
]  # fmt: skip

Convert: TypeAlias = "Callable[[Path, Header, Path | None], Callable[[Path], None]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """A family. `load` imports it, and the libraries that it needs.

    Without them it is known where its weights are, `denoiser`: the folder of the model that steps, and of what `kind` a
    model is, which is what LoRAs and ControlNets are made for: by its folder, or by the tensors of a whole checkpoint
    in one file. None: such a file is none of the family; `ModelError`: it looks like one, or is not served. `convert`
    takes such a file, its header and the folder with its configurations, if they are not the published ones, and
    returns what writes it as a folder; `ModelError`: that cannot be.
    """

    load: Callable[[], type[Family]]
    denoiser: str
    kind: Callable[[Path], str]
    kind_of_file: Callable[[Mapping[str, TensorInfo]], str | None] = lambda _: None
    convert: Convert | None = None


def _unet() -> type[Family]:
    from plait_serving.diffusion.families.unet.family import UNetFamily

    return UNetFamily


def _convert_unet(path: Path, header: Header, config: Path | None) -> Callable[[Path], None]:
    from plait_serving.diffusion.families.unet.single_file import convert

    return convert(path, header, config)


_UNET = FamilyRow(
    load=_unet, denoiser="unet", kind=unet_config.kind_of, kind_of_file=unet_config.kind_of_file, convert=_convert_unet
)


def _sd3() -> type[Family]:
    from plait_serving.diffusion.families.sd3.family import Sd3Family

    return Sd3Family


def _flux() -> type[Family]:
    from plait_serving.diffusion.families.flux.family import FluxFamily

    return FluxFamily


def _convert_flow(path: Path, header: Header, config: Path | None) -> Callable[[Path], None]:
    from plait_serving.diffusion.families.flow.single_file import convert

    return convert(path, header, config)


_SD3 = FamilyRow(
    load=_sd3, denoiser="transformer", kind=lambda _: "sd3", kind_of_file=flow_files.kind_of_sd3, convert=_convert_flow
)
_FLUX = FamilyRow(
    load=_flux,
    denoiser="transformer",
    kind=lambda _: "flux1",
    kind_of_file=flow_files.kind_of_flux,
    convert=_convert_flow,
)

FAMILIES: dict[str, FamilyRow] = {
    "StableDiffusion3*": _SD3,
    "FluxPipeline": _FLUX,
    "FluxImg2ImgPipeline": _FLUX,
    "FluxInpaintPipeline": _FLUX,
    "FluxKontext*": _FLUX,
    "StableDiffusion*": _UNET,
    "LatentConsistencyModel*": _UNET,
}
"""The families by the class of their pipelines in diffusers: patterns, of which the first that fits counts. Those whose
files begin like others' come last."""

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


def row_of_file(tensors: Mapping[str, TensorInfo]) -> tuple[str, FamilyRow]:
    """Return the kind and the family of a whole checkpoint in one file with these tensors. Raises `ModelError`, without
    naming the file."""
    if is_controlnet(tensors):
        raise ModelError(f"a ControlNet, no base model, and {SINGLE_CONTROLNET}")
    for row in dict.fromkeys(FAMILIES.values()):
        kind = row.kind_of_file(tensors)
        if kind is not None:
            return kind, row
    raise ModelError("no whole checkpoint in the original layout of a family that is served")


def open_family(folder: Path, settings: EngineSettings, host: Host) -> Family:
    """Return what is known of the model in a diffusers folder. Raises `ModelError`."""
    return family_row(folder).load()(folder, settings, host)


def kind_of_controlnet(folder: Path) -> str:
    """Return what base models a ControlNet's folder is for. Raises `ModelError`."""
    return str(unet_config.kind_of_config(read_json(folder / "config.json")))


def load_controlnet(
    folder: Path, *, dtype: torch.dtype, device: str, preparer: Preparer | None, graphs: bool
) -> ControlNetModelRunner:
    """Load a ControlNet from a diffusers folder, of whatever family it is. `preparer`: its program runs once it was
    converted; `graphs`: it runs as CUDA graphs. Raises `ModelError`."""
    from plait_serving.diffusion.families.unet import controlnet

    return controlnet.load_controlnet(folder, dtype=dtype, device=device, preparer=preparer, graphs=graphs)
