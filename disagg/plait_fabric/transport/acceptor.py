"""A listener over a socket: one thread accepts, and every handshake has one of its own, so that none holds up another.

Each connection has `handshake_timeout_s` to authenticate. At most `pending_handshakes` are kept;
when another arrives the oldest is dropped, so unauthenticated clients that connect and stay silent cannot keep
others out. Only authenticated peers reach `accept`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from plait_fabric.errors import AcceptTimeout, ChannelClosed, FabricError
from plait_fabric.protocols import Channel
from plait_fabric.values import FabricOptions
from plait_fabric.waiting import Deadline

log = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""How long to leave the backlog alone when the process has run out of file descriptors."""

Greet: TypeAlias = Callable[[socket.socket, Deadline], Channel]
"""Makes a channel of a connection once the peer is authenticated. Raises `FabricError` or `OSError` when it must be
dropped."""


class Listener:
    """Accepts authenticated peers at one address. A peer that does not authenticate is never returned."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        address: str,
        options: FabricOptions,
        greet: Greet,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Own `sock` (bound, listening). `on_close` cleans up the address."""
        self._sock = sock
        self.address = address
        """The address to connect to, with the actual port if port 0 was requested."""
        self._options = options
        self._greet = greet
        self._on_close = on_close
        self._changed = threading.Condition()
        self._ready: deque[Channel] = deque()
        self.rejected = 0
        """Connections dropped so far because they failed, or did not finish, the handshake."""
        self._closed = False
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._serve, name=f"fabric {address}", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next channel whose peer has authenticated."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout_s)
            if self._closed:
                raise ChannelClosed("the listener was closed")
            if not self._ready:
                raise AcceptTimeout(f"nobody connected within {timeout_s} s")
            return self._ready.popleft()

    def close(self) -> None:
        """Stop accepting, drop pending connections and wake `accept`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            pending = dict(self._pending)
            self._pending.clear()
        for sock in (self._sock, *pending):
            _wake(sock)
        for thread in (self._thread, *pending.values()):
            thread.join()
        self._sock.close()
        while self._ready:
            self._ready.popleft().close()
        self._on_close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closed and not isinstance(error, ConnectionAbortedError):
                    log.warning("fabric: cannot accept at %s: %s", self.address, error)
                    time.sleep(_PAUSE_S)
            else:
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        thread = threading.Thread(target=self._meet, args=(sock,), name=f"fabric {self.address} greeting", daemon=True)
        with self._changed:
            if self._closed:
                sock.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                log.warning("fabric: %s dropped a connection: %s", self.address, error)
                self.rejected += 1
                sock.close()  # last: the peer knows
                return
            crowded = len(self._pending) >= self._options.pending_handshakes
            oldest = next(iter(self._pending)) if crowded else None
            self._pending[sock] = thread  # which ends only under this lock
        if oldest is not None:
            self._drop(oldest, "pushed out by newer connections")

    def _meet(self, sock: socket.socket) -> None:
        try:
            channel = self._greet(sock, Deadline(self._options.handshake_timeout_s))
        except (FabricError, OSError) as error:
            self._drop(sock, str(error))
            sock.close()
            return
        with self._changed:
            self._pending.pop(sock, None)
            if len(self._ready) < self._options.pending_handshakes and not self._closed:
                self._ready.append(channel)
                self._changed.notify()
                return
        log.warning("fabric: %s drops a peer: nobody accepts", self.address)
        channel.close()

    def _drop(self, sock: socket.socket, why: str) -> None:
        """Have a handshake end, unless it has been dropped before."""
        with self._changed:
            if self._pending.pop(sock, None) is None:
                return
        _wake(sock)
        log.warning("fabric: %s dropped a connection: %s", self.address, why)
        with self._changed:
            self.rejected += 1  # last: what is counted has been told


def _wake(sock: socket.socket) -> None:
    """End a connection, or listening, for the thread that waits there; it closes the socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
