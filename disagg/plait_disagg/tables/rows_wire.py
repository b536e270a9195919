"""The messages between a shard of tables and its clients: a header, and numbers end to end in at most three buffers::

    rows    client -> shard    number; by ask [table, mode, shape of ids, bags or -1, weighted]
                               buffers: ids int64, offsets int64, weights float32, of all asks
    found   back               number, version, by ask the shape of its values; buffer: values float32
    failed  back               number and why: {"code": "bad_id", ...} or {"code": "refused", "why": ...}

Numbers are written straight into memory of the channel's pool: that is their only copy on the sending side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from plait_disagg.tables.protocols import BadId, LookupRequest
from plait_disagg.tables.values import Lookup, Mode
from plait_fabric import Lease, Message, Pool
from plait_fabric.memory.pool import release_all

__all__ = [
    "LookupFailed",
    "RowsRequest",
    "RowsWireError",
    "failed_header",
    "pack_found",
    "pack_requests",
    "parse_answer",
    "parse_requests",
]

VERSION = 1
"""The version of what is defined here; both sides must have the same."""

Header: TypeAlias = Mapping[str, Any]

_MODES = get_args(Mode)
_ROOM_S = 5.0
"""How long to wait for memory of the pool, which the peer releases as it reads."""
_MAX_NUMBERS = 1 << 40
_MAX_DIMENSIONS = 8


class RowsWireError(Exception):
    """The peer sent something that no correct peer sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """A client's lookup. `asks` view the message's memory; None stands for one that this shard does not serve."""

    number: int
    requests: list[LookupRequest | None]
    missing: str = ""

    @property
    def known(self) -> list[LookupRequest]:
        """All requests. Raises ValueError if one of them is not served here."""
        if self.missing:
            raise ValueError(f"there is no table {self.missing}")
        return [request for request in self.requests if request is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed:
    """Why there are no rows: an id (as in `BadId`), or a sentence."""

    bad_id: BadId | None
    why: str


def pack_requests(pool: Pool, number: int, requests: Sequence[LookupRequest]) -> tuple[dict[str, Any], list[Lease]]:
    """Return the message of a lookup. Raises ValueError for an invalid request, `PoolExhausted`."""
    for request in requests:
        pools = request.lookup.mode != "rows"
        if (request.offsets is not None) is not pools or (request.weights is not None and request.lookup.mode != "sum"):
            raise ValueError(f"lookup {request.lookup.name}: pooling needs offsets, and weights go with mode sum")
    described = [
        [
            request.lookup.table,
            request.lookup.mode,
            list(request.ids.shape),
            -1 if request.offsets is None else len(request.offsets) - 1,
            request.weights is not None,
        ]
        for request in requests
    ]
    header = {"kind": "rows", "wire": VERSION, "number": number, "asks": described}
    parts: list[tuple[list[torch.Tensor], torch.dtype]] = [
        ([request.ids for request in requests], torch.int64),
        ([request.offsets for request in requests if request.offsets is not None], torch.int64),
        ([request.weights for request in requests if request.weights is not None], torch.float32),
    ]
    leases: list[Lease] = []
    try:
        for tensors, dtype in parts:
            leases.append(_end_to_end(pool, tensors, dtype))  # what was made must be known if one fails
    except BaseException:
        release_all(leases)
        raise
    return header, leases


def pack_found(
    pool: Pool, number: int, version: int, values: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], list[Lease]]:
    """Return the message of an answer."""
    shapes = [list(value.shape) for value in values]
    header = {"kind": "found", "number": number, "version": version, "shapes": shapes}
    return header, [_end_to_end(pool, values, torch.float32)]


def failed_header(number: int, error: Exception) -> dict[str, Any]:
    """Return the message of a lookup that cannot be served."""
    why: dict[str, Any] = {"code": "refused", "why": str(error)[:1_000]}
    if isinstance(error, BadId):
        why = {
            "code": "bad_id",
            "table": error.table,
            "value": error.value,
            "position": error.position,
            "rows": error.rows,
        }
    return {"kind": "failed", "number": number, "failed": why}


def parse_requests(message: Message, lookups: Mapping[tuple[str, Mode], Lookup]) -> RowsRequest:
    """Parse a lookup; `lookups` has those that a shard serves. Raises `RowsWireError`."""
    header = message.header
    described = header.get("asks")
    if header.get("kind") != "rows" or header.get("wire") != VERSION or not isinstance(described, list):
        raise RowsWireError(f"the client must send rows, version {VERSION}")
    number = _natural(header.get("number"), "number")
    if len(message.buffers) != 3:
        raise RowsWireError("a lookup has three buffers")
    numbers = [_Numbers(b, dtype) for b, dtype in zip(message.buffers, (np.int64, np.int64, np.float32), strict=True)]
    requests = [_parse_request(entry, numbers, lookups) for entry in described]
    if any(some.left for some in numbers):
        raise RowsWireError("there are more numbers than were asked about")
    missing = [entry[0] for entry, request in zip(described, requests, strict=True) if request is None]
    return RowsRequest(number=number, requests=requests, missing=missing[0] if missing else "")


def parse_answer(message: Message) -> tuple[int, int, list[torch.Tensor]] | tuple[int, LookupFailed]:
    """Return number, version and values, copied out of the message, or number and reason. Raises `RowsWireError`."""
    header = message.header
    number = _natural(header.get("number"), "number")
    if header.get("kind") == "failed":
        return number, _failed(header.get("failed"))
    shapes = header.get("shapes")
    if header.get("kind") != "found" or not isinstance(shapes, list) or len(message.buffers) != 1:
        raise RowsWireError("the shard must answer with found or failed")
    numbers = _Numbers(memoryview(bytearray(message.buffers[0])), np.float32)
    values = [numbers.take(_shape(shape)) for shape in shapes]
    if numbers.left:
        raise RowsWireError("there are more values than shapes")
    return number, _natural(header.get("version"), "version"), values


def _end_to_end(pool: Pool, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Lease:
    """Copy all numbers into one lease, converting them on the way."""
    lease = pool.acquire(sum(tensor.numel() for tensor in tensors) * dtype.itemsize, _ROOM_S)
    if lease.nbytes:
        whole = torch.frombuffer(lease.memory, dtype=dtype)
        start = 0
        for tensor in tensors:
            whole[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        pool.count_copy(lease.nbytes)
    return lease


class _Numbers:
    """Numbers of one type, consumed from a buffer in order."""

    def __init__(self, buffer: memoryview, dtype: DTypeLike) -> None:
        if buffer.nbytes % np.dtype(dtype).itemsize:
            raise RowsWireError("a buffer does not hold whole numbers")
        self._array: NDArray[Any] = np.frombuffer(buffer, dtype) if buffer.nbytes else np.empty(0, dtype)
        self._start = 0

    @property
    def left(self) -> int:
        """Count of the numbers not yet taken."""
        return len(self._array) - self._start

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of the next numbers."""
        stop = self._start + math.prod(shape)
        if stop > len(self._array):
            raise RowsWireError("there are fewer numbers than their shapes say")
        taken = torch.from_numpy(self._array[self._start : stop]).view(shape)
        self._start = stop
        return taken


def _parse_request(
    entry: object, numbers: Sequence[_Numbers], lookups: Mapping[tuple[str, Mode], Lookup]
) -> LookupRequest | None:
    if not isinstance(entry, list) or len(entry) != 5:
        raise RowsWireError("an ask has five fields")
    table, mode, shape, bags, weighted = entry
    if not isinstance(table, str) or mode not in _MODES or type(weighted) is not bool or type(bags) is not int:
        raise RowsWireError(f"the ask of table {table!r} is malformed")
    if not -1 <= bags < _MAX_NUMBERS or (bags < 0) is not (mode == "rows") or (weighted and mode != "sum"):
        raise RowsWireError(f"the ask of table {table!r} contradicts itself")
    ids = numbers[0].take(_shape(shape))
    offsets = numbers[1].take((bags + 1,)) if bags >= 0 else None
    if offsets is not None and (int(offsets[0]) or int(offsets[-1]) != ids.numel() or bool((offsets.diff() < 0).any())):
        raise RowsWireError(f"the offsets of table {table!r} do not fit its ids")
    weights = numbers[2].take((ids.numel(),)) if weighted else None
    lookup = lookups.get((table, mode))
    return None if lookup is None else LookupRequest(lookup=lookup, ids=ids, offsets=offsets, weights=weights)


def _failed(said: object) -> LookupFailed:
    if not isinstance(said, dict):
        raise RowsWireError("the shard failed and does not say why")
    if said.get("code") != "bad_id":
        return LookupFailed(bad_id=None, why=str(said.get("why"))[:1_000])
    table, value, position, rows = (said.get(key) for key in ("table", "value", "position", "rows"))
    if not isinstance(table, str) or not all(type(one) is int for one in (value, position, rows)):
        raise RowsWireError("the shard's refusal of an id is malformed")
    error = BadId(table=table, value=value, position=position, rows=rows)  # type: ignore[arg-type]
    return LookupFailed(bad_id=error, why=str(error))


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise RowsWireError("a shape is a short list")
    sizes = tuple(_natural(size, "size") for size in shape)
    if math.prod(sizes) > _MAX_NUMBERS:
        raise RowsWireError("a shape is absurd")
    return sizes


def _natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBERS:
        raise RowsWireError(f"{name} must be a natural number, not {value!r}")
    return value
