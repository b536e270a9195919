"""What all sections of plait.yaml have in common, whatever workload they configure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

from plait_serving.diffusion.values import NAME_PATTERN

__all__ = ["INGRESS_CPUS", "FolderPath", "Name", "Section"]

INGRESS_CPUS = 0.1
"""Logical CPUs that Ray counts for the HTTP ingress, which all workloads share."""


def _absolute(path: Path, info: ValidationInfo) -> Path:
    """Resolve a relative path in a file relative to that file."""
    folder = (info.context or {}).get("folder") if isinstance(info.context, dict) or info.context is None else None
    path = path.expanduser()
    return path if path.is_absolute() or folder is None else Path(folder) / path


def _name(value: str) -> str:
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(f"a name must match {NAME_PATTERN.pattern}")
    return value


FolderPath = Annotated[Path, AfterValidator(_absolute)]
Name = Annotated[str, AfterValidator(_name)]


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")
