"""What all sections of plait.yaml have in common, whatever workload they configure: names, in requests too, replicas,
and who may ask for what."""

from __future__ import annotations

import re
from enum import StrEnum
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from plait_serving.diffusion.sources.names import RULE, composed, is_name
from plait_serving.diffusion.values import NAME_PATTERN

MAX_REPLICAS = 64
"""Of a deployment whose number follows the load."""


def folder_of(info: ValidationInfo) -> Path | None:
    """Return the folder of the file that is read, if one is."""
    return info.context.get("folder") if isinstance(info.context, dict) else None


def _absolute(path: Path, info: ValidationInfo) -> Path:
    """Resolve a relative path in a file relative to that file."""
    folder = folder_of(info)
    path = Path(expanduser(path))
    return path if path.is_absolute() or folder is None else folder / path


def checked_name(value: str) -> str:
    """Return a name. Raises ValueError for what is none."""
    if not NAME_PATTERN.fullmatch(value):  # fullmatch: `$` alone would let a final newline pass
        raise ValueError(
            "a name has 1 to 64 letters, digits, dots, dashes and underscores, and starts with a letter or digit"
        )
    return value


def _served_name(value: str) -> str:
    name = composed(value)
    if not is_name(name):
        raise ValueError(RULE)
    return name


FolderPath = Annotated[Path, AfterValidator(_absolute)]
Name = Annotated[str, AfterValidator(checked_name)]
ServedName = Annotated[str, AfterValidator(_served_name)]
"""Of a LoRA, or of a base model that may lie in a folder."""
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
GpuShare = Annotated[
    float | None,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="GPUs of a replica; 0: it runs on the CPU; unset: fitted to those that there are",
    ),
]


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Role(StrEnum):
    """What a key may do. An admin may do everything that a user may."""

    USER = "user"
    ADMIN = "admin"


def _sha256(text: str) -> str:
    """Check a key's sum. Raises ValueError that says how to make one."""
    if re.fullmatch("[0-9a-f]{64}", text) is None:
        raise ValueError("must be the key's SHA-256, 64 hexadecimal digits: printf %s KEY | sha256sum")
    return text


class ApiKey(Section):
    """A key that requests may carry as `Authorization: Bearer`. Only its SHA-256 is stored."""

    sha256: Annotated[str, AfterValidator(_sha256)]
    tenant: TenantName = "default"
    role: Role = Role.USER


class TenantLimits(Section):
    """What one tenant may ask for, over all its keys; unset: as much as the model allows."""

    weight: Annotated[
        float, Field(gt=0, le=1000, description="its share of the compute while others wait, relative to theirs")
    ] = 1.0
    requests_per_s: Annotated[float | None, Field(gt=0, description="of one ingress replica")] = None
    max_pixels: Annotated[int | None, Field(ge=1, description="of an image")] = None
    max_steps: Annotated[int | None, Field(ge=1)] = None
    max_images: Annotated[int | None, Field(ge=1, description="of a request")] = None
    queued_s: Annotated[float | None, Field(gt=0, description="predicted compute-seconds that may wait")] = None


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
