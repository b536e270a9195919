"""A whole checkpoint in one file, as people download them: Stable Diffusion 1.x, 2.x and XL in the original layout.

It is converted by diffusers' own functions into a folder of plait's cache, once. What the file does not hold is known:
the configurations of the published models and their one vocabulary are part of plait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
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
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from plait_kernels.executors.module_lock import MODULES
from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.families.unet.scheduler import EDM
from plait_serving.diffusion.loading import on_meta, translate
from plait_serving.diffusion.lora.container import Header, inspect
from plait_serving.diffusion.memory import gigabytes
from plait_serving.diffusion.published.architectures import (
    ARCHITECTURES,
    Architecture,
    FamilyName,
    SchedulerPart,
)
from plait_serving.diffusion.published.configs import build_on_meta, published_name, write_configs
from plait_serving.diffusion.sources.file_kinds import (
    SINGLE_CONTROLNET,
    SUFFIX,
    UNET,
    VAE,
    family_of_keys,
    is_controlnet,
)
from plait_serving.diffusion.sources.staging import copy_parts, locked, new_folder
from plait_serving.diffusion.weight_files import MAX_FILE_BYTES

_log = logging.getLogger(__name__)

_FORMAT = 2
"""Of what is written: raised by a change that folders of before do not have."""

_INDEX = "model_index.json"
_EDM_MARK = "edm_"
"""What the names of tensors begin with that tell an EDM model: Playground v2.5's, CosXL's and no others."""
_MOMENTS = frozenset(("edm_mean", "edm_std"))
_LEVELS = frozenset(("edm_vpred.sigma_max", "edm_vpred.sigma_min"))
_ADVICE = (
    "if its architecture is none of the published ones, name a folder with its configuration (images.models.X.config)"
)


def converted(path: Path, *, config: Path | None, cache: Path) -> Path:
    """Return a checkpoint's folder, which is written if `cache` does not have it. Raises `ModelError`."""
    header = _inspected(path)
    family = family_of_keys(header.tensors)
    if family is None:
        raise ModelError(f"{path}: {_what_it_lacks(header)}")
    folder = cache / f"{path.stem}-{_stamp(path, config)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{folder.name}.lock"):
            if not (folder / _INDEX).is_file():
                started_s = time.perf_counter()
                _convert(path, header, family, folder, config)
                _log.info("%s: converted into %s in %.1f s", path, folder, time.perf_counter() - started_s)
    except OSError as error:
        raise ModelError(f"{error.filename or cache}: {error.strerror or error}") from error
    return folder


def _inspected(path: Path) -> Header:
    try:
        return inspect(path, max_bytes=MAX_FILE_BYTES)
    except LoraError as error:
        raise ModelError(f"{path}: {error.message}") from error


def _what_it_lacks(header: Header) -> str:
    """Say why a file is no checkpoint that can be read."""
    keys = header.tensors
    if any(key.startswith("conditioner.embedders.0.model.") for key in keys):
        return "an SDXL refiner is not supported as a base model"
    if is_controlnet(keys):
        return f"a ControlNet, no base model, and {SINGLE_CONTROLNET}"
    parts = {"UNet": UNET, "VAE": VAE}
    lacks = [name for name, prefix in parts.items() if not any(key.startswith(prefix) for key in keys)]
    if len(lacks) == len(parts):
        return "no Stable Diffusion 1.x, 2.x or XL checkpoint in the original layout (model.diffusion_model., ...)"
    what = " and ".join(lacks) or "text encoder"
    return f"holds no {what}; only whole checkpoints are read, with UNet, VAE and text encoders"


def _stamp(path: Path, config: Path | None) -> str:
    """Return what changes with the files, the configuration and the libraries."""
    seen = [path, _beside(path), *(sorted(config.rglob("*")) if config is not None else ())]
    states = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in seen if each.is_file()]
    return hashlib.sha256(json.dumps([_FORMAT, diffusers.__version__, states]).encode()).hexdigest()[:16]


def _convert(path: Path, header: Header, family: FamilyName, folder: Path, config: Path | None) -> None:
    needed = sum(info.end - info.begin for info in header.tensors.values())
    _log.info("%s: %s, converting %s", path, family.value, gigabytes(needed))
    with new_folder(folder, needed_bytes=needed) as staged, MODULES:
        if config is None:
            architecture = _architecture(path, header, family)
            modules = {part.folder: build_on_meta(part) for part in architecture.parts}
            write_configs(architecture, staged, modules)
        else:
            _copy_configs(config, staged)
            _check_marks(path, header, staged)
        tensors = translate(path, lambda file: load_single_file_checkpoint(str(file), local_files_only=True))
        try:
            for name, kind, prefix in _parts(family):
                module = translate(staged / name, partial(on_meta, kind))
                found = translate(path, partial(_converted, tensors, module, prefix))
                held = sum(key.startswith(prefix) for key in tensors)
                if prefix == UNET and held != len(found):  # the others hold what nothing needs
                    raise ModelError(f"{path}: of the UNet's {held} weights, {held - len(found)} have no place")
                _write_part(path, staged / name, module, found)
        except ModelError as error:
            raise error if config is not None else ModelError(f"{error.message}; {_ADVICE}") from error


def _parts(family: FamilyName) -> Iterator[tuple[str, Any, str]]:
    """Yield each part's folder and class, and what its keys begin with."""
    yield "unet", UNet2DConditionModel, UNET
    yield "vae", AutoencoderKL, VAE
    if family is FamilyName.SDXL:
        yield "text_encoder", CLIPTextModel, "conditioner.embedders.0.transformer."
        yield "text_encoder_2", CLIPTextModelWithProjection, "conditioner.embedders.1.model."
    elif family is FamilyName.SD21:
        yield "text_encoder", CLIPTextModel, "cond_stage_model.model."
    else:
        yield "text_encoder", CLIPTextModel, "cond_stage_model.transformer."


def _converted(tensors: Mapping[str, torch.Tensor], module: nn.Module, prefix: str, _: Path) -> dict[str, torch.Tensor]:
    """Return the part with that prefix under diffusers' names, by diffusers' own functions."""
    own = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    config: Any = module.config
    if prefix == UNET:
        return dict(convert_ldm_unet_checkpoint(own, config=config))
    if prefix == VAE:
        return dict(convert_ldm_vae_checkpoint(own, config=config))
    if prefix.endswith(".transformer."):
        return dict(convert_ldm_clip_checkpoint(own))
    return dict(convert_open_clip_checkpoint(module, own, prefix=prefix))


def _write_part(path: Path, place: Path, module: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Write a part's weights. Raises `ModelError` if one is missing, of another shape, or has no place."""
    is_text = place.name.startswith("text_encoder")
    if is_text:
        found = {published_name(key): tensor for key, tensor in found.items()}
    wanted = {published_name(key) if is_text else key: tensor.shape for key, tensor in module.state_dict().items()}
    missing = sorted(wanted.keys() - found.keys())
    # Text encoders carry what Stable Diffusion has no use for: position ids, a projection, a last layer.
    extra = [] if is_text else sorted(found.keys() - wanted.keys())
    strange = sorted(key for key, shape in wanted.items() if key in found and found[key].shape != shape)
    for keys, what in ((missing, "lacks"), (strange, "has another shape of"), (extra, "has unknown")):
        if keys:
            raise ModelError(f"{path}: {place.name} {what} {len(keys)} weights, for example {', '.join(keys[:3])}")
    name = "model" if is_text else "diffusion_pytorch_model"
    weights = {key: found[key].contiguous() for key in wanted}
    save_file(weights, place / f"{name}{SUFFIX}", metadata={"format": "pt"})


# ---- what the file does not hold -------------------------------------------------------------------------------------


def _architecture(path: Path, header: Header, family: FamilyName) -> Architecture:
    """Return the published architecture with what the file and a .yaml beside it say."""
    published = ARCHITECTURES[family]
    first = header.tensors.get(f"{UNET}input_blocks.0.0.weight")
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
    return replace(published, parts=parts, scheduler=SchedulerPart(class_name=kind, config=scheduler))


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


def _check_marks(path: Path, header: Header, staged: Path) -> None:
    """Raise `ModelError` if a file has the marks of an EDM model and the folder of its configurations is of another."""
    marks = _edm_marks(header)
    names = json.loads((staged / _INDEX).read_text(encoding="utf-8")).get("scheduler") or [None]
    if marks and names[-1] not in EDM:
        raise ModelError(f"{path}: {', '.join(sorted(marks))}: an EDM model, but its config names {names[-1]}")


def _predicts_v(path: Path, header: Header, family: FamilyName) -> bool:
    """Return whether the UNet predicts v, which no weight tells. A .yaml beside the file does, as A1111 has it; some
    files of SDXL have a mark; of SD 2, diffusers takes it for granted."""
    beside = _beside(path)
    if not beside.is_file():
        if family is FamilyName.SD21:
            _log.info("%s: taken for a model that predicts v; if it does not, put its .yaml beside it", path)
        return family is FamilyName.SD21 or "v_pred" in header.tensors
    try:
        params = yaml.safe_load(beside.read_text(encoding="utf-8"))["model"]["params"]
        return str(params.get("parameterization", "eps")) == "v"
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{beside}: not a configuration of Stable Diffusion ({error})") from error


def _beside(path: Path) -> Path:
    return path.with_suffix(".yaml")


def _copy_configs(config: Path, staged: Path) -> None:
    """Copy everything but the weights from a diffusers folder. Raises `ModelError` if it is none."""
    if not (config / _INDEX).is_file():
        raise ModelError(
            f"{config / _INDEX}: missing: a checkpoint's config is a diffusers folder, with configurations and "
            "tokenizers; its weights are not needed"
        )
    parts = ("unet", "vae", "text_encoder", "text_encoder_2")
    copy_parts(config, staged, but=parts)
    for part in parts:
        if (config / part).is_dir():
            (staged / part).mkdir()
            shutil.copyfile(config / part / "config.json", staged / part / "config.json")
