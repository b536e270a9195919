"""A listener over a socket: one thread does all handshakes, none of which can hold up another.

Each connection has `handshake_timeout_s` to authenticate. At most `pending_handshakes` are kept;
when another arrives the oldest is dropped, so unauthenticated clients that connect and stay silent cannot keep
others out. Only authenticated peers reach `accept`.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from plait_fabric.errors import AcceptTimeout, ChannelClosed, FabricError
from plait_fabric.protocols import Channel
from plait_fabric.transport.greeting import Greeting
from plait_fabric.values import FabricOptions

log = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""How long to leave the backlog alone when the process has run out of file descriptors."""


class Listener:
    """Accepts authenticated peers at one address. A peer that does not authenticate is never returned."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        address: str,
        options: FabricOptions,
        greet: Callable[[socket.socket], Greeting[Channel]],
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
        self._pending: dict[socket.socket, tuple[Greeting[Channel], float]] = {}
        sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"fabric {address}", daemon=True)
        self._thread.start()

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
        with suppress(OSError):  # the thread has seen `_closed` and has ended
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes it
        self._thread.join()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._next_expiry_s()):
                    if key.fileobj is self._sock and not self._closed:
                        self._admit()
                    elif isinstance(key.fileobj, socket.socket):
                        self._advance(key.fileobj)
                self._expire()
        finally:
            self._tidy()

    def _next_expiry_s(self) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(at_s for _, at_s in self._pending.values()) - time.monotonic())

    def _admit(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("fabric: cannot accept at %s: %s", self.address, error)
            time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._pending) >= self._options.pending_handshakes:
            self._drop(next(iter(self._pending)), "pushed out by newer connections")
        self._pending[sock] = self._greet(sock), time.monotonic() + self._options.handshake_timeout_s
        self._selector.register(sock, selectors.EVENT_READ)
        self._advance(sock)

    def _advance(self, sock: socket.socket) -> None:
        if sock not in self._pending:
            return
        try:
            next(self._pending[sock][0])
        except (FabricError, OSError) as error:
            self._drop(sock, str(error))
        except StopIteration as met:
            self._forget(sock)
            self._offer(met.value)

    def _offer(self, channel: Channel) -> None:
        with self._changed:
            if len(self._ready) < self._options.pending_handshakes and not self._closed:
                self._ready.append(channel)
                self._changed.notify()
                return
        log.warning("fabric: %s drops a peer: nobody accepts", self.address)
        channel.close()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for sock in [sock for sock, (_, at_s) in self._pending.items() if at_s <= now_s]:
            self._drop(sock, f"no handshake within {self._options.handshake_timeout_s} s")

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._pending.pop(sock)[0].close()  # and with it what it has opened

    def _abandon(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _drop(self, sock: socket.socket, why: str) -> None:
        self._abandon(sock)
        log.warning("fabric: %s dropped a connection: %s", self.address, why)
        self.rejected += 1  # last: what is counted has been told

    def _tidy(self) -> None:
        for sock in list(self._pending):
            self._abandon(sock)
        self._selector.close()
        self._sock.close()
        with self._changed:
            abandoned = list(self._ready)
            self._ready.clear()
        for channel in abandoned:
            channel.close()
        self._on_close()
