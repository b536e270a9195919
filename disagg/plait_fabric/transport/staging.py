"""Moving what the caller sends into the channel's pool: handed-over leases unchanged, bytes by one copy."""

from __future__ import annotations

from collections.abc import Sequence

from plait_fabric.errors import BadTensor, PoolExhausted, SendTimeout
from plait_fabric.memory.pool import Lease, Pool, align, release_all
from plait_fabric.protocols import Buffer

Part = Lease | memoryview
"""A piece of payload that the channel owns (a lease) or may read until `send` returns (a flat view)."""


def part_view(part: Part) -> memoryview:
    """Return the bytes of a part."""
    return part.memory if isinstance(part, Lease) else part


def take_over(buffers: Sequence[Buffer]) -> list[Part]:
    """Take ownership of the caller's leases and flatten its bytes; on error every live lease is released."""
    parts: list[Part] = []
    if not buffers:
        return parts
    try:
        for buffer in buffers:  # one by one, so that a failure knows what was taken
            parts.append(buffer.hand_over() if isinstance(buffer, Lease) else _flat(buffer))  # noqa: PERF401
    except BaseException:
        release_all([*parts, *buffers])
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


def stage(pool: Pool, parts: Sequence[Part], timeout_s: float | None) -> tuple[list[Lease], list[tuple[int, int]]]:
    """Copy what is not a lease of `pool` into one of it. Return the leases that hold the message, and for each buffer
    where it is in the pool and its length.

    Raises `SendTimeout` when no room became free in time, `PoolExhausted` when it never can.
    """
    leases = [part for part in parts if isinstance(part, Lease) and part.pool is pool]
    room = None
    if len(leases) < len(parts):
        copied_bytes = sum(align(part.nbytes) for part in parts if not isinstance(part, Lease) or part.pool is not pool)
        try:
            room = pool.acquire(copied_bytes, timeout_s)
        except PoolExhausted as error:
            if pool.can_ever_lease(copied_bytes):
                raise SendTimeout(f"the peer holds all buffers: {error}") from error
            raise
        leases.append(room)
    places: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        if isinstance(part, Lease) and part.pool is pool:
            places.append((part.offset, part.nbytes))
            continue
        assert room is not None
        if part.nbytes:
            room.write(part_view(part), start)
        places.append((room.offset + start, part.nbytes))
        start += align(part.nbytes)
        release_all([part])
    return leases, places
