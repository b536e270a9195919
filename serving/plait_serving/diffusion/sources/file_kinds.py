"""What a model's files look like from outside: their names, the names of their tensors, configurations. Loads no
library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plait_serving.diffusion.errors import ModelError

SUFFIX = ".safetensors"
_PICKLE = "a pickle, which can run code when it is loaded; get or save it as .safetensors"
_GGUF = "a GGUF checkpoint, which is not supported; get the model as .safetensors in F16 or BF16"
SINGLE_CONTROLNET = (
    "a single file; ControlNets are read from diffusers folders: "
    "ControlNetModel.from_single_file(FILE).save_pretrained(FOLDER) of diffusers makes one"
)
DENOISER = "model.diffusion_model."
"""What the keys of the model that steps begin with in whole checkpoints in one file, whatever its family."""
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")


def is_pickle(name: str) -> bool:
    """Return whether a file's name is one of those that hold pickles."""
    return name.lower().endswith(_PICKLES)


def why_unread(name: str) -> str | None:
    """Return what a file of that name is, if models are not read from such; None: it may be one."""
    return _PICKLE if is_pickle(name) else _GGUF if name.lower().endswith(".gguf") else None


def stem_of(name: str) -> str | None:
    """Return a file's name without `SUFFIX`, in whatever case it is written; None: it has another."""
    return name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return what a configuration says. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def no_single_file(folder: Path) -> Path:
    """Return a ControlNet's folder. Raises ValueError for a name that single files have."""
    if (is_pickle(folder.name) or stem_of(folder.name) is not None) and not folder.is_dir():
        raise ValueError(f"{folder.name!r} is {SINGLE_CONTROLNET}")
    return folder


def is_controlnet(keys: Iterable[str]) -> bool:
    """Return whether tensors of these names are a ControlNet's, in the original layout or in that of diffusers."""
    return any("input_hint_block." in key or key.startswith("controlnet_") for key in keys)
