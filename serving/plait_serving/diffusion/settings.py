"""What an engine serves, and what its models need of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.lora.source import LoraSource, NoLoras

if TYPE_CHECKING:
    from plait_serving.diffusion.families.encoders import SharedEncoders


def cache_folder() -> Path:
    """Return plait's folder in the user's cache; of a user without a home, one that cannot be made: nothing is kept."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "plait"
    try:
        return Path.home() / ".cache" / "plait"
    except RuntimeError:  # a number that no list of users has, and no HOME
        return Path("/nonexistent/.cache/plait")


def default_prepared_folder() -> Path:
    """Return where converted models are kept: `plait/prepared` in the user's cache folder."""
    return cache_folder() / "prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to serve. "auto" as `device` and `dtype` means CUDA in float16 if available, otherwise the CPU in float32.

    `config`: the folder with a single file's configurations, if they are not the published ones.
    `controlnets` maps names to diffusers folders; `safety_checker` False leaves out a folder's checker (logged).
    `limits`: what requests may ask for at most; the multiple that edges have is the model's own.
    `prepared_folder` keeps what executors converted; `converts` False uses what is there and converts nothing.
    `audit_every`: one program call in so many, and the first of each shape, is computed again by torch; 0: none.
    """

    model: str | Path
    revision: str | None = None
    config: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    safety_checker: bool = True
    lora_source: LoraSource = field(default_factory=NoLoras)
    controlnets: Mapping[str, Path] = field(default_factory=dict)
    knobs: EngineKnobs = field(default_factory=EngineKnobs)
    limits: ImageLimits = field(default_factory=ImageLimits)
    executor: ExecutorName = ExecutorName.AUTO
    prepared_folder: Path = field(default_factory=default_prepared_folder)
    converts: bool = True
    audit_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The engine, as its models see it; by default one that loads nothing. `encoders`: the text encoders of all;
    `room_bytes`: what models with requests may hold beyond what they do."""

    knobs: Callable[[], EngineKnobs]
    encoders: SharedEncoders
    room_bytes: Callable[[], int] = lambda: 0
    is_idle: Callable[[], bool] = lambda: False
    between_steps: Callable[[Callable[[], None]], None] = lambda _: None
