"""Converted models on disk, keyed by content: a second start reads in a moment what the first one converted.

An entry is a folder. It is written beside its final name and renamed, so that an interrupted conversion leaves no
entry; what such a process left is removed by the next one. Entries hold no pickles.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)

_TEMPORARY = ".making-"


def content_key(files: Iterable[Path], facts: Iterable[str]) -> str:
    """Return 32 hex digits of the files' bytes and of `facts` (versions, options). Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    digest.update(json.dumps(sorted(facts)).encode())
    return digest.hexdigest()[:32]


class ProgramStore:
    """A folder of entries. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Path | None:
        """Return an entry's folder, or None."""
        path = self._folder / key
        return path if path.is_dir() else None

    def drop(self, key: str) -> None:
        """Remove an entry that cannot be used."""
        shutil.rmtree(self._folder / key, ignore_errors=True)

    @contextmanager
    def making(self, key: str) -> Iterator[Callable[[Callable[[Path], None]], Path]]:
        """Hold the lock of `key`; call what is given with a function that fills a folder.

        Raises OSError, for example if the disk is full; then nothing is left behind.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._remove_leftovers(key)
            yield lambda fill: self._write(key, fill)

    def _write(self, key: str, fill: Callable[[Path], None]) -> Path:
        made, final = self._folder / f"{_TEMPORARY}{key}", self._folder / key
        made.mkdir(mode=0o700)
        try:
            fill(made)
            if final.exists():
                shutil.rmtree(final)
            os.replace(made, final)  # noqa: PTH105  # Path.replace is the same call
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return final

    def _remove_leftovers(self, key: str) -> None:
        """Remove what an interrupted process left; the lock says that none is at work on it."""
        left = self._folder / f"{_TEMPORARY}{key}"
        if left.exists():
            _log.info("removing %s, which an interrupted conversion left", left)
            shutil.rmtree(left, ignore_errors=True)
