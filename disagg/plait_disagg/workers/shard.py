"""A shard worker: serves lookups in its tables to any authenticated client.

One thread per client receives, looks up and answers. Lookups are serialized, each seeing one version of the rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import get_args

import torch

from plait_disagg.tables.protocols import BadId, LookupRequest, Tables
from plait_disagg.tables.rows_wire import RowsWireError, failed_header, pack_found, parse_requests
from plait_disagg.tables.values import Lookup, Mode, Table
from plait_fabric import Channel, ChannelClosed, FabricError, Listener, Message, PeerLost
from plait_fabric.rpc.server import start_accepting
from plait_fabric.threads import set_threads

__all__ = ["ShardWorker"]

_log = logging.getLogger(__name__)

_SEND_S = 1.0
"""A client that accepts no answer for this long, with its window of unread ones full, is considered dead."""


class ShardWorker:
    """Serves the tables `served` over the listeners, which it owns. `version` counts the refreshes of the rows."""

    def __init__(
        self, tables: Tables, served: Sequence[Table], listeners: Sequence[Listener], *, version: int = 0
    ) -> None:
        """Start the worker at once."""
        self._tables = tables
        self._version = version
        # Tables may remember lookups by identity, so each one is made once.
        self._lookups = {
            (table.name, mode): Lookup(name=f"{table.name}.{mode}", table=table.name, mode=mode)
            for table in served
            for mode in get_args(Mode)
        }
        self._lookup_lock = threading.Lock()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._stopped = False
        self._listeners = tuple(listeners)
        self.lookups = 0
        start_accepting(self._listeners, self._admit, name="shard")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses on which it listens."""
        return tuple(listener.address for listener in self._listeners)

    def replace(self, tables: Tables, *, version: int) -> None:
        """Serve `tables` from the next lookup on. They must include the tables that are served now."""
        with self._lookup_lock:
            self._tables, self._version = tables, version

    def stop(self) -> None:
        """Stop listening and close all channels. Idempotent."""
        with self._lock:
            self._stopped = True
            channels = list(self._channels)
        for listener in self._listeners:
            listener.close()
        for channel in channels:
            channel.close()

    def _admit(self, channel: Channel) -> None:
        with self._lock:
            if self._stopped:
                channel.close()
                return
            self._channels.add(channel)
        threading.Thread(target=self._serve, args=(channel,), name="shard client", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        set_threads(1)
        try:
            while True:
                self._answer(channel, channel.recv())
        except (PeerLost, ChannelClosed) as error:
            _log.info("client %s left: %s", channel.peer, error)
        except (FabricError, RowsWireError) as error:
            _log.warning("dropping client %s: %s", channel.peer, error)
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _answer(self, channel: Channel, message: Message) -> None:
        with message:
            request = parse_requests(message, self._lookups)
            try:
                version, values = self._look_up(request.known)
            except Exception as error:
                if not isinstance(error, BadId | ValueError):
                    _log.exception("a lookup failed")
                channel.send(failed_header(request.number, error), timeout_s=_SEND_S)
                return
        header, leases = pack_found(channel.pool, request.number, version, values)
        channel.send(header, leases, timeout_s=_SEND_S)

    def _look_up(self, requests: Sequence[LookupRequest]) -> tuple[int, list[torch.Tensor]]:
        with self._lookup_lock, torch.inference_mode():
            self.lookups += 1
            return self._version, self._tables.lookup(requests)
