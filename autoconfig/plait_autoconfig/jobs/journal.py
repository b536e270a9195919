"""The Optuna storage of a job: a journal file that survives a `kill -9` at any byte, or a database by URL."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend


class KernelLock:
    """An exclusive lock that the kernel releases when its holder dies; Optuna's own locks take 30 s for that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Wait for the lock."""
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._descriptor = descriptor

    def release(self) -> None:
        """Release it."""
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None


class _MendedBackend(JournalFileBackend):  # type: ignore[misc]  # optuna is untyped for us
    """Optuna's journal file, except for a last line that its writer never finished.

    Optuna appends after such a line, and then cannot read any further. Here it is cut off first, under the same
    lock.
    """

    def __init__(self, path: Path, lock: KernelLock) -> None:
        super().__init__(str(path))
        self._path, self._kernel_lock = path, lock

    def append_logs(self, logs: list[dict[str, object]]) -> None:
        """Append in one synced write."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._kernel_lock.acquire()
        try:
            cut_torn_line(self._path)
            with self._path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        finally:
            self._kernel_lock.release()


def open_storage(location: str | Path) -> BaseStorage:
    """Open the storage. `location`: a database URL, or the path of a journal file, which is created if missing."""
    if "://" in str(location):
        return RDBStorage(str(location))
    path = Path(location)
    return JournalStorage(_MendedBackend(path, KernelLock(path.with_name(f"{path.name}.lock"))))


def cut_torn_line(path: Path) -> None:
    """Cut off an unterminated last line. The caller holds the lock that writers take."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
