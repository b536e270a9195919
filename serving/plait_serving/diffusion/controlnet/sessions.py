"""What a ControlNet service keeps between steps, bounded in bytes and in time. Pure: the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from plait_serving.diffusion.controlnet.rows import Constants
from plait_serving.diffusion.errors import EngineError

Held = Constants | EngineError
"""A session's constants, or why they could not be computed."""

_MIN_BYTES = 1_024
"""The min size that a session counts as, so that errors are bounded too."""


@dataclass(slots=True, eq=False)
class _StoredSession:
    held: Held
    nbytes: int
    used_at_s: float


class SessionTable:
    """Sessions by (peer, number), least recently used first. Not thread-safe.

    When they hold more than `capacity_bytes`, the least recently used are dropped, never the newest; so are those
    that have not been used for `idle_s`. Their clients get "unknown session" and open them again.
    """

    def __init__(self, *, capacity_bytes: int, idle_s: float, clock: Callable[[], float]) -> None:
        self._capacity_bytes = capacity_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._entries: OrderedDict[tuple[int, int], _StoredSession] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, peer: int, session: int, held: Held) -> None:
        """Add a session, replacing an earlier one of that number."""
        self.forget(peer, session)
        entry = _StoredSession(held, _nbytes_of(held), self._clock())
        self._entries[peer, session] = entry
        self._nbytes += entry.nbytes
        while self._nbytes > self._capacity_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def get(self, peer: int, session: int) -> Held | None:
        """Return the session, now the most recently used; None if it is not known, or no longer."""
        entry = self._entries.get((peer, session))
        if entry is None:
            return None
        entry.used_at_s = self._clock()
        self._entries.move_to_end((peer, session))
        return entry.held

    def forget(self, peer: int, session: int) -> None:
        """Drop one session, if it is known."""
        if (peer, session) in self._entries:
            self._drop((peer, session))

    def forget_peer(self, peer: int) -> None:
        """Drop everything that a peer opened."""
        for key in [key for key in self._entries if key[0] == peer]:
            self._drop(key)

    def forget_idle(self) -> None:
        """Drop what has not been used for `idle_s`."""
        too_old_s = self._clock() - self._idle_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.used_at_s > too_old_s:
                return
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._nbytes -= self._entries.pop(key).nbytes


def _nbytes_of(held: Held) -> int:
    if isinstance(held, EngineError):
        return _MIN_BYTES
    tensors = [held.embedding, held.conditioning.text, *held.conditioning.added.values()]
    return _MIN_BYTES + sum(tensor.nbytes for tensor in tensors)
