"""Rows that cross unchanged, through the hot-row cache (`plait_disagg.tables.cache`): both ends of one channel.

A batch whose CN caches has, for each port that holds rows, int32 slots of the rows' shape without its last
dimension, and for each table two more tensors: `hot.T.new`, the slots that are filled now, and `hot.T.rows`, the
rows that fill them and the rows that only pass through. Ports of one table share its cache. `HotRows` in the header
lists these tensors.

The rows travel in the wire format like all floats, and the HN keeps what it decoded: an answer is the same with the
cache and without, as long as no batch has a number that float16 cannot hold (then the whole batch travels as
float32, and so do the rows that it leaves in the cache). Ids, directory and policy are the CN's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from plait_disagg.errors import RankError
from plait_disagg.messages.layout import new_rows, new_slots
from plait_disagg.protocols import SparseHalf
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.tables.cache import CacheCounters, ReceiverCache, SenderCache
from plait_disagg.tables.values import Table, row_bytes
from plait_fabric.rpc.fields import WireError

MAX_BYTES = 1 << 30
"""The max bytes of one channel's slots, and of the rows that one batch stands for: as large as a message of the
fabric can be (`plait_fabric.values.MessageLimits`)."""

_MAX_SLOTS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRows:
    """Header of the hot rows of a batch: for table T, `slots[T]` is the size of its cache and `ports[T]` the slot
    tensors.

    `number` counts the batches of a channel; 0 means that both ends start over.
    """

    number: int
    slots: tuple[int, ...]
    ports: tuple[tuple[str, ...], ...]

    def to_json(self) -> list[Any]:
        """Return the header as plain data."""
        return [self.number, list(self.slots), [list(ports) for ports in self.ports]]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Parse what `to_json` returns. Raises `WireError` if the data is malformed."""
        if not isinstance(data, list) or len(data) != 3 or type(data[0]) is not int or data[0] < 0:
            raise WireError("hot is not number, slots, ports")
        number, slots, ports = data
        if not isinstance(slots, list) or not all(type(one) is int and 0 < one < _MAX_SLOTS for one in slots):
            raise WireError("hot has slots that cannot be")
        if not isinstance(ports, list) or len(ports) != len(slots) or not all(isinstance(one, list) for one in ports):
            raise WireError("hot has ports of other tables than it has slots")
        names = [name for one in ports for name in one]
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise WireError("hot has ports that are no names, or one twice")
        return cls(number=number, slots=tuple(slots), ports=tuple(tuple(one) for one in ports))


@dataclass(slots=True, kw_only=True)
class RowSavings(CacheCounters):
    """Counters of a CN's caches so far. `nbytes`: bytes saved compared with no caches (negative: more were sent)."""

    nbytes: int = 0

    def metrics(self) -> Mapping[str, float]:
        """Return sums so far; hits divided by ids is the hit rate."""
        return {
            "cache_ids_total": self.ids,
            "cache_hits_total": self.hits,
            "cache_rows_sent_total": self.stored + self.passed,
            "cache_evicted_total": self.evicted,
            "cache_saved_bytes": self.nbytes,
        }


class RowSender:
    """The CN's end. If an encoded batch is not sent, the two ends lose step: create a new sender then."""

    def __init__(self, source: SparseHalf, knobs: WorkerKnobs, savings: RowSavings) -> None:
        self._source = source
        self._wire = knobs.wire
        self._savings = savings
        self._number = 0
        ports: dict[str, list[str]] = {}
        tables: dict[str, Table] = {}
        for port, table in source.row_ports.items():
            ports.setdefault(table.name, []).append(port)
            tables[table.name] = table
        self._tables = tuple(tables.values())
        self._ports = tuple(tuple(ports[table.name]) for table in self._tables)
        max_rows = [MAX_BYTES // (len(self._tables) * 4 * table.dim) for table in self._tables]
        self._slots = tuple(
            max(1, min(knobs.cache_rows, table.rows, fits)) for table, fits in zip(self._tables, max_rows, strict=True)
        )
        self._caches = [
            SenderCache(rows=table.rows, dim=table.dim, slots=slots, policy=knobs.cache, counters=savings)
            for table, slots in zip(self._tables, self._slots, strict=True)
        ]

    def encode(self, crossing: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], HotRows]:
        """Encode what `SparseHalf.run_ids` made into what travels.

        Raises `RankError` for too many rows, and whatever `SparseHalf.rows` raises.
        """
        _check_size(crossing, self._ports, [table.dim for table in self._tables], RankError)
        made = dict(crossing)
        for index, (table, ports) in enumerate(zip(self._tables, self._ports, strict=True)):
            ids = [crossing[port] for port in ports]
            flat = torch.cat([one.reshape(-1) for one in ids])
            slots, new, rows = self._caches[index].encode(flat, partial(self._source.rows, table.name))
            pieces = slots.split_with_sizes([one.numel() for one in ids])
            made |= {port: piece.view(one.shape) for port, piece, one in zip(ports, pieces, ids, strict=True)}
            made[new_slots(index)], made[new_rows(index)] = new, rows
            unsent = flat.numel() - rows.shape[0]
            self._savings.nbytes += unsent * row_bytes(table.dim, self._wire) - slots.nbytes - new.nbytes
        hot = HotRows(number=self._number, slots=self._slots, ports=self._ports)
        self._number += 1
        return made, hot

    def invalidate(self, row_ids: Mapping[str, torch.Tensor]) -> None:
        """Mark the rows with those ids (k,), by table, as changed: each is sent again when it is next needed."""
        for table, cache in zip(self._tables, self._caches, strict=True):
            if table.name in row_ids:
                cache.invalidate(row_ids[table.name])


class RowReceiver:
    """The HN's end: batches must be decoded in the order in which they were sent."""

    def __init__(self) -> None:
        self._caches: list[ReceiverCache] = []
        self._next = 0
        self._shape: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def decode(self, tensors: Mapping[str, torch.Tensor], hot: HotRows) -> dict[str, torch.Tensor]:
        """Return the crossing tensors of a batch, rows included; the rows are copies. `tensors` follow the batch's
        `crossing_layout`.

        Raises ValueError for input that no `RowSender` makes, and if a batch was missed.
        """
        left = dict(tensors)
        sent = [(left.pop(new_slots(index)), left.pop(new_rows(index))) for index in range(len(hot.slots))]
        dims = [rows.shape[1] for _, rows in sent]
        self._begin(hot, dims)
        _check_size(left, hot.ports, dims, ValueError)
        for cache, (new, rows), ports in zip(self._caches, sent, hot.ports, strict=True):
            slots = [left[port] for port in ports]
            flat = torch.cat([one.reshape(-1) for one in slots])
            pieces = cache.decode(flat, new, rows).split_with_sizes([one.numel() for one in slots])
            for port, piece, one in zip(ports, pieces, slots, strict=True):
                left[port] = piece.view(*one.shape, rows.shape[1])
        self._next = hot.number + 1
        return left

    def _begin(self, hot: HotRows, dims: list[int]) -> None:
        """Create the caches for batch number 0; check that later batches refer to the same ones."""
        shape = hot.slots, tuple(dims)
        if hot.number == 0:
            if sum(4 * slots * dim for slots, dim in zip(*shape, strict=True)) > MAX_BYTES:
                raise ValueError(f"hot rows of more than {MAX_BYTES} bytes")
            self._caches = [ReceiverCache(slots=slots, dim=dim) for slots, dim in zip(*shape, strict=True)]
            self._shape = shape
        elif shape != self._shape:
            raise ValueError("hot rows of other caches than the channel has")
        elif hot.number != self._next:
            raise ValueError(f"hot rows of batch {hot.number} came where {self._next} was due")


def _check_size(
    tensors: Mapping[str, torch.Tensor],
    ports: tuple[tuple[str, ...], ...],
    dims: list[int],
    error: type[RankError] | type[ValueError],
) -> None:
    """Check that the rows of the ports will not exceed `MAX_BYTES`."""
    counts = [sum(tensors[port].numel() for port in some) for some in ports]
    nbytes = sum(4 * count * dim for count, dim in zip(counts, dims, strict=True))
    if nbytes > MAX_BYTES:
        raise error(f"the rows of a batch are {nbytes} bytes; at most {MAX_BYTES} can cross")
