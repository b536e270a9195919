"""A checkpoint of Stable Diffusion 3 or FLUX.1 in the original layout as a folder.

Files hold a transformer, and some a VAE and text encoders; what one lacks is linked from the folder that is named as
its configuration: always T5's vocabulary. diffusers' converter of FLUX.1 takes the published widths only, so the table
of names that LoRAs are read by (`published.original_names`) is that of checkpoints, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from safetensors import safe_open
from torch import nn

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.flow.checkpoints import PARTS, is_sd3, own_names, transformer_config
from plait_serving.diffusion.lora.container import Header
from plait_serving.diffusion.published.architectures import ARCHITECTURES, T5, Architecture, FamilyName, tokenizer_of
from plait_serving.diffusion.published.original_names import original_layers
from plait_serving.diffusion.sources.parts import check_configs, write_parts
from plait_serving.diffusion.weight_files import find_weights

_TEXTS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5"}
_FLUX_TEXTS = {"text_encoder": "clip_l", "text_encoder_2": "t5"}


def convert(path: Path, header: Header, config: Path | None) -> Callable[[Path], None]:
    """Return what writes a checkpoint as a diffusers folder; `config` is one with its configurations and with the
    weights that the file lacks. Raises `ModelError`, as what is returned does."""
    of_sd3 = is_sd3(header.tensors)
    of_part = {"vae": "vae", **(_TEXTS if of_sd3 else _FLUX_TEXTS)}
    starts = {folder: _start(header, PARTS[part]) for folder, part in of_part.items()}
    architecture = _architecture(header, of_sd3=of_sd3)
    if config is None:
        if of_sd3 and starts["text_encoder_3"] is None:
            architecture = architecture.without_t5()
        lacking = [part.folder for part in architecture.parts if starts.get(part.folder, "") is None]
        lacking += [tokenizer_of(part) for part in architecture.parts if part.class_name == T5]  # not part of plait
        if lacking:
            raise ModelError(
                f"{path}: holds no {' and no '.join(lacking)}; name a diffusers folder that has what the file lacks "
                "(images.models.X.config)"
            )
    else:
        check_configs(config)
        for folder, start in starts.items():
            if start is None and (config / folder).is_dir():  # but for a T5 that the folder does not have, either
                find_weights(config / folder)
    kinds = {
        part.folder: getattr(diffusers if part.library == "diffusers" else transformers, part.class_name)
        for part in architecture.parts
        if starts.get(part.folder, "") is not None
    }
    described, converted = architecture if config is None else config.resolve(), partial(_converted, header, starts)
    return lambda staged: write_parts(path, staged, described, kinds, converted, link=True)


def _start(header: Header, starts: tuple[str, ...]) -> str | None:
    return next((start for start in starts if any(key.startswith(start) for key in header.tensors)), None)


def _architecture(header: Header, *, of_sd3: bool) -> Architecture:
    names = own_names(header.tensors)
    flux = FamilyName.FLUX_DEV if "guidance_in.in_layer.weight" in names else FamilyName.FLUX_SCHNELL
    published = ARCHITECTURES[FamilyName.SD35_MEDIUM if of_sd3 else flux]
    place = next(i for i, part in enumerate(published.parts) if part.folder == "transformer")
    ours = published.parts[place].config
    said = transformer_config(header.tensors, head=ours.get("attention_head_dim", 64))
    transformer = replace(published.parts[place], config={**ours, **said})
    return replace(published, parts=(*published.parts[:place], transformer, *published.parts[place + 1 :]))


def _converted(
    header: Header, starts: Mapping[str, str | None], name: str, module: nn.Module, path: Path
) -> dict[str, torch.Tensor]:
    """Return a part's weights under diffusers' names: those whose names begin as `starts` says, or the transformer."""
    start = starts.get(name)
    with safe_open(path, framework="pt") as file:
        if start is None:
            found = {name: file.get_tensor(key) for name, key in own_names(header.tensors).items()}
            return dict(_of_transformer(path, found, module))
        own = {key: file.get_tensor(key) for key in header.tensors if key.startswith(start)}
    config: Any = module.config
    if start in PARTS["vae"]:
        return dict(convert_ldm_vae_checkpoint(own, config=config))
    return {key.removeprefix(start): tensor for key, tensor in own.items()}


def _of_transformer(path: Path, own: dict[str, torch.Tensor], module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield diffusers' weights of an original transformer's. Raises `ModelError` for one that has no place."""
    heights = {name: len(tensor) for name, tensor in module.state_dict().items()}
    if "pos_embed" in own:
        yield "pos_embed.pos_embed", own.pop("pos_embed")
    for layer in original_layers([path for path, _ in module.named_modules()]):
        for name, parameter in (("weight", "weight"), ("scale", "weight"), ("bias", "bias")):
            tensor = own.pop(f"{layer.name}.{name}", None)
            if tensor is None:
                continue
            if layer.halves_swapped:
                tensor = torch.cat(tensor.chunk(2)[::-1])
            names = [f"{each}.{parameter}" for each in layer.modules]
            yield from zip(names, torch.split(tensor, [heights[each] for each in names]), strict=True)
    if own:
        example = ", ".join(sorted(own)[:3])
        raise ModelError(f"{path}: {len(own)} weights of the transformer have no place, for example {example}")
