"""One shard of tables in other processes, which may be several replicas, asked over `plait_fabric/rpc`.

A lookup goes to the replica with the fewest open ones. If that is lost, or silent for `twin_after_s`, another replica
is asked once: lookups have no side effects. With none left it is an error of that lookup; replicas that come back are
found without a restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from plait_disagg.tables.protocols import LookupRequest, OtherVersion, ShardLost, ShardRefused
from plait_disagg.tables.rows_wire import WIRE_VERSION, Refusal, ShardIdentity, pack_requests, parse_answer
from plait_fabric import FabricError, Message
from plait_fabric.rpc.client import Client, Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost
from plait_fabric.rpc.fields import WireError
from plait_fabric.rpc.outages import Backoff
from plait_fabric.waiting import wait_until
from plait_kernels.threads import set_threads

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenLookup:
    """A lookup on its way. `tries`: how many replicas were asked; `connection`: the last one."""

    requests: Sequence[LookupRequest]
    version: str
    answer: Future[list[torch.Tensor]] = field(default_factory=Future)
    tries: int = 0
    connection: Connection[_OpenLookup] | None = None

    def fail(self, error: Exception) -> None:
        """Settle it with an error, unless it is settled."""
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


class RemoteShard:
    """The `ShardTables` of one shard (`workers.shard`)."""

    def __init__(
        self,
        connect: Connect,
        identity: ShardIdentity,
        *,
        replicas: int = 1,
        max_replicas: int | None = None,
        answer_timeout_s: float = 5.0,
        twin_after_s: float = 1.0,
        backoff: Backoff | None = None,
    ) -> None:
        """Start connecting at once to `replicas` of the shard, or as many as are found up to `max_replicas`."""
        self._answer_timeout_s = answer_timeout_s
        self._twin_after_s = twin_after_s
        self.lost = self.twins = 0
        """Lookups lost with a replica so far, and those asked of another one because a replica was silent."""
        protocol: ClientProtocol[_OpenLookup] = ClientProtocol(
            version=WIRE_VERSION,
            hello=identity.payload(),
            on_welcome=lambda _, payload: identity.check(payload),
            on_message=self._on_message,
            on_lost=self._on_lost,
            answer_timeout_s=answer_timeout_s,
        )
        self.name = f"shard {identity.shard} of {identity.model}"
        self._client: Client[_OpenLookup] = Client(
            connect,
            protocol,
            name=f"cn {self.name}",
            count=replicas,
            max_count=max_replicas,
            backoff=backoff,
            on_thread=partial(set_threads, 1),
        )

    @property
    def up(self) -> int:
        """The number of replicas connected now."""
        return self._client.up

    def begin(self, requests: Sequence[LookupRequest], version: str) -> Callable[[], list[torch.Tensor]]:
        """Send a lookup to a replica. Raises `ShardLost`, `ShardRefused`, ValueError."""
        lookup = _OpenLookup(requests=requests, version=version)
        until_s = time.monotonic() + self._answer_timeout_s
        while not self._send(lookup, self._client.best(full=True)):
            if time.monotonic() > until_s or not self._client.up:
                raise self._gone("no replica answers; one is being started")
        return partial(self._result, lookup, until_s)

    def close(self) -> None:
        """Close the connections for good; open lookups are lost."""
        self._client.close()

    def _result(self, lookup: _OpenLookup, until_s: float) -> list[torch.Tensor]:
        """Wait for the answer; ask another replica than the one that is silent, if there is one."""
        try:
            return lookup.answer.result(self._twin_after_s)
        except TimeoutError:
            others = [it for it in self._client.connections if it.up and it is not lookup.connection]
            if others and self._send(lookup, min(others, key=lambda it: it.open_calls)):
                self.twins += 1
        try:
            return lookup.answer.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            raise self._gone("it did not answer in time") from None

    def _gone(self, why: str) -> ShardLost:
        return ShardLost(self.name, why, back_in_s=self._client.back_in_s)

    def _send(self, lookup: _OpenLookup, connection: Connection[_OpenLookup] | None) -> bool:
        """Return whether it was sent: not if the replica is gone."""
        if connection is None:
            return False
        lookup.connection, lookup.tries = connection, lookup.tries + 1
        try:
            connection.call(lookup, lambda number, pool: pack_requests(pool, number, lookup.version, lookup.requests))
        except ConnectionLost:
            connection.rest()
            return False
        except FabricError as error:
            raise ShardRefused(self.name, f"the lookup does not fit the fabric: {error}") from error
        return True

    # On a connection's thread.

    def _on_message(self, connection: Connection[_OpenLookup], message: Message) -> None:
        with message:
            number, answer = parse_answer(message)
        lookup = connection.take(number)
        if lookup is None:
            if not connection.was_called(number):
                raise WireError(f"an answer to lookup {number}, which was never asked")
            return
        if isinstance(answer, Refusal):
            if answer.has is None:
                lookup.fail(ShardRefused(self.name, answer.why))
            else:
                lookup.fail(OtherVersion(self.name, asked=lookup.version, has=answer.has))
            return
        if len(answer) != len(lookup.requests):
            raise WireError(f"{len(answer)} values for {len(lookup.requests)} lookups")
        with suppress(InvalidStateError):  # its twin was faster
            lookup.answer.set_result(answer)

    def _on_lost(self, connection: Connection[_OpenLookup], lookups: list[_OpenLookup], why: str) -> None:
        self.lost += len(lookups)
        for lookup in lookups:
            if lookup.answer.done() or lookup.connection is not connection:  # its twin was asked, and still may answer
                continue
            try:
                if lookup.tries > 1 or not self._send(lookup, self._client.best(full=True)):
                    lookup.fail(self._gone(why))
            except Exception as error:
                _log.warning("%s: a lookup could not be sent again: %s", self.name, error)
                lookup.fail(self._gone(why))


def shards_metrics(shards: Sequence[RemoteShard]) -> Mapping[str, float]:
    """Return metrics of who asks the shards: those of which a replica is connected; lookups lost with one, and asked of
    a twin, so far."""
    return {
        "shards": sum(shard.up > 0 for shard in shards),
        "lost_lookups_total": sum(shard.lost for shard in shards),
        "twin_lookups_total": sum(shard.twins for shard in shards),
    }


def wait_for_shards(shards: Sequence[RemoteShard], *, timeout_s: float = 30.0) -> None:
    """Wait until a replica of every shard is connected; after the time-out, requests that need one that is away
    fail."""
    if not wait_until(lambda: all(shard.up for shard in shards), timeout_s):
        _log.warning("still away: %s", ", ".join(shard.name for shard in shards if not shard.up))
