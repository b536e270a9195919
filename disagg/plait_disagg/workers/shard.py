"""A shard worker: serves lookups in its pieces of a model's tables to CNs.

One thread per CN receives, looks up and answers. Lookups are serialized, each in rows of one version; a CN that asks
for another learns which one is here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.protocols import BadId
from plait_disagg.tables.rows_wire import (
    WIRE_VERSION,
    RowsRequest,
    ShardIdentity,
    failed_header,
    other_header,
    pack_found,
    parse_requests,
)
from plait_disagg.workers.base import BatchBoundary, ServedWorker
from plait_fabric import Listener, Message
from plait_fabric.rpc.server import Peer, ServerProtocol
from plait_fabric.waiting import wait_until
from plait_kernels.heartbeat import ThreadHeartbeat

_log = logging.getLogger(__name__)


class ShardWorker(ServedWorker):
    """Serves `pieces`, at `version` of the rows, over the listeners, which it owns."""

    def __init__(
        self,
        identity: ShardIdentity,
        pieces: HeldPieces,
        listeners: Sequence[Listener],
        *,
        version: str,
    ) -> None:
        """Start serving at once."""
        self._pieces = pieces
        self._version = version
        self._between = BatchBoundary()
        self.heartbeat = ThreadHeartbeat()
        self._count = self._ids = self._bytes = self._others = self._waiting = 0
        self._busy_s = self._queued_s = 0.0
        protocol = ServerProtocol(
            version=WIRE_VERSION,
            on_hello=identity.check,
            welcome=identity.payload,
            on_message=self._on_message,
            on_lost=lambda _: None,
        )
        self._serve(protocol, listeners, name="shard")

    def metrics(self) -> Mapping[str, float]:
        """Return lookups, ids and bytes answered so far, and those asked for another version; seconds of lookups, and
        that lookups waited for others."""
        return {
            "requests_total": self._count,
            "ids_total": self._ids,
            "answered_bytes_total": self._bytes,
            "other_versions_total": self._others,
            "busy_seconds_total": self._busy_s,
            "queued_seconds_total": self._queued_s,
            "waiting": self._waiting,
        }

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Do nothing: lookups of a client run one after the other on its own thread."""

    def prepare(self, change: PreparedUpdate) -> None:
        """Do nothing: rows are written in place."""

    def apply_update(self, change: PreparedUpdate) -> None:
        """Write the change's rows between two lookups; from then on they are of its version."""
        with self._between:
            change.write()
            self._version = change.version

    def stop(self, *, drain_s: float) -> None:
        """Stop listening, answer what has arrived within `drain_s`, and close all channels. Idempotent."""
        self._server.close_listeners()
        wait_until(lambda: not self._waiting, drain_s)
        self._server.hang_up()

    def _on_message(self, peer: Peer, message: Message) -> None:
        with message:
            request = parse_requests(message)
            try:
                values = self._look_up(request)
            except Exception as error:
                if not isinstance(error, BadId | ValueError):
                    _log.exception("a lookup failed")
                peer.send(failed_header(request.number, str(error)))
                return
        if isinstance(values, str):
            self._others += 1
            peer.send(other_header(request.number, values))
            return
        self._bytes += sum(value.nbytes for value in values)
        header, leases = pack_found(peer.pool, request.number, values)
        peer.send(header, leases)

    def _look_up(self, request: RowsRequest) -> list[torch.Tensor] | str:
        """Return the values, or the version that is here if it is another one."""
        came_s = time.monotonic()
        self._waiting += 1
        try:
            with self._between, torch.inference_mode():
                began_s = time.monotonic()
                if request.version != self._version:
                    return self._version
                self.heartbeat.begin("a lookup")
                try:
                    values = self._pieces.lookup(request.requests)
                finally:
                    self.heartbeat.rest()
                self._count += 1
                self._ids += sum(one.ids.numel() for one in request.requests)
                self._queued_s += began_s - came_s
                self._busy_s += time.monotonic() - began_s
                return values
        finally:
            self._waiting -= 1
