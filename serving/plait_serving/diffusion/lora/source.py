"""Sources of LoRA files: the protocol, the local folder, and several sources as one. `remote` has the remote store.

A file is addressed by name, never by path or URL. `find` and `list` are cheap and read no tensors; `fetch` may take
as long as a download and runs on loader threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.lora.listing import ADAPTER_FILE, CONFIG_FILE, list_loras
from plait_serving.diffusion.sources.names import LeftOut

_log = logging.getLogger(__name__)


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
    """A folder of LoRAs, by the rules of `listing`. It is read anew at every call, so new files are seen without a
    restart; what is not served is logged once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left_out = LeftOut(_log, folder)

    def find(self, name: str) -> LoraEntry | None:
        """Return the LoRA of that name, or None."""
        path = self.files().get(name)
        return _entry(name, path) if path else None

    def list(self) -> Mapping[str, LoraEntry]:
        """Return all LoRAs by name; an absent folder counts as empty."""
        entries = {name: entry for name, path in self.files().items() if (entry := _entry(name, path))}
        return MappingProxyType(entries)

    def fetch(self, name: str) -> Path:
        """Return the file itself."""
        path = self.files().get(name)
        if path is None:
            raise not_found(name)
        return path

    def close(self) -> None:
        """Do nothing: a fetch does not block."""

    def files(self) -> Mapping[str, Path]:
        """Return the weights of all LoRAs by name: for all of them, far cheaper than `fetch` for each."""
        listing = list_loras(self._folder)
        self._left_out.tell(listing.left_out)
        return listing.files


def _entry(name: str, path: Path) -> LoraEntry | None:
    try:
        stats = [path.stat()]
    except OSError:
        return None  # removed between two looks
    if path.name == ADAPTER_FILE:
        with suppress(FileNotFoundError):  # it may have none
            stats.append((path.parent / CONFIG_FILE).stat())
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
