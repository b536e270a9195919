"""The messages between a shard of tables and who asks it: a header, and numbers end to end (`plait_fabric.layouts`)::

    rows    client -> shard    number, version of the rows; by ask [piece, mode, ids, bags or -1, weighted]
                               ids int64, offsets int64, weights float32, of all asks
    found   back               number; by ask [dtype, rows, columns]; the values of all, by dtype
    other   back               number and the version that the shard has instead
    failed  back               number and why

What each side says of itself in its greeting must add up (`ShardIdentity`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from plait_disagg.tables.plan import ShardPlan
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.values import Mode
from plait_fabric import Buffer, Message, Pool
from plait_fabric.layouts import Layout, RowCounts, pack, parse_layout, unpack
from plait_fabric.rpc.fields import Header, WireError, entries, integer, text

WIRE_VERSION = 3
"""The version of what is defined here; both sides must have the same."""

_ASKED = parse_layout("i8:f::ids;i8:f::offsets;f4:f::weights")
_FOUND = parse_layout("f4:f::float32;h2:f::float16;u1:f::uint8")
"""Every dtype in which rows are stored, by its name in torch."""

_MODES = get_args(Mode)
_ROOM_S = 5.0
"""How long to wait for memory of the pool, which the peer releases as it reads."""
_MAX_NUMBERS = 1 << 40
_MAX_ASKS = 4_096


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
    """A client's lookup in rows of `version`. `requests` view the message's memory."""

    number: int
    version: str
    requests: list[LookupRequest]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there are no rows. `has`: the version that the shard has instead, if that is the reason."""

    why: str
    has: str | None = None


def pack_requests(
    pool: Pool, number: int, version: str, requests: Sequence[LookupRequest]
) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the message of a lookup; ids are (n,). Raises ValueError for an invalid request, `PoolExhausted`."""
    for request in requests:
        pools = request.mode != "rows"
        if (request.offsets is not None) is not pools or (request.weights is not None and request.mode != "sum"):
            raise ValueError(f"piece {request.table}: pooling needs offsets, and weights go with mode sum")
    described = [
        [
            request.table,
            request.mode,
            request.ids.numel(),
            -1 if request.offsets is None else len(request.offsets) - 1,
            request.weights is not None,
        ]
        for request in requests
    ]
    header = {"kind": "rows", "number": number, "of": version, "asks": described}
    numbers = {
        "ids": [request.ids.long() for request in requests],
        "offsets": [request.offsets.long() for request in requests if request.offsets is not None],
        "weights": [request.weights for request in requests if request.weights is not None],
    }
    return header, _packed(pool, _ASKED, numbers)


def pack_found(pool: Pool, number: int, values: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the message of an answer: (rows, columns) each."""
    described: list[list[Any]] = []
    numbers: dict[str, list[torch.Tensor]] = {name: [] for name in _FOUND.given}
    for value in values:
        dtype = str(value.dtype).removeprefix("torch.")
        described.append([dtype, *value.shape])
        numbers[dtype].append(value.reshape(-1))
    return {"kind": "found", "number": number, "found": described}, _packed(pool, _FOUND, numbers)


def _packed(pool: Pool, layout: Layout, numbers: Mapping[str, Sequence[torch.Tensor]]) -> list[Buffer]:
    flat = tuple([sum([len(piece) for piece in numbers[name]]) for name in layout.given])
    return pack(layout, RowCounts(flat=flat), numbers, pool, timeout_s=_ROOM_S)


def other_header(number: int, has: str) -> dict[str, Any]:
    """Return the message of a shard that has another version."""
    return {"kind": "other", "number": number, "has": has}


def failed_header(number: int, why: str) -> dict[str, Any]:
    """Return the message of a lookup that cannot be served."""
    return {"kind": "failed", "number": number, "why": why[:1_000]}


def parse_requests(message: Message) -> RowsRequest:
    """Parse a lookup. Raises `WireError`."""
    header = message.header
    if header.get("kind") != "rows":
        raise WireError(f"a message of kind {str(header.get('kind'))[:50]!r}")
    number, version = integer(header, "number"), text(header, "of")
    asks = [_parse_ask(entry) for entry in entries(header, "asks", _MAX_ASKS)]
    sizes = {
        "ids": [count for _, _, count, _, _ in asks],
        "offsets": [bags + 1 for _, _, _, bags, _ in asks],
        "weights": [count if weighted else 0 for _, _, count, _, weighted in asks],
    }
    ids, offsets, weights = _cut(_ASKED, sizes, message.buffers).values()
    requests: list[LookupRequest] = []
    for (piece, mode, _, bags, weighted), mine, ends, each in zip(asks, ids, offsets, weights, strict=True):
        if bags >= 0 and (int(ends[0]) or int(ends[-1]) != len(mine) or bool((ends.diff() < 0).any())):
            raise WireError(f"the offsets of piece {piece[:200]!r} do not fit its ids")
        some_offsets, some_weights = (ends if bags >= 0 else None), (each if weighted else None)
        request = LookupRequest(table=piece, mode=mode, ids=mine, offsets=some_offsets, weights=some_weights)
        requests.append(request)
    return RowsRequest(number=number, version=version, requests=requests)


def parse_answer(message: Message) -> tuple[int, list[torch.Tensor] | Refusal]:
    """Parse an answer: the values by ask, which outlive the message, or why there are none. Raises `WireError`."""
    header = message.header
    number, kind = integer(header, "number"), header.get("kind")
    if kind == "other":
        return number, Refusal("it has another version", has=text(header, "has"))
    if kind == "failed":
        return number, Refusal(text(header, "why", 1_000))
    if kind != "found":
        raise WireError("the shard must answer with found, other or failed")
    described = [_parse_value(entry) for entry in entries(header, "found", _MAX_ASKS)]
    sizes = {name: [rows * columns for dtype, rows, columns in described if dtype == name] for name in _FOUND.given}
    numbers = {name: iter(parts) for name, parts in _cut(_FOUND, sizes, message.keep()).items()}
    return number, [next(numbers[dtype]).view(rows, columns) for dtype, rows, columns in described]


def _cut(
    layout: Layout, sizes: Mapping[str, list[int]], buffers: Sequence[memoryview]
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the numbers of each part, cut into pieces of these sizes."""
    found = unpack(layout, RowCounts(flat=tuple([sum(sizes[name]) for name in layout.given])), buffers)
    return {name: found[name].split_with_sizes(sizes[name]) for name in layout.given}


def _parse_ask(entry: object) -> tuple[str, Mode, int, int, bool]:
    if not isinstance(entry, list) or len(entry) != 5:
        raise WireError("an ask has five fields")
    piece, mode, count, bags, weighted = entry
    if not isinstance(piece, str) or mode not in _MODES or type(weighted) is not bool or type(bags) is not int:
        raise WireError(f"the ask of piece {str(piece)[:200]!r} is malformed")
    if not -1 <= bags < _MAX_NUMBERS or (bags < 0) is not (mode == "rows") or (weighted and mode != "sum"):
        raise WireError(f"the ask of piece {piece[:200]!r} contradicts itself")
    return piece, mode, _natural(count, "the number of ids"), bags, weighted


def _parse_value(entry: object) -> tuple[str, int, int]:
    dtype, *shape = entry if isinstance(entry, list) else [None]
    if dtype not in _FOUND.given or len(shape) != 2:
        raise WireError("the shard described a value wrongly")
    return dtype, _natural(shape[0], "a size"), _natural(shape[1], "a size")


def _natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBERS:
        raise WireError(f"{name} must be a natural number, not {str(value)[:50]}")
    return value
