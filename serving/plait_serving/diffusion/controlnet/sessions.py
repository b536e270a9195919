"""What a ControlNet service keeps between steps, bounded in bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict

from plait_serving.diffusion.controlnet.rows import Constants
from plait_serving.diffusion.errors import EngineError

Held = Constants | EngineError
"""A session's constants, or why they could not be computed."""

_MIN_BYTES = 1_024
"""The min size that a session counts as, so that errors are bounded too."""


class SessionTable:
    """Sessions by (peer, number), least recently used first. Not thread-safe.

    When they hold more than `capacity_bytes`, the least recently used are dropped, never the newest. Their clients get
    "unknown session" and open them again.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[tuple[int, int], Held] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, peer: int, session: int, held: Held) -> None:
        """Add a session, replacing an earlier one of that number."""
        self.forget(peer, session)
        self._entries[peer, session] = held
        self._nbytes += _nbytes_of(held)
        while self._nbytes > self._capacity_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def get(self, peer: int, session: int) -> Held | None:
        """Return the session, now the most recently used; None if it is not known, or no longer."""
        held = self._entries.get((peer, session))
        if held is not None:
            self._entries.move_to_end((peer, session))
        return held

    def forget(self, peer: int, session: int) -> None:
        """Drop one session, if it is known."""
        if (peer, session) in self._entries:
            self._drop((peer, session))

    def forget_peer(self, peer: int) -> None:
        """Drop everything that a peer opened."""
        for key in [key for key in self._entries if key[0] == peer]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._nbytes -= _nbytes_of(self._entries.pop(key))


def _nbytes_of(held: Held) -> int:
    if isinstance(held, EngineError):
        return _MIN_BYTES
    tensors = [held.embedding, held.conditioning.text, *held.conditioning.added.values()]
    return _MIN_BYTES + sum(tensor.nbytes for tensor in tensors)
