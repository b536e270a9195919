"""Anonymous shared memory: a sealed memfd, passed over a unix socket. All memfd calls are here.

Nothing appears in /dev/shm and nothing is left behind: the kernel frees the pages when the last
process that maps them has ended, in whatever way. The size is sealed, so a peer cannot shrink the
segment while it is in use (which would cause a SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from plait_fabric.errors import ProtocolViolation

MAX_SEGMENT_BYTES = 1 << 40
"""The max address space that a peer may make us map; pages cost nothing until the peer uses them."""


def create_segment(nbytes: int) -> tuple[memoryview, int]:
    """Return a segment, mapped, and the descriptor to pass to the peer (the caller closes it)."""
    rounded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("plait-fabric", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, rounded)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return _mapped(descriptor, rounded), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_segment(descriptor: int) -> memoryview:
    """Map the peer's segment. Raises `ProtocolViolation` unless its size is sealed and sane."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        nbytes = os.fstat(descriptor).st_size
        if not seals & fcntl.F_SEAL_SHRINK or not 0 < nbytes <= MAX_SEGMENT_BYTES:
            raise ProtocolViolation("the peer's segment is not sealed, or its size is absurd")
        return _mapped(descriptor, nbytes)
    except (OSError, ValueError) as error:
        raise ProtocolViolation(f"the peer's segment cannot be mapped: {error}") from error


def _mapped(descriptor: int, nbytes: int) -> memoryview:
    """It stays mapped while anything still views it."""
    mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


@contextmanager
def closing(descriptors: Sequence[int]) -> Iterator[None]:
    """Close the descriptors in the end."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
