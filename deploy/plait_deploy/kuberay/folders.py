"""The folders that an application names, as its pods see them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from plait_deploy.errors import DeployError
from plait_deploy.kuberay.options import Volumes

__all__ = ["mapped"]

_READ = {"folder", "model"}
_WRITTEN = {"cache_folder"}
_ALSO_WRITTEN = {"tuning.folder"}
_ALSO_READ = "images.models."
"""Its keys are names of models."""


def mapped(args: Mapping[str, Any], volumes: Volumes) -> dict[str, Any]:
    """Return the arguments with every absolute path below `models_from` moved to the volume of models.

    Raises DeployError for a path that lies on no volume: no pod would find it.
    """
    return {key: _value(value, key, key, volumes) for key, value in args.items()}


def _value(value: Any, key: str, where: str, volumes: Volumes) -> Any:
    if isinstance(value, Mapping):
        return {inner: _value(it, inner, f"{where}.{inner}", volumes) for inner, it in value.items()}
    is_path = key in _READ | _WRITTEN or where.startswith(_ALSO_READ)
    if not isinstance(value, str) or not value.startswith("/") or not is_path:
        return value
    path = PurePosixPath(value)
    if key in _WRITTEN or where in _ALSO_WRITTEN:
        if not path.is_relative_to(volumes.cache.path):
            raise DeployError(f"{where}: {value} is written to, so it must lie below {volumes.cache.path} (the cache)")
        return value
    if volumes.models_from is not None and path.is_relative_to(volumes.models_from):
        return str(PurePosixPath(volumes.models.path) / path.relative_to(volumes.models_from))
    if path.is_relative_to(volumes.models.path):
        return value
    raise DeployError(
        f"{where}: {value} is not below {volumes.models.path}, where pods have models; "
        f"deploy.volumes.models_from names the local folder that lies there"
    )
