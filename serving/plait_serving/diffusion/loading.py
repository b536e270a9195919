"""From weight files to modules. All calls of the libraries' loaders are made here: they build a module without memory
of its own, map the files, and know old names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import ModelMixin
from torch import nn
from transformers.utils import logging as transformers_logging

from plait_kernels.devices import is_gpu
from plait_kernels.executors import MODULES
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.memory import gigabytes
from plait_serving.diffusion.weight_files import WeightFiles

_log = logging.getLogger(__name__)


def load_module(kind: Any, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a module with every weight from the files, cast to `dtype`; those that have it already are the files' own
    bytes, memory-mapped. Raises `ModelError`.

    `kind` is a model class of diffusers or transformers.
    """
    started_s = time.perf_counter()
    with MODULES:
        module = _from_library(kind, files, dtype)
    # On a GPU convolutions want channels-last weights; on a CPU oneDNN reorders them anyway, and bits stay diffusers'.
    layout: dict[str, Any] = {"memory_format": torch.channels_last} if is_gpu(device) else {}
    module = module.to(device, **layout).eval().requires_grad_(False)
    _log.info("%s: %s in %.1f s", files.folder.name, gigabytes(files.nbytes), time.perf_counter() - started_s)
    return module


def outline_module(kind: Any, files: WeightFiles, dtype: torch.dtype) -> nn.Module:
    """Return a module without weights: its configuration, and the names and shapes of what it would hold. Raises
    `ModelError`."""
    with MODULES:
        module = cast("nn.Module", translate(files.folder, partial(on_meta, kind)))
    # diffusers' own `to` warns of modules that it would keep in float32, of which there are none.
    return nn.Module.to(module, dtype).eval().requires_grad_(False)


def on_meta(kind: Any, folder: Path) -> nn.Module:
    """Build the module that a folder's configuration describes, without memory for its weights."""
    with torch.device("meta"):
        if issubclass(kind, ModelMixin):
            return cast("nn.Module", kind.from_config(kind.load_config(folder, local_files_only=True)))
        return cast("nn.Module", kind(kind.config_class.from_pretrained(folder, local_files_only=True)))


def _from_library(kind: Any, files: WeightFiles, dtype: torch.dtype) -> nn.Module:
    module, info = translate(
        files.folder,
        lambda path: kind.from_pretrained(
            path,
            dtype=dtype,
            variant=files.variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        ),
    )
    missing = sorted(info["missing_keys"])
    # Old text encoders carry position_ids, a constant that newer code computes.
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.endswith("position_ids"))
    for keys, what in ((missing, "lacks"), (unexpected, "has unknown")):
        if keys:
            raise ModelError(f"{files.folder}: {what} {len(keys)} weights, for example {', '.join(keys[:3])}")
    if info.get("mismatched_keys"):
        raise ModelError(f"{files.folder}: weights of the wrong shape: {info['mismatched_keys'][:3]}")
    return cast("nn.Module", module)


def translate(path: Path, load: Callable[[Path], Any]) -> Any:
    """Run a library's loader quietly; anything it raises becomes a `ModelError` that names the path."""
    transformers_logging.disable_progress_bar()
    try:
        # Tensors made in inference mode can be written in it only.
        with torch.inference_mode(mode=False):
            return load(path)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())[:400]}") from error
