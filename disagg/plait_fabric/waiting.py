"""Waiting: until when, and on descriptors. All polling is here."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Iterator

POLL_IN = select.POLLIN
POLL_OUT = select.POLLOUT

GONE = "is gone without a goodbye: it was killed, probably for memory, unless its log says otherwise"
"""What a peer's socket says when the kernel closed it: channels say goodbye, and who cuts a peer off logs why."""


class Deadline:
    """A time limit, or none (`timeout_s` None)."""

    __slots__ = ("_at_s", "timeout_s")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds left, never negative, or None when there is no limit."""
        return None if self._at_s is None else max(0.0, self._at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """True when no time is left."""
        return self._at_s is not None and time.monotonic() >= self._at_s


class Waiter:
    """One poll object: for one thread at a time."""

    def __init__(self, *descriptors: int, events: int) -> None:
        self._poll = select.poll()
        for descriptor in descriptors:
            self._poll.register(descriptor, events)

    def wait(self, timeout_s: float | None, *, spin_s: float = 0.0) -> bool:
        """Wait until a descriptor is ready or broken, at first without sleeping; return False on timeout."""
        if spin_s:
            until_s = time.monotonic() + (spin_s if timeout_s is None else min(spin_s, timeout_s))
            while time.monotonic() < until_s:
                if self._poll.poll(0):
                    return True
        return bool(self._poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


_BUSY_POLLS = 200
_PAUSE_S, _LAST_PAUSE_S = 5e-5, 1e-3


def pauses() -> Iterator[None]:
    """Return at once a few hundred times, and then less and less often: for what nobody is woken by, which is rare,
    because windows and pools are larger than what is usually on its way."""
    for _ in range(_BUSY_POLLS):
        yield
        time.sleep(0)
    pause_s = _PAUSE_S
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        yield


_LOOK_S = 0.01


def wait_until(holds: Callable[[], object], timeout_s: float) -> bool:
    """Look every now and then, for what nobody is woken by and nobody is in a hurry for; return whether it held in
    time."""
    deadline = Deadline(timeout_s)
    while not holds():
        if deadline.passed:
            return False
        time.sleep(_LOOK_S)
    return True


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the peer has closed its end, even if bytes that it sent before are still unread, or we have."""
    try:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))
    except ValueError:  # closed meanwhile
        return True
