"""A whole checkpoint of Stable Diffusion 1.x, 2.x or XL in the original layout as a folder, by diffusers' functions.

What the file does not hold is known: the configurations of the published models and their one vocabulary are part of
plait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
    load_single_file_checkpoint,
)
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.config import VAE, kind_of_file
from plait_serving.diffusion.families.unet.scheduler import EDM
from plait_serving.diffusion.loading import translate
from plait_serving.diffusion.lora.container import Header
from plait_serving.diffusion.published.architectures import ARCHITECTURES, Architecture, FamilyName
from plait_serving.diffusion.sources.file_kinds import DENOISER, read_json
from plait_serving.diffusion.sources.parts import beside_file, check_configs, write_parts

_log = logging.getLogger(__name__)

_EDM_MARK = "edm_"
"""What the names of tensors begin with that tell an EDM model: Playground v2.5's, CosXL's and no others."""
_MOMENTS = frozenset(("edm_mean", "edm_std"))
_LEVELS = frozenset(("edm_vpred.sigma_max", "edm_vpred.sigma_min"))
_PUBLISHED = {"sd1": FamilyName.SD15, "sd2": FamilyName.SD21, "sdxl": FamilyName.SDXL}
_ADVICE = (
    "if its architecture is none of the published ones, name a folder with its configuration (images.models.X.config)"
)


def convert(path: Path, header: Header, config: Path | None) -> Callable[[Path], None]:
    """Return what writes a checkpoint as a diffusers folder; `config` is one with its configurations, None: they are
    the published ones. Raises `ModelError`, as what is returned does."""
    family = _PUBLISHED[str(kind_of_file(header.tensors))]
    if config is None:
        return partial(_write, path, family, _architecture(path, header, family))
    check_configs(config)
    _check_marks(path, header, config)
    return partial(_write, path, family, config)


def _write(path: Path, family: FamilyName, described: Architecture | Path, staged: Path) -> None:
    """Write a checkpoint into `staged`. `described`: by what its configurations are told."""
    tensors = translate(path, lambda file: load_single_file_checkpoint(str(file), local_files_only=True))
    parts = _parts(family)

    def converted(name: str, module: nn.Module, _: Path) -> dict[str, torch.Tensor]:
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(parts[name][1])}
        found = _converted(own, module, parts[name][1])
        if name == "unet" and len(own) != len(found):  # the others hold what nothing needs
            raise ModelError(f"{path}: of the UNet's {len(own)} weights, {len(own) - len(found)} have no place")
        return found

    try:
        write_parts(path, staged, described, {name: kind for name, (kind, _) in parts.items()}, converted)
    except ModelError as error:
        raise error if isinstance(described, Path) else ModelError(f"{error.message}; {_ADVICE}") from error


def _parts(family: FamilyName) -> dict[str, tuple[Any, str]]:
    """Return each part's class, and what its keys begin with, by its folder."""
    parts = {"unet": (UNet2DConditionModel, DENOISER), "vae": (AutoencoderKL, VAE)}
    if family is FamilyName.SDXL:
        parts["text_encoder"] = CLIPTextModel, "conditioner.embedders.0.transformer."
        parts["text_encoder_2"] = CLIPTextModelWithProjection, "conditioner.embedders.1.model."
    elif family is FamilyName.SD21:
        parts["text_encoder"] = CLIPTextModel, "cond_stage_model.model."
    else:
        parts["text_encoder"] = CLIPTextModel, "cond_stage_model.transformer."
    return parts


def _converted(own: dict[str, torch.Tensor], module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return the part with that prefix under diffusers' names, by diffusers' own functions."""
    config: Any = module.config
    if prefix == DENOISER:
        return dict(convert_ldm_unet_checkpoint(dict(own), config=config))
    if prefix == VAE:
        return dict(convert_ldm_vae_checkpoint(dict(own), config=config))
    if prefix.endswith(".transformer."):
        return dict(convert_ldm_clip_checkpoint(dict(own)))
    return dict(convert_open_clip_checkpoint(module, dict(own), prefix=prefix))


# ---- what the file does not hold -------------------------------------------------------------------------------------


def _architecture(path: Path, header: Header, family: FamilyName) -> Architecture:
    """Return the published architecture with what the file and a .yaml beside it say."""
    published = ARCHITECTURES[family]
    first = header.tensors.get(f"{DENOISER}input_blocks.0.0.weight")
    changes: dict[str, Any] = {} if first is None else {"in_channels": first.shape[1]}  # 9: made for inpainting
    assert published.scheduler is not None
    scheduler = dict(published.scheduler.config)
    if _predicts_v(path, header, family):
        scheduler["prediction_type"] = "v_prediction"
        if "ztsnr" in header.tensors:
            scheduler |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    elif family is FamilyName.SD21:
        scheduler["prediction_type"] = "epsilon"
        changes["sample_size"] = 64  # those models were made for 512 pixels
    said: dict[str, Mapping[str, Any]] = {"unet": changes}
    kind = published.scheduler.class_name
    if marks := _marks(path, header, family):
        kind, scheduler, said["vae"] = _edm(path, marks)
    parts = tuple(replace(part, config={**part.config, **said.get(part.folder, {})}) for part in published.parts)
    return replace(published, parts=parts, scheduler=replace(published.scheduler, class_name=kind, config=scheduler))


def _marks(path: Path, header: Header, family: FamilyName) -> frozenset[str]:
    """Return the marks of an EDM model that a file has. Raises `ModelError` for any that nothing here reads."""
    marks = _edm_marks(header)
    is_known = marks == _MOMENTS or (marks <= _LEVELS and "edm_vpred.sigma_max" in marks)
    if marks and not (is_known and family is FamilyName.SDXL):
        raise ModelError(f"{path}: {', '.join(sorted(marks))}: such an EDM model of {family} is not supported")
    return marks


def _edm_marks(header: Header) -> frozenset[str]:
    return frozenset(key for key in header.tensors if key.startswith(_EDM_MARK))


def _edm(path: Path, marks: frozenset[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the scheduler, its configuration and what the VAE's says beside, of a file with such marks.

    What the marks do not say is Playground v2.5's and CosXL's, as in diffusers and in ComfyUI, which writes them.
    """
    with safe_open(path, framework="pt") as file:
        found = {mark: file.get_tensor(mark).float().flatten().tolist() for mark in marks}
    if marks == _MOMENTS:
        scheduler = {"prediction_type": "epsilon", "sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5}
        vae = {"latents_mean": found["edm_mean"], "latents_std": found["edm_std"], "scaling_factor": 0.5}
        return "EDMDPMSolverMultistepScheduler", scheduler, vae
    levels = {key.removeprefix("edm_vpred."): values[0] for key, values in found.items()}
    own = {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_schedule": "exponential"}
    return "EDMEulerScheduler", {"sigma_min": 0.002, **own, **levels}, {}


def _check_marks(path: Path, header: Header, config: Path) -> None:
    """Raise `ModelError` if a file has the marks of an EDM model and the folder of its configurations is of another."""
    marks = _edm_marks(header)
    names = read_json(config / "model_index.json").get("scheduler") or [None]
    if marks and names[-1] not in EDM:
        raise ModelError(f"{path}: {', '.join(sorted(marks))}: an EDM model, but its config names {names[-1]}")


def _predicts_v(path: Path, header: Header, family: FamilyName) -> bool:
    """Return whether the UNet predicts v, which no weight tells. A .yaml beside the file does, as A1111 has it; some
    files of SDXL have a mark; of SD 2, diffusers takes it for granted."""
    beside = beside_file(path)
    if not beside.is_file():
        if family is FamilyName.SD21:
            _log.info("%s: taken for a model that predicts v; if it does not, put its .yaml beside it", path)
        return family is FamilyName.SD21 or "v_pred" in header.tensors
    try:
        params = yaml.safe_load(beside.read_text(encoding="utf-8"))["model"]["params"]
        return str(params.get("parameterization", "eps")) == "v"
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{beside}: not a configuration of Stable Diffusion ({error})") from error
