"""The serving end of channels, whatever is served: accepts clients, greets them, and hands their messages on.

One thread per client receives. Answers are sent by whoever has them, straight into the channel: a hop through a thread
of the client's own would cost more than the send. A client that leaves its whole window of messages unread is hung up
on after `SEND_S`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait_disagg.messages.wire import SEND_S, Role, WireError, parse_hello, version_header, welcome_header
from plait_disagg.queue.metrics_throttle import MetricsThrottle
from plait_disagg.values import ModelCard
from plait_fabric import Buffer, Channel, ChannelClosed, FabricError, Listener, Message, PeerLost, Pool
from plait_fabric.threads import set_threads

__all__ = ["GREET_S", "Peer", "Server"]

_log = logging.getLogger(__name__)

GREET_S = 10.0
"""How long a client may take to say hello, or a server to answer it."""

_MAX_CHANNELS = 128


class Peer:
    """A connected client."""

    def __init__(self, number: int, channel: Channel, metrics: MetricsThrottle) -> None:
        self.number = number
        self.channel = channel
        self.metrics = metrics
        self.is_greeted = False

    @property
    def pool(self) -> Pool:
        """Where large buffers for it are written."""
        return self.channel.pool

    def send(self, header: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> bool:
        """Sends now; False, and the client is hung up on, if it can not be."""
        try:
            self.channel.send(header, buffers, timeout_s=SEND_S)
        except FabricError as error:
            self.drop(error)
            return False
        return True

    def drop(self, error: Exception) -> None:
        """Hangs up because of ``error``."""
        if not isinstance(error, PeerLost | ChannelClosed):
            _log.warning("dropping client %s: %s", self.channel.peer, error)
        self.channel.close()


class Server:
    """Serves every channel that the listeners accept. Owns the listeners.

    ``on_message`` owns the message and releases it; it raises `WireError` to hang up. ``on_lost`` is called once per
    client. Both are called from the client's thread.
    """

    def __init__(
        self,
        card: ModelCard,
        listeners: Sequence[Listener],
        *,
        role: Role,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer], None],
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        """Starts at once. ``metrics``: what clients are told now and then, with their answers."""
        self._metrics = metrics
        self._card = card
        self._listeners = tuple(listeners)
        self._role: Role = role
        self._on_message = on_message
        self._on_lost = on_lost
        self._peers: dict[int, Peer] = {}
        self._numbers = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._acceptors = [
            threading.Thread(target=self._accept, args=(listener,), name=f"{role} accept", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._acceptors:
            thread.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, in the order of the listeners."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def alive(self) -> bool:
        """Whether it accepts."""
        return not self._stopped and all(thread.is_alive() for thread in self._acceptors)

    @property
    def channels(self) -> int:
        """Clients now."""
        return len(self._peers)

    def announce(self, card: ModelCard) -> None:
        """The model has become another version: clients hear of it now, later ones when they are greeted."""
        self._card = card
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            if peer.is_greeted:
                peer.send(version_header(card.version))

    def close_listeners(self) -> None:
        """Nobody new; who is here stays."""
        self._stopped = True
        for listener in self._listeners:
            listener.close()

    def hang_up(self) -> None:
        """Everybody leaves. Call `close_listeners` first."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.channel.close()

    def _accept(self, listener: Listener) -> None:
        while not self._stopped:
            try:
                channel = listener.accept()
            except FabricError as error:
                if not self._stopped:
                    _log.error("%s accepts no more: %s", listener.address, error)
                return
            self._admit(channel)

    def _admit(self, channel: Channel) -> None:
        with self._lock:
            if self._stopped or len(self._peers) >= _MAX_CHANNELS:
                _log.warning("too many channels; %s is refused", channel.peer)
                channel.close()
                return
            self._numbers += 1
            peer = Peer(self._numbers, channel, MetricsThrottle(self._metrics))
            self._peers[peer.number] = peer
        threading.Thread(target=self._receive, args=(peer,), name=f"{self._role} {peer.number}", daemon=True).start()

    def _receive(self, peer: Peer) -> None:
        set_threads(1)  # only the compute thread has a team
        try:
            with peer.channel.recv(GREET_S) as hello:
                parse_hello(hello.header, self._role)
            card = self._card
            peer.channel.send(welcome_header(card), timeout_s=SEND_S)
            peer.is_greeted = True
            if self._card is not card:  # the model became another version meanwhile
                peer.send(version_header(self._card.version))
            while True:
                self._on_message(peer, peer.channel.recv())
        except (PeerLost, ChannelClosed) as error:
            _log.info("client %s left: %s", peer.channel.peer, error)
        except (FabricError, WireError) as error:
            peer.drop(error)
        finally:
            peer.channel.close()
            with self._lock:
                self._peers.pop(peer.number, None)
            self._on_lost(peer)
