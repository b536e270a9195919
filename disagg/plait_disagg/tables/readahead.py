"""Reading a mapped file before its rows are needed.

Rows of a large mapping come in one page at a time (`container.py` explains why): a newly started server would spend
its first seconds under load on page faults, and on the disk where the file is not in the page cache. A file that
fits into memory is therefore read from end to end in the background.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

__all__ = ["read_ahead"]

_SHARE = 0.5
"""The max file size as a share of the available memory: a larger file would evict what others need."""

_READ_BYTES = 8 << 20
_MAP_BYTES = 1 << 20
"""How much is mapped at once: little, because Python holds the GIL while the kernel maps pages."""

_MADV_POPULATE_READ = 22
"""From Linux 5.14, asm-generic/mman-common.h: populates pages as if each had been read."""


def read_ahead(path: Path, mapping: mmap.mmap) -> threading.Thread | None:
    """Read the file and map its pages on a separate thread, which is returned; None if the file is too large."""
    if len(mapping) > _SHARE * available_bytes():
        return None
    thread = threading.Thread(target=_read, args=(path, mapping), name=f"read ahead {path.name}", daemon=True)
    thread.start()
    return thread


def available_bytes() -> int:
    """Return the bytes of memory available without swapping according to /proc/meminfo; 0 where it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found.get("MemAvailable", "0 kB").split()[0])


def _read(path: Path, mapping: mmap.mmap) -> None:
    """Read the file, best effort: if anything fails here, lookups read for themselves."""
    room = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(mapping), _READ_BYTES):
                os.preadv(file.fileno(), [room], start)
                for part in range(start, min(start + _READ_BYTES, len(mapping)), _MAP_BYTES):
                    mapping.madvise(_MADV_POPULATE_READ, part, min(_MAP_BYTES, len(mapping) - part))
    except (OSError, ValueError):
        return
