"""Tables of another process, queried over a channel of the fabric.

::

    shards = [RemoteTables(partial(connect, address, secret=secret), name=address) for address in addresses]
    tables = ShardedTables(records, plan, shards)      # asks all shards at once

A lost shard is an error of that lookup; the next one dials again, so a shard that comes back is used without a
restart. Lookups are never retried automatically: the caller knows how long it can still wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from plait_disagg.tables.errors import ShardLost, ShardRefused
from plait_disagg.tables.protocols import LookupRequest, LookupResult
from plait_disagg.tables.rows_wire import LookupFailed, RowsWireError, pack_requests, parse_answer
from plait_fabric import Channel, FabricError, FabricTimeout

__all__ = ["RemoteTables"]


class RemoteTables:
    """The `AsyncTables` of one shard (`workers.shard`). Owned by one thread."""

    def __init__(self, connect: Callable[[], Channel], *, name: str, answer_timeout_s: float = 5.0) -> None:
        """Create tables that are not connected yet.

        `connect` dials once and raises `FabricError`; it is called when a lookup needs it.
        """
        self._connect = connect
        self._answer_timeout_s = answer_timeout_s
        self._channel: Channel | None = None
        self._number = 0
        self.name = name
        self.version: int | None = None
        """The version that the last answer came from."""

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows at the shard and wait for them. Raises `BadId`, `ShardLost`, `ShardRefused`, ValueError."""
        return self.begin(requests).result().values

    def begin(self, requests: Sequence[LookupRequest]) -> _PendingLookup:
        """Send a lookup to the shard, dialling if necessary, without waiting."""
        self._number += 1
        deadline_s = time.monotonic() + self._answer_timeout_s
        channel = self._dial()
        try:
            header, leases = pack_requests(channel.pool, self._number, requests)
            channel.send(header, leases, timeout_s=self._answer_timeout_s)
        except FabricError as error:
            if error.channel_usable and not isinstance(error, FabricTimeout):
                raise ShardRefused(self.name, f"the lookup does not fit the fabric: {error}") from error
            raise self._lost(str(error)) from error
        return _PendingLookup(self, channel, self._number, deadline_s)

    def collect(self, channel: Channel, number: int, deadline_s: float) -> LookupResult:
        """Return the result of that lookup, for `PendingLookup.result`."""
        try:
            answer = self._answer(channel, number, deadline_s)
        except FabricTimeout as error:
            # Not the answer's last chance to come, but nobody would wait for it: begin afresh.
            raise self._lost(f"no answer within {self._answer_timeout_s} s") from error
        except (FabricError, RowsWireError) as error:
            raise self._lost(str(error)) from error
        if isinstance(answer, LookupResult):
            self.version = answer.version
            return answer
        raise answer.bad_id or ShardRefused(self.name, answer.why)

    def _answer(self, channel: Channel, number: int, deadline_s: float) -> LookupResult | LookupFailed:
        """Return the answer of that number; answers to abandoned lookups come first and are dropped."""
        while True:
            with channel.recv(max(0.0, deadline_s - time.monotonic())) as message:
                answered, *rest = parse_answer(message)
            if answered > number:
                raise RowsWireError("the shard answers what was not asked")
            if answered < number:
                continue
            if isinstance(rest[0], LookupFailed):
                return rest[0]
            version, values = rest
            return LookupResult(shard=self.name, version=version, values=values)  # type: ignore[arg-type]

    def _dial(self) -> Channel:
        if self._channel is None or self._channel.closed:
            try:
                self._channel = self._connect()
            except FabricError as error:
                raise ShardLost(self.name, str(error)) from error
        return self._channel

    def _lost(self, why: str) -> ShardLost:
        self.close()
        return ShardLost(self.name, why)

    def close(self) -> None:
        """Close the channel; another lookup would dial again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class _PendingLookup:
    """A `PendingLookup` on a channel."""

    def __init__(self, tables: RemoteTables, channel: Channel, number: int, deadline_s: float) -> None:
        self._tables = tables
        self._channel = channel
        self._number = number
        self._deadline_s = deadline_s

    def result(self) -> LookupResult:
        """Wait for the shard's answer."""
        return self._tables.collect(self._channel, self._number, self._deadline_s)
