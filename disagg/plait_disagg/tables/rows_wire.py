"""The messages between a shard of tables and who asks it: a header, and numbers end to end in at most three buffers::

    rows    client -> shard    number, version of the rows; by ask [piece, mode, ids, bags or -1, weighted]
                               buffers: ids int64, offsets int64, weights float32, of all asks
    found   back               number; by ask [dtype, rows, columns]; buffer: the values of all
    other   back               number and the version that the shard has instead
    failed  back               number and why

Numbers are written straight into memory of the channel's pool: that is their only copy on the sending side. What each
side says of itself in its greeting must add up (`ShardIdentity`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from plait_disagg.tables.plan import ShardPlan
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.values import Lookup, Mode
from plait_fabric import Lease, Message, Pool
from plait_fabric.memory.pool import release_all
from plait_fabric.rpc.fields import Header, WireError, entries, integer, text
from plait_fabric.tensors import DTYPES

WIRE_VERSION = 2
"""The version of what is defined here; both sides must have the same."""

_MODES = get_args(Mode)
_ROOM_S = 5.0
"""How long to wait for memory of the pool, which the peer releases as it reads."""
_MAX_NUMBERS = 1 << 40
_MAX_ASKS = 4_096
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """Which part of what a shard is. `plan`: a digest of who holds which piece."""

    model: str
    packaged: str
    plan: str
    shard: int

    def payload(self) -> dict[str, Any]:
        """Return the payload of a greeting, of either side."""
        return {"role": "rows", **asdict(self)}

    def check(self, payload: Header) -> None:
        """Check what a peer says of itself. Raises `WireError`."""
        for field, mine in self.payload().items():
            if payload.get(field) != mine:
                theirs = str(payload.get(field))[:80]
                raise WireError(f"the peer's {field} is {theirs}, not {mine}: shards must be deployed together")


def identity_of(model: str, packaged: str, plan: ShardPlan, shard: int) -> ShardIdentity:
    """Return the identity of one shard of a plan."""
    pieces = "\n".join(f"{piece.shard} {piece.name}" for piece in plan.pieces)
    digest = hashlib.sha256(pieces.encode()).hexdigest()[:16]
    return ShardIdentity(model=model, packaged=packaged, plan=digest, shard=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """A client's lookup in rows of `version`. `requests` view the message's memory; `missing` names a piece that is not
    here, if one was asked for."""

    number: int
    version: str
    requests: list[LookupRequest]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The values, by ask."""

    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Other:
    """The shard has this version instead."""

    has: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there are no rows."""

    why: str


def pack_requests(
    pool: Pool, number: int, version: str, requests: Sequence[LookupRequest]
) -> tuple[dict[str, Any], list[Lease]]:
    """Return the message of a lookup; ids are (n,). Raises ValueError for an invalid request, `PoolExhausted`."""
    for request in requests:
        pools = request.lookup.mode != "rows"
        if (request.offsets is not None) is not pools or (request.weights is not None and request.lookup.mode != "sum"):
            raise ValueError(f"lookup {request.lookup.name}: pooling needs offsets, and weights go with mode sum")
    described = [
        [
            request.lookup.table,
            request.lookup.mode,
            request.ids.numel(),
            -1 if request.offsets is None else len(request.offsets) - 1,
            request.weights is not None,
        ]
        for request in requests
    ]
    header = {"kind": "rows", "number": number, "of": version, "asks": described}
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


def pack_found(pool: Pool, number: int, values: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[Lease]]:
    """Return the message of an answer: (rows, columns) each."""
    described = [[str(value.dtype).removeprefix("torch."), *value.shape] for value in values]
    header: dict[str, Any] = {"kind": "found", "number": number, "found": described}
    lease = pool.acquire(sum(map(_aligned, values)), _ROOM_S)
    if lease.nbytes:
        whole = torch.frombuffer(lease.memory, dtype=torch.uint8)
        start = 0
        for value in values:
            if value.numel():
                whole[start : start + value.nbytes].view(value.dtype).view(value.shape).copy_(value)
            start += _aligned(value)
        pool.count_copy(lease.nbytes)
    return header, [lease]


def other_header(number: int, has: str) -> dict[str, Any]:
    """Return the message of a shard that has another version."""
    return {"kind": "other", "number": number, "has": has}


def failed_header(number: int, why: str) -> dict[str, Any]:
    """Return the message of a lookup that cannot be served."""
    return {"kind": "failed", "number": number, "why": why[:1_000]}


def parse_requests(message: Message, lookups: Mapping[tuple[str, Mode], Lookup]) -> RowsRequest:
    """Parse a lookup; `lookups` has those that a shard serves. Raises `WireError`."""
    header = message.header
    if header.get("kind") != "rows":
        raise WireError(f"a message of kind {str(header.get('kind'))[:50]!r}")
    number, version, described = integer(header, "number"), text(header, "of"), entries(header, "asks", _MAX_ASKS)
    if len(message.buffers) != 3:
        raise WireError("a lookup has three buffers")
    numbers = [_Numbers(b, dtype) for b, dtype in zip(message.buffers, (np.int64, np.int64, np.float32), strict=True)]
    requests: list[LookupRequest] = []
    missing = ""
    for entry in described:
        request = _parse_request(entry, numbers, lookups)
        missing = missing or ("" if request is not None else entry[0])
        requests += [request] if request is not None else []
    if any(some.left for some in numbers):
        raise WireError("there are more numbers than were asked about")
    return RowsRequest(number=number, version=version, requests=requests, missing=missing)


def parse_answer(message: Message) -> tuple[int, Found | Other | Refusal]:
    """Parse an answer; its values are copied out of the message. Raises `WireError`."""
    header = message.header
    number, kind = integer(header, "number"), header.get("kind")
    if kind == "other":
        return number, Other(text(header, "has"))
    if kind == "failed":
        return number, Refusal(text(header, "why", 1_000))
    if kind != "found" or len(message.buffers) != 1:
        raise WireError("the shard must answer with found, other or failed")
    memory = memoryview(bytearray(message.buffers[0]))
    return number, Found(list(_values(entries(header, "found", _MAX_ASKS), memory)))


def _values(described: Sequence[object], memory: memoryview) -> Iterable[torch.Tensor]:
    start = 0
    for entry in described:
        dtype, *shape = entry if isinstance(entry, list) else [None]
        if not isinstance(dtype, str) or dtype not in DTYPES or len(shape) != 2:
            raise WireError("the shard described a value wrongly")
        rows, columns = (_natural(size, "a size") for size in shape)
        stop = start + rows * columns * DTYPES[dtype].itemsize
        if stop > memory.nbytes:
            raise WireError("there are fewer values than their shapes say")
        if stop == start:
            yield torch.empty((rows, columns), dtype=DTYPES[dtype])
        else:
            yield torch.frombuffer(memory[start:stop], dtype=DTYPES[dtype]).view(rows, columns)
        start = stop + -stop % _ALIGN_BYTES
    if start != memory.nbytes:
        raise WireError("there are more values than shapes")


def _aligned(value: torch.Tensor) -> int:
    return value.nbytes + -value.nbytes % _ALIGN_BYTES


def _end_to_end(pool: Pool, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Lease:
    """Copy all numbers into one lease, converting them on the way."""
    lease = pool.acquire(sum(tensor.numel() for tensor in tensors) * dtype.itemsize, _ROOM_S)
    if lease.nbytes:
        whole = torch.frombuffer(lease.memory, dtype=dtype)
        start = 0
        for tensor in tensors:
            whole[start : start + tensor.numel()].copy_(tensor)
            start += tensor.numel()
        pool.count_copy(lease.nbytes)
    return lease


class _Numbers:
    """Numbers of one type, consumed from a buffer in order."""

    def __init__(self, buffer: memoryview, dtype: DTypeLike) -> None:
        if buffer.nbytes % np.dtype(dtype).itemsize:
            raise WireError("a buffer does not hold whole numbers")
        self._array: NDArray[Any] = np.frombuffer(buffer, dtype) if buffer.nbytes else np.empty(0, dtype)
        self._start = 0

    @property
    def left(self) -> int:
        """Count of the numbers not yet taken."""
        return len(self._array) - self._start

    def take(self, count: int) -> torch.Tensor:
        """Return a view of the next numbers."""
        stop = self._start + count
        if stop > len(self._array):
            raise WireError("there are fewer numbers than were asked about")
        taken = torch.from_numpy(self._array[self._start : stop])
        self._start = stop
        return taken


def _parse_request(
    entry: object, numbers: Sequence[_Numbers], lookups: Mapping[tuple[str, Mode], Lookup]
) -> LookupRequest | None:
    if not isinstance(entry, list) or len(entry) != 5:
        raise WireError("an ask has five fields")
    piece, mode, count, bags, weighted = entry
    if not isinstance(piece, str) or mode not in _MODES or type(weighted) is not bool or type(bags) is not int:
        raise WireError(f"the ask of piece {str(piece)[:200]!r} is malformed")
    if not -1 <= bags < _MAX_NUMBERS or (bags < 0) is not (mode == "rows") or (weighted and mode != "sum"):
        raise WireError(f"the ask of piece {piece[:200]!r} contradicts itself")
    ids = numbers[0].take(_natural(count, "the number of ids"))
    offsets = numbers[1].take(bags + 1) if bags >= 0 else None
    if offsets is not None and (int(offsets[0]) or int(offsets[-1]) != ids.numel() or bool((offsets.diff() < 0).any())):
        raise WireError(f"the offsets of piece {piece[:200]!r} do not fit its ids")
    weights = numbers[2].take(ids.numel()) if weighted else None
    lookup = lookups.get((piece, mode))
    return None if lookup is None else LookupRequest(lookup=lookup, ids=ids, offsets=offsets, weights=weights)


def _natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBERS:
        raise WireError(f"{name} must be a natural number, not {str(value)[:50]}")
    return value
