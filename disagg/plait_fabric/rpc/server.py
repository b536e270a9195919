"""The serving end of channels, for every workload: accepts clients, greets them, and passes their messages on.

One thread per client receives. Answers are sent straight into the channel by the thread that has them: a hop through
a thread per client would cost more than a small send. Where answers are large and a slow client must not hold up
others, they are replies, which have a thread for each client; `backlog` bounds how many of its messages wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from plait_fabric.errors import ChannelClosed, FabricError, PeerLost
from plait_fabric.memory.pool import Pool
from plait_fabric.protocols import Buffer, Channel, Header
from plait_fabric.rpc.connection import Outbox, Pack
from plait_fabric.rpc.fields import HANDSHAKE_S, LEAVING, LEFT, SEND_S, WireError, greeting, read_greeting
from plait_fabric.transport.acceptor import Listener
from plait_fabric.values import Message

_log = logging.getLogger(__name__)


class Peer:
    """A connected client."""

    def __init__(self, number: int, channel: Channel, protocol: ServerProtocol) -> None:
        self.number = number
        self.channel = channel
        self.is_greeted = self.has_left = False
        self._send_timeout_s = protocol.send_timeout_s
        self._room = threading.Semaphore(protocol.backlog)
        self._outbox = Outbox(name=f"replies {number}")

    @property
    def pool(self) -> Pool:
        """The pool in which large buffers for it are written."""
        return self.channel.pool

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> bool:
        """Send now; False, and the client is hung up on, if it cannot be."""
        try:
            self.channel.send(header, buffers, timeout_s=self._send_timeout_s)
        except FabricError as error:
            self.drop(error)
            return False
        return True

    def drop(self, error: Exception) -> None:
        """Close the client's channel because of `error`."""
        if not isinstance(error, PeerLost | ChannelClosed):
            _log.warning("dropping client %s: %s", self.channel.peer, error)
        self.channel.close()

    # With a backlog.

    def admit(self) -> None:
        """Wait until fewer than `backlog` of this client's messages are pending; meanwhile its channel pushes back."""
        self._room.acquire()

    def done(self) -> None:
        """Make room: an admitted message that needs no reply has been processed."""
        self._room.release()

    def reply(self, pack: Pack) -> None:
        """Queue a reply, to be sent from a thread of the client's own, which then makes room."""
        self._outbox.post(partial(self._reply, pack))

    def hang_up(self, flush_s: float = 0.0) -> None:
        """Close the channel once pending replies are sent or `flush_s` has passed."""
        if flush_s > 0:
            wait([self._outbox.post(lambda: None)], flush_s)
        self.channel.close()
        self._room.release()

    def _reply(self, pack: Pack) -> None:
        try:
            header, buffers = pack(self.pool)
            self.send(header, buffers)
        except Exception as error:  # whatever it is, the client would wait for an answer
            self.drop(error)
        finally:  # also for a client that is hung up on: its own thread may wait for room, and must see that
            self._room.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProtocol:
    """What a workload sends and receives as a server. The callbacks run on the client's thread.

    `on_hello` gets a client's payload and raises `WireError` to reject it; `welcome` makes the payload of the
    answer. `on_message` owns the message and releases it; it raises `WireError` to disconnect. `on_lost` is called
    once per client. A client that leaves its whole window of messages unread is disconnected after `send_timeout_s`.
    """

    version: int
    on_hello: Callable[[Mapping[str, Any]], None]
    welcome: Callable[[], Mapping[str, Any]]
    on_message: Callable[[Peer, Message], None]
    on_lost: Callable[[Peer], None]
    send_timeout_s: float = SEND_S
    max_peers: int = 128
    backlog: int = 1


class Server:
    """Serves every channel that its listeners accept. Owns the listeners."""

    def __init__(
        self,
        protocol: ServerProtocol,
        listeners: Sequence[Listener],
        *,
        name: str,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Start at once. Receiving threads first call `on_thread`."""
        self._protocol = protocol
        self._name = name
        self._on_thread = on_thread
        self._listeners = tuple(listeners)
        self._peers: dict[Peer, threading.Thread] = {}
        self._numbers = 0
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        self._stopped = self._is_leaving = False
        self._announced: Header | None = None
        self.refused = 0
        self._acceptors = [
            threading.Thread(target=self._accept, args=(listener,), name=f"{name} accept", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._acceptors:
            thread.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses on which it listens, in the order of the listeners."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def alive(self) -> bool:
        """Whether it accepts clients."""
        return not self._stopped and all(thread.is_alive() for thread in self._acceptors)

    @property
    def peers(self) -> int:
        """The number of connected clients."""
        return len(self._peers)

    def announce(self, header: Header) -> None:
        """Send this to all clients, including those being greeted now. Later clients get the welcome instead."""
        self._announced = header
        self._tell(header)

    def leave(self, timeout_s: float) -> None:
        """Ask all clients to find another server, and serve them until they have, or looked in vain; `timeout_s` at
        most."""
        self._is_leaving = True
        self._tell(LEAVING)
        with self._fewer:
            self._fewer.wait_for(lambda: all(peer.has_left for peer in self._peers), timeout_s)

    def _tell(self, header: Header) -> None:
        with self._lock:
            peers = [peer for peer in self._peers if peer.is_greeted]
        for peer in peers:
            peer.send(header)

    def close_listeners(self) -> None:
        """Stop accepting clients; those connected stay. Idempotent."""
        with self._lock:
            self._stopped = True
        for listener in self._listeners:
            listener.close()

    def hang_up(self, flush_s: float = 0.0) -> None:
        """Disconnect all clients once pending replies are sent or `flush_s` has passed. Call `close_listeners`
        first."""
        with self._lock:
            peers = list(self._peers.items())
        for peer, _ in peers:
            peer.hang_up(flush_s)
        if flush_s > 0:
            for _, thread in peers:
                thread.join(flush_s)

    def _accept(self, listener: Listener) -> None:
        with suppress(ChannelClosed):
            while True:
                self._admit(listener.accept())

    def _admit(self, channel: Channel) -> None:
        with self._lock:
            if self._stopped or len(self._peers) >= self._protocol.max_peers:
                self.refused += 1
                _log.warning("%s: too many channels; %s is refused", self._name, channel.peer)
                channel.close()
                return
            self._numbers += 1
            peer = Peer(self._numbers, channel, self._protocol)
            name = f"{self._name} {peer.number}"
            thread = threading.Thread(target=self._receive, args=(peer,), name=name, daemon=True)
            self._peers[peer] = thread
            thread.start()

    def _receive(self, peer: Peer) -> None:
        self._on_thread()
        try:
            self._greet(peer)
            while True:
                message = peer.channel.recv()
                if message.header.get("op") == LEFT["op"]:
                    message.release()
                    with self._fewer:
                        peer.has_left = True
                        self._fewer.notify_all()
                else:
                    self._protocol.on_message(peer, message)
        except (PeerLost, ChannelClosed) as error:
            _log.info("%s: client %s left: %s", self._name, peer.channel.peer, error)
        except (FabricError, WireError) as error:
            peer.drop(error)
        finally:
            peer.hang_up()
            with self._lock:
                self._peers.pop(peer, None)
                self._fewer.notify_all()
            self._protocol.on_lost(peer)

    def _greet(self, peer: Peer) -> None:
        protocol = self._protocol
        with peer.channel.recv(HANDSHAKE_S) as message:
            protocol.on_hello(read_greeting("hello", protocol.version, message.header))
        announced = self._announced
        welcome = greeting("welcome", protocol.version, protocol.welcome())
        peer.channel.send(welcome, timeout_s=protocol.send_timeout_s)
        peer.is_greeted = True
        if self._announced is not None and self._announced is not announced:
            peer.send(self._announced)
        if self._is_leaving:
            peer.send(LEAVING)
