"""A family without an engine around it, and the weights in its folder."""

from __future__ import annotations

from pathlib import Path

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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder; newer classes leave out what the names of published text encoders begin with."""
    return {
        f"{path.parent.name}.{name.removeprefix('text_model.')}": tensor
        for path in folder.glob("*/*.safetensors")
        for name, tensor in load_file(path).items()
    }
