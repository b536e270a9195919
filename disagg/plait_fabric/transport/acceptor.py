"""A listener over a socket: one thread does all handshakes, none of which can hold up another.

Each connection has `handshake_timeout_s` to authenticate. At most `pending_handshakes` are kept;
when another arrives the oldest is dropped, so unauthenticated clients that connect and stay silent cannot keep
others out. Only authenticated peers reach `accept`.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from plait_fabric.errors import AcceptTimeout, ChannelClosed, FabricError
from plait_fabric.protocols import Channel
from plait_fabric.values import FabricOptions

log = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""How long to leave the backlog alone when the process has run out of file descriptors."""


class Arrival(Protocol):
    """A connection during its handshake. Its socket is non-blocking."""

    sock: socket.socket

    def start(self) -> None:
        """Send the first block."""

    def advance(self) -> Channel | None:
        """Continue once bytes are readable; return the channel once the peer is authenticated.

        Raises `FabricError` or `OSError` when the connection must be dropped.
        """

    def abandon(self) -> None:
        """Close everything that the handshake opened."""


class SocketListener:
    """The `Listener` over a socket."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        address: str,
        options: FabricOptions,
        arrive: Callable[[socket.socket], Arrival],
        on_close: Callable[[], None],
    ) -> None:
        """Own `sock` (bound, listening). `arrive` starts a handshake, `on_close` cleans up the address."""
        self._sock = sock
        self._address = address
        self._options = options
        self._arrive = arrive
        self._on_close = on_close
        self._changed = threading.Condition()
        self._ready: deque[Channel] = deque()
        self._rejected = 0
        self._closed = False
        self._pending: dict[Arrival, float] = {}
        self._wake_read, self._wake_write = os.pipe()
        sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"fabric {address}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address to connect to."""
        return self._address

    @property
    def rejected(self) -> int:
        """Connections dropped during the handshake so far."""
        return self._rejected

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next channel that the handshake thread has authenticated."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout_s)
            if self._closed:
                raise ChannelClosed("the listener was closed")
            if not self._ready:
                raise AcceptTimeout(f"nobody connected within {timeout_s} s")
            return self._ready.popleft()

    def close(self) -> None:
        """Stop the handshake thread, drop pending connections and wake `accept`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)  # not by the thread: it may see `_closed` and end before it is woken
        os.close(self._wake_write)

    def __enter__(self) -> SocketListener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._next_expiry_s()):
                    if key.fileobj is self._sock:
                        self._admit()
                    elif isinstance(key.data, _PendingSlot):
                        self._advance(key.data.arrival)
                self._expire()
        finally:
            self._tidy()

    def _next_expiry_s(self) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(self._pending.values()) - time.monotonic())

    def _admit(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("fabric: cannot accept at %s: %s", self._address, error)
            time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._pending) >= self._options.pending_handshakes:
            self._drop(next(iter(self._pending)), "pushed out by newer connections")
        arrival = self._arrive(sock)
        self._pending[arrival] = time.monotonic() + self._options.handshake_timeout_s
        self._selector.register(sock, selectors.EVENT_READ, _PendingSlot(arrival))
        try:
            arrival.start()
        except (FabricError, OSError) as error:
            self._drop(arrival, str(error))

    def _advance(self, arrival: Arrival) -> None:
        if arrival not in self._pending:
            return
        try:
            channel = arrival.advance()
        except BlockingIOError:
            return
        except (FabricError, OSError) as error:
            self._drop(arrival, str(error))
            return
        if channel is None:
            return
        self._forget(arrival)
        with self._changed:
            if len(self._ready) < self._options.pending_handshakes and not self._closed:
                self._ready.append(channel)
                self._changed.notify()
                return
        log.warning("fabric: %s drops a peer: nobody accepts", self._address)
        channel.close()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for arrival in [arrival for arrival, at_s in self._pending.items() if at_s <= now_s]:
            self._drop(arrival, f"no handshake within {self._options.handshake_timeout_s} s")

    def _forget(self, arrival: Arrival) -> None:
        del self._pending[arrival]
        self._selector.unregister(arrival.sock)

    def _drop(self, arrival: Arrival, why: str) -> None:
        self._forget(arrival)
        arrival.abandon()
        log.warning("fabric: %s dropped a connection: %s", self._address, why)
        self._rejected += 1  # last: what is counted has been told

    def _tidy(self) -> None:
        for arrival in list(self._pending):
            self._forget(arrival)
            arrival.abandon()
        self._selector.close()
        self._sock.close()
        with self._changed:
            abandoned = list(self._ready)
            self._ready.clear()
        for channel in abandoned:
            channel.close()
        self._on_close()


class _PendingSlot:
    """The selector data of a pending connection."""

    __slots__ = ("arrival",)

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
