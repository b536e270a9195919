"""Sources of LoRA files: the protocol, the local folder, and several sources as one. `remote` has the remote store.

A file is addressed by name, never by path or URL. `find` and `list` are cheap and read no tensors; `fetch` may take
as long as a download and runs on loader threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.values import NAME_PATTERN

_log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""The file name that diffusers' `save_lora_weights` uses in its folder."""
ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""The file names that PEFT's `save_pretrained` uses in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraEntry:
    """A LoRA that exists now. `stamp` changes when its content may have changed; equal stamps mean equal content.

    `sha256` is set where the operator pinned it.
    """

    name: str
    nbytes: int
    stamp: str
    sha256: str | None = None


class LoraSource(Protocol):
    """A place with LoRA files. Thread-safe."""

    def find(self, name: str) -> LoraEntry | None:
        """Return the LoRA of that name, or None; `name` may be any string."""

    def list(self) -> Mapping[str, LoraEntry]:
        """Return all LoRAs that exist now by name, in name order."""

    def fetch(self, name: str) -> Path:
        """Return a local file with its content; blocks. Raises `NotFound`, or `LoraError` if it cannot be fetched."""

    def close(self) -> None:
        """Make running fetches fail soon. Idempotent."""


def not_found(name: str) -> NotFound:
    """Return the error that every source raises for a name that it does not have."""
    return NotFound(f"there is no LoRA named {name!r}", param="loras")


class FolderSource:
    """A folder with `<name>.safetensors` files, and with sub-folders `<name>` as diffusers and PEFT save them:
    `pytorch_lora_weights.safetensors`, or `adapter_model.safetensors` with an `adapter_config.json`.

    It is read anew at every call, so new files are seen without a restart; a file wins over a sub-folder of its
    name. Links that lead out of the folder are ignored, and so are names that `NAME_PATTERN` refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reported: set[str] = set()

    def find(self, name: str) -> LoraEntry | None:
        """Return the LoRA of that name, or None."""
        path = self._path(name)
        return _entry(name, path) if path else None

    def list(self) -> Mapping[str, LoraEntry]:
        """Return all LoRAs by name; an absent folder counts as empty."""
        try:
            found = sorted(self._folder.iterdir())
        except OSError:
            found = []
        names = {path.name.removesuffix(SUFFIX) for path in found if path.name.endswith(SUFFIX) or path.is_dir()}
        for path in found:
            if path.suffix in {".pt", ".pth", ".ckpt", ".bin"} and path.name not in self._reported:
                self._reported.add(path.name)
                _log.warning("%s is ignored: only .safetensors files are read", path.name)
        entries = {name: entry for name in sorted(names) if (entry := self.find(name))}
        return MappingProxyType(entries)

    def fetch(self, name: str) -> Path:
        """Return the file itself."""
        path = self._path(name)
        if path is None:
            raise not_found(name)
        return path

    def close(self) -> None:
        """Do nothing: a fetch does not block."""

    def _path(self, name: str) -> Path | None:
        if not NAME_PATTERN.fullmatch(name):
            return None
        root = self._folder.resolve()
        for candidate in (self._folder / f"{name}{SUFFIX}", self._folder / name / DIFFUSERS_FILE):
            if (path := _inside(root, candidate)) is not None:
                return path
        path = _inside(root, self._folder / name / ADAPTER_FILE)
        has_config = path is not None and path.name == ADAPTER_FILE and _inside(root, path.parent / CONFIG_FILE)
        return path if has_config else None


def _inside(root: Path, candidate: Path) -> Path | None:
    """Return the file that a path leads to, unless there is none or it is outside of the folder."""
    try:
        path = candidate.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return path if path.is_file() and path.is_relative_to(root) else None


def _entry(name: str, path: Path) -> LoraEntry | None:
    read = [path, path.parent / CONFIG_FILE] if path.name == ADAPTER_FILE else [path]
    try:
        stats = [one.stat() for one in read]
    except OSError:
        return None  # removed between two looks
    stamp = "-".join(f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}" for stat in stats)
    return LoraEntry(name=name, nbytes=stats[0].st_size, stamp=stamp)


class ChainSource:
    """Several sources as one; the first that has a name wins."""

    def __init__(self, sources: Sequence[LoraSource]) -> None:
        self._sources = tuple(sources)

    def find(self, name: str) -> LoraEntry | None:
        """Return the entry of the first source that has it."""
        return next((entry for source in self._sources if (entry := source.find(name))), None)

    def list(self) -> Mapping[str, LoraEntry]:
        """Return all names of all sources."""
        merged: dict[str, LoraEntry] = {}
        for source in reversed(self._sources):
            merged.update(source.list())
        return MappingProxyType(dict(sorted(merged.items())))

    def fetch(self, name: str) -> Path:
        """Fetch from the first source that has it."""
        for source in self._sources:
            if source.find(name):
                return source.fetch(name)
        raise not_found(name)

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources:
            source.close()
