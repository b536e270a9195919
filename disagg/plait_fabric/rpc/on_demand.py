"""One connection, opened when it is first needed, and to another replica when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plait_fabric.errors import FabricError
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost
from plait_fabric.rpc.outages import Backoff, Outages
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Losses:
    """Replicas that were lost during one task; those that hung are not asked again for it."""

    lost: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, error: ConnectionLost) -> None:
        """Record one more loss."""
        self.count += 1
        self.lost.add(error.replica)
        if error.hung:
            self.hung.add(error.replica)


class OnDemand(Generic[T]):
    """A connection for callers that ask from one thread and wait for the answer."""

    def __init__(
        self,
        connect: Connect,
        protocol: ClientProtocol[T],
        *,
        name: str,
        max_tries: int,
        backoff: Backoff,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Try a task on at most `max_tries` replicas: one that kills every replica that works on it must not kill them
        all."""
        self._connect = connect
        self._protocol = protocol
        self._name = name
        self._max_tries = max_tries
        self._backoff = backoff
        self._clock = clock
        self._failures = 0
        self._closed_until_s = -float("inf")
        self._outages = Outages(clock=clock)
        self.current: Connection[T] | None = None

    @property
    def back_in_s(self) -> float:
        """After how long a replica is likely to be found, while there is none."""
        return self._outages.back_in_s()

    def get(self, losses: Losses) -> Connection[T]:
        """Return the current connection, or a new one. Raises `NoReplica`, without an attempt if the last one failed
        only recently."""
        if self.current is not None and self.current.up:
            return self.current
        if self._clock() < self._closed_until_s:
            raise NoReplica("nobody answered a moment ago")
        while losses.count < self._max_tries:
            try:
                self.current = self._greeted(self._link(losses))
            except ConnectionLost as error:
                _log.warning("%s: replica %s: %s", self._name, error.replica, error)
                losses.add(error)
            except (NoReplica, FabricError) as error:
                raise self._nobody(str(error)) from error
            else:
                self._failures = 0
                self._outages.found()
                return self.current
        raise self._nobody(f"lost one after the other: {', '.join(sorted(losses.lost))}")

    def drop(self, connection: Connection[T], error: ConnectionLost, losses: Losses) -> None:
        """Record that a connection was lost; the next `get` opens another one."""
        _log.warning("%s: replica %s: %s", self._name, error.replica, error)
        losses.add(error)
        self._outages.lost()
        connection.close()
        if self.current is connection:
            self.current = None

    def move(self) -> None:
        """Move to another replica. Raises `NoReplica`, `FabricError`, `ConnectionLost`; then the current connection
        stays."""
        before = self.current
        self.current = self._greeted(self._connect(frozenset() if before is None else frozenset({before.replica})))
        if before is not None:
            _log.info("%s moves from replica %s to %s", self._name, before.replica, self.current.replica)
            before.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.current is not None:
            self.current.close()
            self.current = None

    def _link(self, losses: Losses) -> ReplicaLink:
        """Return a channel to a replica that was not just lost; failing that, to one that may be back."""
        try:
            return self._connect(frozenset(losses.lost))
        except (NoReplica, FabricError):
            if losses.lost == losses.hung:
                raise
        return self._connect(frozenset(losses.hung))

    def _greeted(self, link: ReplicaLink) -> Connection[T]:
        connection = Connection(self._protocol)
        connection.attach(link)
        self._outages.expect(link.start_s)
        threading.Thread(target=connection.read, name=f"{self._name} answers", daemon=True).start()
        return connection

    def _nobody(self, why: str) -> NoReplica:
        self._failures += 1
        self._outages.lost()
        pause_s = self._backoff.wait_s(self._failures)
        self._closed_until_s = self._clock() + pause_s
        _log.warning("%s: no replica answers; next try in %.1f s: %s", self._name, pause_s, why)
        return NoReplica(why)
