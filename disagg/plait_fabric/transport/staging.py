"""Moving what the caller sends into the channel's pool: handed-over leases unchanged, bytes by one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait_fabric.errors import BadTensor, LeaseMisuse, PoolExhausted, SendTimeout
from plait_fabric.memory.extents import ALIGNMENT_BYTES
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.protocols import Buffer

Part = Lease | memoryview
"""A piece of payload that the channel owns (a lease) or may read until `send` returns (a flat view)."""


def align(nbytes: int) -> int:
    """Round up to the alignment of buffers within a message."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def part_view(part: Part) -> memoryview:
    """Return the bytes of a part."""
    return part.memory if isinstance(part, Lease) else part


def leases_of(parts: Sequence[Part]) -> list[Lease]:
    """Return the parts that are leases."""
    return [part for part in parts if isinstance(part, Lease)]


def take_over(buffers: Sequence[Buffer]) -> list[Part]:
    """Take ownership of the caller's leases and flatten its bytes; on error every live lease is released."""
    parts: list[Part] = []
    if not buffers:
        return parts
    try:
        for buffer in buffers:  # one by one, so that a failure knows what was taken
            parts.append(buffer.hand_over() if isinstance(buffer, Lease) else _flat(buffer))  # noqa: PERF401
    except BaseException:
        release_all(leases_of(parts))
        release_all([buffer for buffer in buffers if isinstance(buffer, Lease)])
        raise
    return parts


def _flat(buffer: memoryview | bytes | bytearray) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise BadTensor(f"a buffer must be a lease or bytes-like, got {type(buffer).__name__}") from error
    if not view.c_contiguous:
        raise BadTensor("a buffer must be C-contiguous; copy it into a lease instead")
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@dataclass(frozen=True)
class Staged:
    """A message in the pool: the leases that hold it, and for each buffer (lease, start in it, length)."""

    leases: list[Lease]
    places: list[tuple[Lease, int, int]]

    def views(self) -> list[memoryview]:
        """Return the buffers as views of the pool."""
        return [lease.memory[start : start + nbytes] for lease, start, nbytes in self.places]


def stage(pool: Pool, parts: Sequence[Part], timeout_s: float | None, keeps: Callable[[Lease], bool]) -> Staged:
    """Copy what is not yet in `pool` into one lease of it; leases that `keeps` accepts are not copied.

    Raises `SendTimeout` when no room became free in time, `PoolExhausted` when it never can.
    """
    stays = [isinstance(part, Lease) and keeps(part) for part in parts]
    copied_bytes = sum(align(part.nbytes) for part, stay in zip(parts, stays, strict=True) if not stay)
    if all(stays):
        lease = None
    else:
        try:
            lease = pool.acquire(copied_bytes, timeout_s)
        except PoolExhausted as error:
            if pool.can_ever_lease(copied_bytes):
                raise SendTimeout(f"the peer holds all buffers: {error}") from error
            raise
    places: list[tuple[Lease, int, int]] = []
    leases: list[Lease] = [] if lease is None else [lease]
    start = 0
    for part, stay in zip(parts, stays, strict=True):
        if stay and isinstance(part, Lease):
            places.append((part, 0, part.nbytes))
            leases.append(part)
            continue
        if lease is None:
            raise LeaseMisuse("a part has no place")
        if part.nbytes:
            lease.write(part_view(part), start)
        places.append((lease, start, part.nbytes))
        start += align(part.nbytes)
        if isinstance(part, Lease):
            part.release()
    return Staged(leases, places)
