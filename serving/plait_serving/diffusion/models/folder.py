"""A folder of base models, which may come and go while the engine runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.sources.file_kinds import stem_of, why_unread
from plait_serving.diffusion.sources.names import NOWHERE, OUT, LeftOut, composed, shown, why_not

_log = logging.getLogger(__name__)

INDEX = "model_index.json"
"""What a diffusers folder has."""
_SINGLE = "a single file; images.models names those"
_MAX_FILES = 1000  # of one model
_TICK_NS = 1_000_000_000  # coarse file systems keep whole seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model's folder. `stamp` changes when its files may have changed."""

    folder: Path
    stamp: str


class FolderOfModels:
    """Every diffusers folder in it is a base model, by its name; of two whose names are one once they are composed, the
    first by path. It is read anew at every call; what is not served is logged once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left_out = LeftOut(_log, folder)
        self.left_out: Mapping[str, str] = {}
        """What was not served at the last look, by its name in the folder, each with its reason."""

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
            root = self._folder.resolve(strict=True)
            files = sorted(path.name for path in root.iterdir())
        except (OSError, RuntimeError):
            return MappingProxyType({})
        models: dict[str, FoundModel] = {}
        files_of: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for file in files:
            name, found = composed(file), _model(root, file)
            if isinstance(found, FoundModel) and name not in models:
                models[name], files_of[name] = found, file
            elif found is not None:
                left_out[file] = found if isinstance(found, str) else f"{shown(files_of[name])} has its name"
        self._left_out.tell(left_out)
        self.left_out = left_out
        return MappingProxyType(dict(sorted(models.items())))


def _model(root: Path, file: str) -> FoundModel | str | None:
    """Return the model that has that name in the folder, or why it is not served; None: it is nothing that could be."""
    try:
        folder = (root / file).resolve(strict=True)
        if not folder.is_relative_to(root) or folder == root:
            return OUT
        if not folder.is_dir():
            return why_unread(file) or (_SINGLE if stem_of(file) is not None else None)
        why = why_not(file)
        if why is not None:
            return why
        if not (folder / INDEX).is_file():
            is_link = (folder / INDEX).is_symlink()
            return f"no diffusers folder: {f'its {INDEX} is {NOWHERE}' if is_link else f'it has no {INDEX}'}"
        return FoundModel(folder=folder, stamp=_stamp(folder))
    except (OSError, RuntimeError):
        return NOWHERE if (root / file).is_symlink() else None  # it went away between two looks


def _stamp(folder: Path) -> str:
    """Return what its files are, by name, place, time and size. A link that leads nowhere is a file that is not there,
    which is told when the model is loaded."""
    marks: list[str] = []
    for path in islice(folder.rglob("*"), _MAX_FILES):
        try:
            stat = path.stat()
        except FileNotFoundError:
            marks.append(f"{path.name}-nowhere")
            continue
        if not path.is_dir():
            marks.append(f"{path.name}-{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}")
    return " ".join(sorted(marks))
