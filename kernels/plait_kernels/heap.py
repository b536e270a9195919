"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes


def return_memory() -> None:
    """Have glibc return to the system what was freed: it keeps it for later, in arenas of its threads, between blocks
    that are in use. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
