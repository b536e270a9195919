"""Which workers of a job are alive. A worker's claims remain its own while it lives.

A worker holds a kernel lock on a file of its own, and touches it periodically. It counts as lost when nobody holds
the lock (it died: known at once) or when the file was not touched for `LEASE_S` (it hangs, or its machine does).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

LEASE_S = 60.0
_RENEW_S = LEASE_S / 6.0


class Heartbeat:
    """This worker's file. `now_s` is in seconds since 1970."""

    def __init__(self, folder: Path, worker: str, *, now_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / worker
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self.worker = worker
        self._touched_s = -LEASE_S
        self.renew(now_s=now_s)

    def renew(self, *, now_s: float) -> None:
        """Touch the file if it is due."""
        if now_s - self._touched_s >= _RENEW_S:
            os.utime(self._descriptor, (now_s, now_s))
            self._touched_s = now_s

    def close(self) -> None:
        """Remove the file and release the lock: this worker has ended."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_present(folder: Path, worker: str, *, now_s: float) -> bool:
    """Return whether this worker is alive and working."""
    try:
        descriptor = os.open(folder / worker, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return now_s - os.fstat(descriptor).st_mtime < LEASE_S
    finally:
        os.close(descriptor)
    return False


def present_workers(folder: Path, *, now_s: float) -> tuple[str, ...]:
    """Return the workers that are alive, in order of their names."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return tuple(name for name in names if is_present(folder, name, now_s=now_s))
