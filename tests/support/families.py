"""A family without an engine around it, and what is in its folder: weights, configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from plait_serving.diffusion.families import open_family
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.settings import EngineSettings, Host


def opened(
    folder: Path, encoders: SharedEncoders | None = None, *, executor: ExecutorName = ExecutorName.TORCH
) -> Family:
    """What is known of the model in a folder. `encoders`: of an engine that has more than this model."""
    host = Host(
        knobs=EngineKnobs, room_bytes=lambda: 0, is_idle=lambda: True, between_steps=lambda function: function(),
        encoders=SharedEncoders() if encoders is None else encoders,
    )  # fmt: skip
    return open_family(folder, EngineSettings(model=folder, executor=executor), host)


def check_same_model(found: Path, expected: Path) -> None:
    """Every weight with its bits and dtype, every configuration and vocabulary: the images are the same."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    assert [key for key, tensor in theirs.items() if ours[key].dtype is not tensor.dtype] == []
    assert [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)] == []
    assert configurations(found) == configurations(expected)
    for path in expected.glob("tokenizer*/*"):
        if not path.name.endswith("config.json"):
            assert (found / path.relative_to(expected)).read_bytes() == path.read_bytes(), path


_NOTED = {"_name_or_path", "_diffusers_version", "transformers_version", "dtype", "architectures"}
"""What libraries write beside a configuration."""


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """The index and every part's configuration, by their paths, but for what libraries note of themselves."""
    return {
        str(path.relative_to(folder)): {
            key: value for key, value in json.loads(path.read_text()).items() if key not in _NOTED
        }
        for path in (folder / "model_index.json", *folder.glob("*/*config.json"))
    }


def edit_json(path: Path, **changes: Any) -> None:
    """Changes entries of a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder; newer classes leave out what the names of published text encoders begin with."""
    return {
        f"{path.parent.name}.{name.removeprefix('text_model.')}": tensor
        for path in folder.glob("*/*.safetensors")
        for name, tensor in load_file(path).items()
    }
