"""What all sections of plait.yaml have in common, whatever workload they configure."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from plait_serving.diffusion.sources.names import RULE, composed, is_name
from plait_serving.diffusion.values import NAME_PATTERN

MAX_REPLICAS = 64
"""Of a deployment whose number follows the load."""


def _absolute(path: Path, info: ValidationInfo) -> Path:
    """Resolve a relative path in a file relative to that file."""
    folder = (info.context or {}).get("folder") if isinstance(info.context, dict) or info.context is None else None
    path = Path(expanduser(path))
    return path if path.is_absolute() or folder is None else Path(folder) / path


def _name(value: str) -> str:
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(f"a name must match {NAME_PATTERN.pattern}")
    return value


def _served_name(value: str) -> str:
    name = composed(value)
    if not is_name(name):
        raise ValueError(RULE)
    return name


FolderPath = Annotated[Path, AfterValidator(_absolute)]
Name = Annotated[str, AfterValidator(_name)]
ServedName = Annotated[str, AfterValidator(_served_name)]
"""Of a LoRA, or of a base model that may lie in a folder."""
GpuShare = Annotated[
    float | None,
    Field(ge=0, description="GPUs of a replica; 0: it runs on the CPU; unset: fitted to those that there are"),
]


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Replicas(Section):
    """A number of replicas that follows the load by the rules of `plait_disagg.queue.scale`."""

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    up_after_s: Annotated[float, Field(ge=0, le=3600, description="how long it must be too few")] = 2.0
    down_after_s: Annotated[float, Field(ge=0, le=86_400, description="how long it must be too many")] = 30.0

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class Replicated(Section):
    """A deployment: so many replicas, or a number that follows the load."""

    replicas: Annotated[int, Field(ge=1, le=1024)] | Replicas = 1

    @property
    def min_replicas(self) -> int:
        """The number of replicas at the start, and the minimum."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    @property
    def max_replicas(self) -> int:
        """The max number of replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max
