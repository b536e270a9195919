"""Maintained connections to several replicas, which they follow: each call goes where the fewest calls are open."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

from plait_fabric.errors import FabricError
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost
from plait_fabric.rpc.fields import HANDSHAKE_S
from plait_fabric.rpc.outages import Backoff, Outages
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink

_log = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[frozenset[str]], ReplicaLink]
"""Opens a channel to a replica that is not in the given set. May block for seconds; raises `NoReplica`,
`FabricError`."""

T = TypeVar("T")

_LOOKS = 4
"""Who is asked to leave looks so often for another replica: the first look may have begun before."""


class Client(Generic[T]):
    """A pool of connections, each to a different replica, which redial when theirs is lost.

    Where the number of replicas changes there are between `count` and `max_count` connections: one more than are up,
    so that exactly one is always looking for a new replica.
    """

    def __init__(
        self,
        connect: Connect,
        protocol: ClientProtocol[T],
        *,
        name: str,
        count: int = 1,
        max_count: int | None = None,
        window: int = 1,
        backoff: Backoff | None = None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Start dialling at once, one connection at a time, so that no two pick the same replica. Each has its own
        thread, which first calls `on_thread`."""
        self._connect = connect
        self._report = protocol.on_lost
        self._protocol = replace(protocol, on_lost=self._on_lost, on_leaving=self._may_let_go)
        self._name = name
        self._count, self._max_count = count, max(count, max_count or count)
        self._window = window
        self._backoff = backoff or Backoff()
        self._rng = random.Random()
        self._on_thread = on_thread
        self._outages = Outages()
        self._dialling = threading.Lock()
        self._changing = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[Connection[T], threading.Thread] = {}
        self.connections: tuple[Connection[T], ...] = ()
        with self._dialling:  # who dials looks which replicas the others have
            for _ in range(count):
                self._add()

    @property
    def up(self) -> int:
        """The number of connections that can be called now."""
        return sum(connection.up for connection in self.connections)

    @property
    def open_calls(self) -> int:
        """The number of open calls on all connections."""
        return sum(connection.open_calls for connection in self.connections)

    @property
    def back_in_s(self) -> float:
        """After how long a call is likely to be answered again, while no connection is up."""
        return self._outages.back_in_s()

    def best(self, *, full: bool = False) -> Connection[T] | None:
        """Return any connection that is up with the fewest open calls, fewer than its window unless it may be `full`; a
        resting one only if all are resting, one whose server leaves only if all do."""
        up = [it for it in self.connections if it.up]
        staying = [it for it in up if not it.is_leaving] or up
        usable = [it for it in staying if full or it.open_calls < it.window]
        if len(usable) < 2:
            return usable[0] if usable else None
        now_s = time.monotonic()
        return min(usable, key=lambda it: (it.rests_until_s > now_s, it.open_calls, self._rng.random()))

    def close(self) -> None:
        """Close all connections for good; open calls are lost. Waits for the threads. Idempotent."""
        with self._changing:
            self._stop.set()
            threads = list(self._threads.items())
        for connection, _ in threads:
            connection.close()
        for _, thread in threads:
            if thread is not threading.current_thread():
                thread.join(HANDSHAKE_S)

    def _add(self) -> None:
        connection = Connection(self._protocol, window=self._window, on_thread=self._on_thread)
        name = f"{self._name} connection {len(self._threads)}"
        thread = self._threads[connection] = threading.Thread(
            target=self._keep_up, args=(connection,), name=name, daemon=True
        )
        self.connections = (*self.connections, connection)
        thread.start()

    def _keep_up(self, connection: Connection[T]) -> None:
        self._on_thread()
        failures = 0
        while not self._stop.is_set():
            try:
                connection.attach(self._dial(connection))
            except Exception as error:  # whatever it is: without its thread a connection would stay down for ever
                if not isinstance(error, NoReplica | FabricError | ConnectionLost):
                    _log.exception("%s: cannot connect", self._name)
                elif str(error) != connection.why_down and not self.up:
                    _log.warning("%s: cannot connect: %s", self._name, error)
                connection.replica = ""
                connection.why_down = str(error)
                failures += 1
                self._has_looked()
                if not self._is_wanted(connection):
                    return
                self._stop.wait(self._backoff.wait_s(failures, self._rng))
                continue
            _log.info("%s: connected to %s", self._name, connection.replica)
            failures = 0
            self._outages.found()
            self._has_looked()
            self._is_wanted(connection)
            connection.read()
            connection.replica = ""

    def _has_looked(self) -> None:
        for connection in self.connections:
            connection.looks += 1
            self._may_let_go(connection)

    def _may_let_go(self, connection: Connection[T]) -> None:
        """Let a server go that is leaving, once another is there or was looked for in vain."""
        is_another = any(it.up and not it.is_leaving for it in self.connections)
        if connection.is_leaving and (is_another or connection.looks >= _LOOKS):
            connection.let_go()

    def _on_lost(self, connection: Connection[T], items: list[T], why: str) -> None:
        if not self.up:
            self._outages.lost()
        self._report(connection, items, why)

    def _is_wanted(self, connection: Connection[T]) -> bool:
        """Return whether to keep a connection after a dial: if not, it is removed. Adds one more if all are up."""
        with self._changing:
            if self._stop.is_set():
                return True  # `close` ends it
            down = sum(not other.up for other in self.connections)
            if not down and len(self.connections) < self._max_count:
                self._add()
            if connection.up or down < 2 or len(self.connections) <= self._count:
                return True
            self.connections = tuple(other for other in self.connections if other is not connection)
            del self._threads[connection]
            return False

    def _dial(self, connection: Connection[T]) -> ReplicaLink:
        with self._dialling:
            taken = frozenset(other.replica for other in self.connections if other is not connection) - {""}
            link = self._connect(taken)
            connection.replica = link.replica
            self._outages.expect(link.start_s)
            return link
