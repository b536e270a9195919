"""LoRA files in a remote store that the operator configures, with a node-local cache. All fsspec calls are made here.

Every entry is pinned by sha256 and size, so cached files can be trusted across restarts and shared by all processes
of a node: a file is named by its hash, written to a temporary name, checked, and moved into place; it is checked
again whenever it is used. A lock file per entry makes several processes download it once; the lock ends with its
holder, even by kill -9.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import BinaryIO

from plait_serving.diffusion.errors import EngineStopped, LoraError
from plait_serving.diffusion.lora.parse import MAX_FILE_BYTES
from plait_serving.diffusion.lora.source import LoraEntry, not_found
from plait_serving.diffusion.sources.file_kinds import SUFFIX
from plait_serving.diffusion.sources.names import is_name
from plait_serving.diffusion.sources.staging import locked

_log = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEntry:
    """One file of the store. `path` is below the store's URL; `sha256` is lower-case hex of its content."""

    path: str
    sha256: str
    nbytes: int

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.path}: sha256 must be 64 lower-case hex digits, not {self.sha256!r}")
        if not 0 < self.nbytes <= MAX_FILE_BYTES:
            raise ValueError(f"{self.path}: nbytes must be 1..{MAX_FILE_BYTES}, not {self.nbytes}")
        if not self.path or ".." in self.path.split("/"):
            raise ValueError(f"{self.path!r} is not a path below the store's URL")


class RemoteSource:
    """A `LoraSource` over an fsspec URL ("s3://bucket/loras", "https://host/loras", "file:///srv/loras", ...).

    Only `entries` exist; the store is never listed.
    """

    def __init__(self, url: str, entries: Mapping[str, RemoteEntry], *, cache_folder: Path) -> None:
        for name in entries:
            if not is_name(name):
                raise ValueError(f"{name!r} is no valid LoRA name")
        self._url = url.rstrip("/")
        self._entries = MappingProxyType(dict(sorted(entries.items())))
        self._folder = cache_folder
        self._closed = Event()

    def names(self) -> Collection[str]:
        """Return the names of all configured entries."""
        return self._entries

    def find(self, name: str) -> LoraEntry | None:
        """Return the entry of that name, or None. No network."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        return LoraEntry(name=name, nbytes=entry.nbytes, stamp=entry.sha256)

    def fetch(self, name: str) -> Path:
        """Return the verified file in the node's cache, downloading it if it is missing or damaged."""
        entry = self._entries.get(name)
        if entry is None:
            raise not_found(name)
        path = self._folder / f"{entry.sha256}{SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / f"{entry.sha256}.lock"):
                if not self._is_good(path, entry):
                    self._download(name, entry, path)
        except OSError as error:
            raise LoraError(f"LoRA {name!r}: the node's cache cannot be used ({error})", param="loras") from error
        return path

    def close(self) -> None:
        """Make running downloads fail at their next chunk."""
        self._closed.set()

    def _is_good(self, path: Path, entry: RemoteEntry) -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            if path.stat().st_size == entry.nbytes and hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256:
                return True
        _log.warning("%s in the LoRA cache is damaged; fetching it again", path.name)
        return False

    def _download(self, name: str, entry: RemoteEntry, path: Path) -> None:
        for leftover in self._folder.glob(f".{entry.sha256}.*.part"):
            leftover.unlink(missing_ok=True)  # of a process that was killed; we hold its lock
        problem = ""
        for _ in range(_ATTEMPTS):
            part = self._folder / f".{entry.sha256}.{uuid.uuid4().hex}.part"
            try:
                self._receive(entry, part)
                part.replace(path)
                return
            except LoraError as error:
                problem = error.message
            finally:
                part.unlink(missing_ok=True)
        raise LoraError(f"LoRA {name!r}: {problem}", param="loras")

    def _receive(self, entry: RemoteEntry, part: Path) -> None:
        """Write `part`. Raises `LoraError` for what is wrong with the remote file, OSError if it cannot be written."""
        digest, received_bytes = hashlib.sha256(), 0
        with part.open("wb") as sink:
            for chunk in self._chunks(entry):
                received_bytes += len(chunk)
                if received_bytes > entry.nbytes:
                    raise LoraError(f"the remote file has more than its {entry.nbytes} bytes")
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if received_bytes != entry.nbytes:
            raise LoraError(f"the remote file has {received_bytes} bytes, not {entry.nbytes}")
        if digest.hexdigest() != entry.sha256:
            raise LoraError(f"the remote file has sha256 {digest.hexdigest()}, not {entry.sha256}")

    def _chunks(self, entry: RemoteEntry) -> Iterator[bytes]:
        import fsspec

        try:
            with fsspec.open(f"{self._url}/{entry.path}", "rb") as remote:
                while chunk := self._next(remote):
                    yield chunk
        except EngineStopped:
            raise
        except Exception as error:
            # The URL may carry credentials: only the type is reported.
            raise LoraError(f"the remote store does not deliver {entry.path!r} ({type(error).__name__})") from None

    def _next(self, remote: BinaryIO) -> bytes:
        if self._closed.is_set():
            raise EngineStopped("the engine is shutting down")
        return remote.read(_CHUNK_BYTES)
