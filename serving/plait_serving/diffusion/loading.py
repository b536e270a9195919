"""From weight files to modules. All calls of the libraries' loaders are made here.

A module is built without memory of its own (on torch's meta device) and given its tensors once several threads have
read them: the library's loader replaces `nn.Module.register_parameter` meanwhile, for all threads of the process. What
does not match name by name is left to it: it knows old names and says what is wrong, and is also the definition that
the fast path is tested against.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import ModelMixin
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from plait_kernels.devices import is_gpu
from plait_kernels.executors import MODULES
from plait_kernels.threads import set_threads
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.memory import gigabytes
from plait_serving.diffusion.weight_files import WeightFiles

_log = logging.getLogger(__name__)

_READERS = 4
"""Threads that read and cast tensors, if there are as many cores: beyond that the memory is the limit."""


def load_module(kind: Any, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a module with every weight from the files, cast to `dtype`. Raises `ModelError`.

    `kind` is a model class of diffusers or transformers.
    """
    started_s = time.perf_counter()
    with MODULES:
        module = translate(files.folder, lambda _: _assigned(kind, files, dtype)) or _from_library(kind, files, dtype)
    # On a GPU convolutions want channels-last weights; on a CPU oneDNN reorders them anyway, and bits stay diffusers'.
    layout: dict[str, Any] = {"memory_format": torch.channels_last} if is_gpu(device) else {}
    module = cast("nn.Module", module.to(device, **layout).eval().requires_grad_(False))
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


def _assigned(kind: Any, files: WeightFiles, dtype: torch.dtype) -> nn.Module | None:
    """Build the module and assign the tensors; return None if that is a task for the library's loader."""
    if not issubclass(kind, ModelMixin) or kind._keep_in_fp32_modules:
        return None
    module = on_meta(kind, files.folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if wanted != {name: info.shape for name, (_, info) in files.tensors.items()}:
        return None
    if any(name not in wanted for name, _ in module.named_buffers()):
        return None  # no file holds these: on the meta device they would be empty
    module.load_state_dict(read_tensors(files, dtype), assign=True)
    cast("Any", module).register_to_config(_name_or_path=str(files.folder))
    return module


def read_tensors(files: WeightFiles, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Return all tensors, the floating-point ones as `dtype`. Those that have it already are views of mapped files."""
    threads = torch.get_num_threads()
    readers = min(_READERS, len(os.sched_getaffinity(0)))
    tensors: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(readers, "plait-read", initializer=set_threads, initargs=(1,)) as pool:
        for path in files.files:
            names = [name for name, (holder, _) in files.tensors.items() if holder == path]
            with safe_open(path, framework="pt") as file:
                tensors.update(zip(names, pool.map(partial(_read, file, dtype=dtype), names), strict=True))
    torch.set_num_threads(threads)  # threads that have not computed yet inherit what was set last
    return tensors


def _read(file: Any, name: str, *, dtype: torch.dtype) -> torch.Tensor:
    tensor = cast("torch.Tensor", file.get_tensor(name))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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
