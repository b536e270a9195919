"""Anonymous shared memory: a sealed memfd, passed over a unix socket. All memfd calls are here.

Nothing appears in /dev/shm and nothing is left behind: the kernel frees the pages when the last
process that maps them has ended, in whatever way. The size is sealed, so a peer cannot shrink the
segment while it is in use (which would cause a SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

from plait_fabric.errors import ProtocolViolation, Unsupported

MAX_SEGMENT_BYTES = 1 << 40
"""The max address space that a peer may make us map; pages cost nothing until the peer uses them."""


class Segment:
    """A mapping of `nbytes`. It stays mapped while anything still views `memory`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.memory = memoryview(mapping)

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, int]:
        """Create a segment and the descriptor to pass to the peer (the caller closes it)."""
        require_linux()
        rounded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("plait-fabric", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, rounded)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, rounded), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int) -> Segment:
        """Map the peer's segment. Raises `ProtocolViolation` unless its size is sealed and sane."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            nbytes = os.fstat(descriptor).st_size
            if not seals & fcntl.F_SEAL_SHRINK or not 0 < nbytes <= MAX_SEGMENT_BYTES:
                raise ProtocolViolation("the peer's segment is not sealed, or its size is absurd")
            return cls(descriptor, nbytes)
        except (OSError, ValueError) as error:
            raise ProtocolViolation(f"the peer's segment cannot be mapped: {error}") from error


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close the descriptors received with a packet."""
    for descriptor in descriptors:
        os.close(descriptor)


def require_linux() -> None:
    """Raise `Unsupported` where memfd, seals or SOCK_SEQPACKET are missing."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise Unsupported("shm:// needs Linux (memfd and SOCK_SEQPACKET); use tcp:// here")
