"""Waiting on descriptors, and for the peer in a handshake. All polling is here."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from plait_fabric.errors import ConnectTimeout, PeerLost
from plait_fabric.transport.base import Deadline

T = TypeVar("T")

POLL_IN = select.POLLIN
POLL_OUT = select.POLLOUT
_HANG_UP = getattr(select, "POLLRDHUP", 0)
HUNG_UP = "the peer hung up during the handshake"


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


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the peer has closed its end, even if bytes that it sent before are still unread, or we have."""
    try:
        poll = select.poll()
        poll.register(sock.fileno(), _HANG_UP)
        return bool(poll.poll(0))
    except ValueError:  # closed meanwhile
        return True


def recv_exactly(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Read `nbytes` from a stream during a handshake. Raises `ConnectTimeout`, `PeerLost`."""
    data = b""
    while len(data) < nbytes:
        chunk = finish_connect(sock, deadline, partial(sock.recv, nbytes - len(data)))
        if not chunk:
            raise PeerLost(HUNG_UP)
        data += chunk
    return data


def finish_connect(sock: socket.socket, deadline: Deadline, call: Callable[[], T]) -> T:
    """Run a blocking socket call within the remaining time. Raises `ConnectTimeout`, `PeerLost`."""
    left_s = deadline.left_s()
    if left_s is not None and left_s <= 0:
        raise ConnectTimeout(f"no handshake within {deadline.timeout_s} s")
    sock.settimeout(left_s)
    try:
        return call()
    except TimeoutError as error:
        raise ConnectTimeout(f"no handshake within {deadline.timeout_s} s") from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise PeerLost(HUNG_UP) from error
