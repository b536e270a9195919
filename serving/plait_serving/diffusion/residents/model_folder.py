"""A folder of base models, which may come and go while the engine runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.values import NAME_PATTERN

__all__ = ["FolderOfModels", "FoundModel"]

_INDEX = "model_index.json"
_MAX_FILES = 1000  # of one model
_TICK_NS = 1_000_000_000  # coarse file systems keep whole seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model's folder. `stamp` changes when its files may have changed."""

    folder: Path
    stamp: str


class FolderOfModels:
    """Every diffusers folder in it is a base model, by its name. It is read anew at every call. Links that lead out of
    it are ignored, and so are names that `NAME_PATTERN` refuses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def changed_ns(self) -> int:
        """Return when something was last moved in or out; 0 for an absent folder. Far cheaper than `list`.

        Until that is `_TICK_NS` ago, now: more may be moved in at the very same time of the file system's clock.
        """
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return 0
        now_ns = time.time_ns()
        return now_ns if 0 <= now_ns - changed_ns < _TICK_NS else changed_ns

    def list(self) -> Mapping[str, FoundModel]:
        """Return the models that exist now, in name order; an absent folder counts as empty."""
        try:
            names = sorted(path.name for path in self._folder.iterdir() if NAME_PATTERN.fullmatch(path.name))
            root = self._folder.resolve(strict=True)
        except (OSError, RuntimeError):
            return MappingProxyType({})
        return MappingProxyType({name: found for name in names if (found := _model(root, self._folder / name))})


def _model(root: Path, named: Path) -> FoundModel | None:
    try:
        folder = named.resolve(strict=True)
        if not (folder.is_relative_to(root) and folder != root and (folder / _INDEX).is_file()):
            return None
        return FoundModel(folder=folder, stamp=_stamp(folder))
    except (OSError, RuntimeError):
        return None  # it went away between two looks


def _stamp(folder: Path) -> str:
    """Return what its files are, by name, place, time and size."""
    marks: list[str] = []
    for path in islice(folder.rglob("*"), _MAX_FILES):
        stat = path.stat()
        if not path.is_dir():
            marks.append(f"{path.name}-{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}")
    return " ".join(sorted(marks))
