"""Sources of LoRA files: the protocol, the local folder, and none at all. `remote` has the remote store.

A file is addressed by name, never by path or URL. `names` and `find` are cheap, also among thousands, and read no file;
`fetch` may take as long as a download and runs on loader threads.
"""

from __future__ import annotations

import logging
import math
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.lora.listing import ADAPTER_FILE, CONFIG_FILE, Listing, list_loras
from plait_serving.diffusion.sources.names import LeftOut

_log = logging.getLogger(__name__)

MAX_AGE_S = 2.0
"""How old may be what is known of a folder, in seconds."""
_READ_S = 10.0
"""When a folder is read though no directory in it has another time: some network file systems keep none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraEntry:
    """A LoRA that exists now. `stamp` changes when its content may have changed; equal stamps mean equal content."""

    name: str
    nbytes: int
    stamp: str


class LoraSource(Protocol):
    """A place with LoRA files. Thread-safe."""

    def names(self) -> Collection[str]:
        """Return the names of all LoRAs, in order; the same object while there is nothing new."""

    def find(self, name: str) -> LoraEntry | None:
        """Return the LoRA of that name, or None; `name` may be any string."""

    def fetch(self, name: str) -> Path:
        """Return a local file with its content; blocks. Raises `NotFound`, or `LoraError` if it cannot be fetched."""

    def close(self) -> None:
        """Make running fetches fail soon. Idempotent."""


def not_found(name: str) -> NotFound:
    """Return the error that every source raises for a name that it does not have."""
    return NotFound(f"there is no LoRA named {name!r}", param="loras")


class FolderSource:
    """A folder of LoRAs, by the rules of `listing`. What came or went is known after `MAX_AGE_S`, or when somebody
    looks; a file that is asked for is looked at then and there, so that none is taken for the one that it replaced.
    What is not served is logged once."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._left_out = LeftOut(_log, folder)
        self._clock = clock
        self._lock = threading.Lock()
        self._listing: Listing  # from the first look on
        self._looked_s = self._read_s = -math.inf

    def names(self) -> Collection[str]:
        """Return the names of all LoRAs; an absent folder counts as empty."""
        return self.files()

    def find(self, name: str) -> LoraEntry | None:
        """Return the LoRA of that name, or None."""
        found = self._find(name)
        return found and found[1]

    def stamps(self) -> dict[str, str]:
        """Return the stamps of all LoRAs by name: a look at every file."""
        return {name: entry.stamp for name, path in self.files().items() if (entry := _entry(name, path))}

    def fetch(self, name: str) -> Path:
        """Return the file itself."""
        found = self._find(name)
        if found is None:
            raise not_found(name)
        return found[0]

    def close(self) -> None:
        """Do nothing: a fetch does not block."""

    def files(self) -> Mapping[str, Path]:
        """Return the weights of all LoRAs by name, as they were known at most `MAX_AGE_S` ago."""
        return self._known().files

    def look(self) -> Listing:
        """Return what the folder holds now: the same object as before if nothing came or went. It is read only if
        something did, or after `_READ_S`."""
        with self._lock:
            now_s = self._clock()
            if now_s >= self._read_s + _READ_S or not self._listing.is_current():
                self._listing, self._read_s = list_loras(self._folder), now_s
                self._left_out.tell(self._listing.left_out)
            self._looked_s = self._clock()
            return self._listing

    def _known(self) -> Listing:
        is_new = self._clock() < self._looked_s + MAX_AGE_S
        # On a slow file system nobody waits for what somebody looks for already.
        return self._listing if is_new or (self._lock.locked() and self._looked_s > -math.inf) else self.look()

    def _find(self, name: str) -> tuple[Path, LoraEntry] | None:
        for listing_of in (self._known, self.look):
            path = listing_of().leads_to(name)
            if path and (entry := _entry(name, path)):
                return path, entry
        return None


def _entry(name: str, path: Path) -> LoraEntry | None:
    try:
        stats = [path.stat()]
        if path.name == ADAPTER_FILE:
            with suppress(FileNotFoundError):  # it may have none
                stats.append((path.parent / CONFIG_FILE).stat())
    except OSError:
        return None  # removed between two looks
    if not stat.S_ISREG(stats[0].st_mode):
        return None
    # With the time of the last change of any kind: who overwrites a file in place may put its own time back.
    stamp = "-".join(f"{it.st_ino}-{it.st_mtime_ns}-{it.st_ctime_ns}-{it.st_size}" for it in stats)
    return LoraEntry(name=name, nbytes=stats[0].st_size, stamp=stamp)


class NoLoras:
    """The source of who has no LoRAs."""

    def names(self) -> Collection[str]:
        """Return nothing."""
        return ()

    def find(self, name: str) -> LoraEntry | None:
        """Return None."""
        del name
        return None

    def fetch(self, name: str) -> Path:
        """Raise `NotFound`."""
        raise not_found(name)

    def close(self) -> None:
        """Do nothing."""
