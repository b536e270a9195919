"""The messages between workers: a small JSON header and the sections of a layout (`layout.py`).

A client sends a hello with its role, the server a welcome with its model's card; then requests go one way and answers
the other, matched by number::

    rank     ingress -> CN or whole    one request; its layout follows from the model's card
    cancel   ingress -> CN or whole    nobody waits for the answer any more
    answers  back                      the outcomes of one or more requests, each with the version that produced it
    version  back                      a refresh: the model's version from now on
    dense    CN -> HN                  the crossing tensors of a batch, in the layout that the HN's welcome says
    done     back                      its outputs, or why there are none

Every header is untrusted input and validated field by field; a peer that breaks the rules is disconnected.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from plait_disagg.errors import BadInput, Busy, DeadlinePassed, RankError, UnknownModel, WorkerUnavailable
from plait_disagg.graph.inputs import check_inputs, input_from_json, input_to_json
from plait_disagg.messages.hot_rows import HotRows
from plait_disagg.messages.layout import crossing_layout
from plait_disagg.queue.batch import cut
from plait_disagg.queue.knobs import WIRE_FORMATS, WireFormat
from plait_disagg.request_log import MAX_REQUESTS, requests_at_hand
from plait_disagg.values import ModelCard, RankAnswer, RankRequest, RankTimings
from plait_fabric import Buffer, Pool
from plait_fabric.layouts import MAX_LAYOUT_CHARS, Layout, RowCounts, pack, parse_layout, unpack
from plait_fabric.rpc import fields
from plait_fabric.rpc.fields import SEND_S, Header, WireError

VERSION = 5
"""The version of everything defined here; both sides of a channel must have the same."""

Role = Literal["rank", "dense"]

_MAX_ROWS = (1 << 31) - 1
_MAX_ID_CHARS = 200
_MAX_MS = 1e9
_ERRORS: dict[str, type[RankError]] = {
    "bad_input": BadInput,
    "unknown_model": UnknownModel,
    "busy": Busy,
    "deadline": DeadlinePassed,
    "unavailable": WorkerUnavailable,
    "internal": RankError,
}
_CODES = {kind: code for code, kind in _ERRORS.items()}
_CARD_FIELDS = frozenset(field.name for field in dataclasses.fields(ModelCard))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAsk:
    """A batch for the HN.

    `mergeable`: see `CrossingLayout`. `crossing` may view the message's memory. `hot`: some of it goes through
    `RowReceiver.decode` first.
    `dense_version`: the dense half that belongs to the rows. `requests`: ids of those in it, for the log, as many as
    the CN named.

    Its sender's `window`, how many of its batches are `open` here including this one, when the first of its requests is
    due and when the last one is, in `time.monotonic()` seconds (None: never).
    """

    number: int
    candidates: tuple[int, ...]
    crossing: Mapping[str, torch.Tensor]
    mergeable: bool
    hot: HotRows | None = None
    dense_version: str = ""
    requests: tuple[str, ...] = ()
    window: int = 1
    open: int = 1
    due_s: float | None = None
    lost_s: float | None = None


def role_payload(role: Role) -> Header:
    """Return the payload of a client's hello."""
    return {"role": role}


def check_role(payload: Header, role: Role) -> None:
    """Check a client's first message. Raises `WireError` if the client does not belong here."""
    if payload != role_payload(role):
        raise WireError(f"the role must be {role}, not {payload.get('role')!s:.20}")


def card_payload(card: ModelCard, crossing: Layout | None = None) -> Header:
    """Return the payload of a server's welcome; `crossing`: of an HN, what it takes."""
    described = {name: getattr(card, name) for name in _CARD_FIELDS}
    described["inputs"] = [input_to_json(item) for item in card.inputs]
    return {"card": described, **({} if crossing is None else {"crossing": crossing.text})}


def parse_card(payload: Header) -> ModelCard:
    """Parse the server's first message. Raises `WireError`."""
    data: Any = payload.get("card")
    try:
        fields.only(data, _CARD_FIELDS)
        inputs = tuple(input_from_json(item) for item in data["inputs"])
        check_inputs(inputs)
        return TypeAdapter(ModelCard).validate_python({**data, "inputs": inputs})
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise WireError(f"not a model's card: {error!r}") from error


def parse_crossing(payload: Header) -> Layout:
    """Parse what crosses to the HN that sent this welcome. Raises `WireError`."""
    return parse_layout(fields.text(payload, "crossing", MAX_LAYOUT_CHARS))


def rank_message(
    number: int, request: RankRequest, layout: Layout, pool: Pool, *, timeout_s: float = SEND_S
) -> tuple[dict[str, Any], list[Buffer]]:
    """Pack a request. `layout`: the inputs' of the server's card. A deadline travels as the time remaining.

    Waits at most `timeout_s` for memory of the channel.
    """
    counts = RowCounts(users=1, items=request.candidates, flat=_flat(layout, request.tensors))
    header: dict[str, Any] = {
        "kind": "rank",
        "number": number,
        "id": request.request_id[:_MAX_ID_CHARS],
        "n": request.candidates,
        "flat": list(counts.flat),
    }
    if request.deadline_s is not None:
        header["left_s"] = request.deadline_s - time.monotonic()
    return header, pack(layout, counts, request.tensors, pool, timeout_s=timeout_s)


def parse_rank(header: Header, buffers: Sequence[memoryview], card: ModelCard, layout: Layout) -> RankRequest:
    """Parse a request; its tensors view `buffers`.

    The ingress has checked the values, and table lookups check ids again. Raises `WireError`.
    """
    counts = RowCounts(
        users=1, items=fields.integer(header, "n", 0, _MAX_ROWS), flat=fields.integers(header, "flat", _MAX_ROWS)
    )
    return RankRequest(
        request_id=fields.text(header, "id"),
        model=card.name,
        candidates=counts.items,
        tensors=unpack(layout, counts, buffers),
        deadline_s=_moment(header, "left_s"),
    )


def version_header(version: str) -> dict[str, Any]:
    """Return the unsolicited message that the model is now at that version."""
    return {"kind": "version", "version": version}


def parse_version(header: Header) -> str | None:
    """Return the version if the message announces one. Raises `WireError`."""
    return fields.text(header, "version", default="") if header.get("kind") == "version" else None


def cancel_header(number: int) -> dict[str, Any]:
    """Return the message that nobody is waiting for that request any more."""
    return {"kind": "cancel", "number": number}


def parse_number(header: Header) -> int:
    """Return the number of any message that has one. Raises `WireError`."""
    return fields.integer(header, "number")


def answers_message(
    outcomes: Sequence[tuple[int, RankAnswer | RankError]], layout: Layout, pool: Pool
) -> tuple[dict[str, Any], list[Buffer]]:
    """Pack outcomes with the numbers of their requests. `layout`: the outputs' of the model's card, float32; a model
    may compute others."""
    answers = [(number, it) for number, it in outcomes if isinstance(it, RankAnswer)]
    errors = [
        [number, _CODES.get(type(it), "internal"), it.message[:2000], it.param, it.retry_after_s]
        for number, it in outcomes
        if isinstance(it, RankError)
    ]
    header: dict[str, Any] = {"kind": "answers"}
    if errors:
        header["errors"] = errors
    if not answers:
        return header, []
    outputs = {part.name: [it.outputs[part.name].to(torch.float32) for _, it in answers] for part in layout.parts}
    rows = [next(iter(it.outputs.values())).shape[0] for _, it in answers]
    header |= {
        "numbers": [number for number, _ in answers],
        "n": rows,
        "ms": [[round(ms, 4) for ms in vars(it.timings).values()] for _, it in answers],
        "bytes": [it.bytes_crossed for _, it in answers],
        "versions": [it.version for _, it in answers],
    }
    return header, pack(layout, RowCounts(items=sum(rows)), outputs, pool, timeout_s=SEND_S)


def parse_answers(
    header: Header, buffers: Sequence[memoryview], layout: Layout
) -> list[tuple[int, RankAnswer | RankError]]:
    """Return the outcomes by number; outputs view `buffers`. Raises `WireError`."""
    outcomes: list[tuple[int, RankAnswer | RankError]] = list(map(_parse_error, fields.entries(header, "errors")))
    numbers = fields.integers(header, "numbers")
    if not numbers:
        return outcomes
    rows = fields.integers(header, "n", _MAX_ROWS)
    times, crossed = fields.entries(header, "ms"), fields.integers(header, "bytes")
    versions = fields.entries(header, "versions")
    if not all(isinstance(version, str) for version in versions):
        raise WireError("versions are no texts")
    if not len(numbers) == len(rows) == len(times) == len(crossed) == len(versions):
        raise WireError("an answer's lists differ in length")
    outputs = unpack(layout, RowCounts(items=sum(rows)), buffers)
    for number, mine, ms, nbytes, version in zip(numbers, cut(outputs, rows), times, crossed, versions, strict=True):
        answer = RankAnswer(outputs=mine, timings=_parse_times(ms), bytes_crossed=nbytes, version=version)
        outcomes.append((number, answer))
    return outcomes


def dense_message(
    number: int,
    layout: Layout,
    crossing: Mapping[str, torch.Tensor],
    candidates: Sequence[int],
    pool: Pool,
    *,
    wire: WireFormat,
    hot: HotRows | None = None,
    dense_version: str = "",
    window: int = 1,
    open_calls: int = 1,
    deadlines: Sequence[float | None] = (),
) -> tuple[dict[str, Any], list[Buffer]]:
    """Pack a batch in the `layout` that its HN said; `hot` as made by `RowSender.encode`. `deadlines`: of its requests.

    If a number does not fit float16, the whole batch travels as float32.
    """
    ports = None if hot is None else hot.ports
    made = crossing_layout(layout.text, wire, ports).layout
    counts = RowCounts(users=len(candidates), items=sum(candidates), flat=_flat(made, crossing))
    try:
        buffers = pack(made, counts, crossing, pool, timeout_s=SEND_S)
    except OverflowError:
        wire = "float32"
        buffers = pack(crossing_layout(layout.text, wire, ports).layout, counts, crossing, pool, timeout_s=SEND_S)
    header = {"kind": "dense", "number": number, "n": list(candidates), "wire": wire, "flat": list(counts.flat)}
    header["requests"] = [each[:_MAX_ID_CHARS] for each in requests_at_hand()]
    header |= {"window": window, "open": open_calls}
    firm, now_s = [moment for moment in deadlines if moment is not None], time.monotonic()
    if firm:  # None is left out: it would cost the header its fast encoding
        header["due_s"] = min(firm) - now_s
    if firm and len(firm) == len(deadlines):
        header["lost_s"] = max(firm) - now_s
    if hot is not None:
        header["hot"] = hot.to_json()
    if dense_version:
        header["dense"] = dense_version
    return header, buffers


def parse_dense(header: Header, buffers: Sequence[memoryview], layout: Layout) -> DenseAsk:
    """Parse a batch in the `layout` of the HN's welcome. Raises `WireError`."""
    if header.get("kind") != "dense":
        raise WireError(f"a message of kind {str(header.get('kind'))[:50]!r}")
    candidates = fields.integers(header, "n", _MAX_ROWS)
    if not candidates:
        raise WireError("a batch without requests")
    requests = fields.entries(header, "requests", MAX_REQUESTS)
    if not all(isinstance(each, str) and len(each) <= _MAX_ID_CHARS for each in requests):
        raise WireError(f"requests must be texts of at most {_MAX_ID_CHARS} characters")
    wire = header.get("wire")
    if wire not in WIRE_FORMATS:
        raise WireError(f"wire must be one of {', '.join(WIRE_FORMATS)}")
    hot = HotRows.from_json(header["hot"]) if "hot" in header else None
    made = crossing_layout(layout.text, wire, None if hot is None else hot.ports)
    flat = fields.integers(header, "flat", _MAX_ROWS)
    counts = RowCounts(users=len(candidates), items=sum(candidates), flat=flat)
    return DenseAsk(
        number=parse_number(header),
        candidates=candidates,
        crossing=unpack(made.layout, counts, buffers),
        mergeable=made.mergeable,
        hot=hot,
        dense_version=fields.text(header, "dense", default=""),
        requests=tuple(requests),
        window=fields.integer(header, "window", 1),
        open=fields.integer(header, "open", 1),
        due_s=_moment(header, "due_s"),
        lost_s=_moment(header, "lost_s"),
    )


def done_message(
    number: int,
    layout: Layout,
    outputs: Mapping[str, torch.Tensor],
    dense_ms: float,
    pool: Pool,
    *,
    queued_ms: float = 0.0,
) -> tuple[dict[str, Any], list[Buffer]]:
    """Pack a batch's outputs, (N, ...) each, in the layout of the model's card, float32; a model may compute others.
    `queued_ms`: how long it waited at the HN."""
    items = next(iter(outputs.values())).shape[0]
    header = {"kind": "done", "number": number, "n": items, "ms": dense_ms, "queued_ms": queued_ms}
    scores = {name: value.to(torch.float32) for name, value in outputs.items()}
    return header, pack(layout, RowCounts(items=items), scores, pool, timeout_s=SEND_S)


def failed_header(number: int, error: RankError) -> dict[str, Any]:
    """Return the message of a batch that the HN could not compute."""
    return {"kind": "done", "number": number, "error": [_CODES.get(type(error), "internal"), error.message[:2000]]}


def parse_done(
    header: Header, buffers: Sequence[memoryview], layout: Layout
) -> tuple[int, tuple[dict[str, torch.Tensor], float, float] | RankError]:
    """Return the number, and outputs (which view `buffers`) with the milliseconds that the HN computed and that they
    waited there, or its error. Raises `WireError`."""
    if header.get("kind") != "done":
        raise WireError(f"a message of kind {str(header.get('kind'))[:50]!r}")
    asked = parse_number(header)
    error = header.get("error")
    if error is not None:
        return asked, _parse_error([asked, *error, None, None] if isinstance(error, list) else error)[1]
    outputs = unpack(layout, RowCounts(items=fields.integer(header, "n", 0, _MAX_ROWS)), buffers)
    queued_ms = fields.number(header, "queued_ms")
    if not 0 <= queued_ms < _MAX_MS:
        raise WireError("queued_ms is no time")
    return asked, (outputs, fields.number(header, "ms"), queued_ms)


def _moment(header: Header, field: str) -> float | None:
    """Return when what travels as the time remaining will be; None if the field is absent."""
    return None if header.get(field) is None else time.monotonic() + fields.number(header, field)


def _flat(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensors[name].shape[0] for name in layout.given])


def _parse_times(value: Any) -> RankTimings:
    if not isinstance(value, list) or len(value) != 4 or not all(isinstance(ms, int | float) for ms in value):
        raise WireError("ms is not four numbers")
    return RankTimings(queued_ms=value[0], lookup_ms=value[1], wire_ms=value[2], dense_ms=value[3])


def _parse_error(entry: Any) -> tuple[int, RankError]:
    number, code, message, param, wait_s = entry if isinstance(entry, list) and len(entry) == 5 else [None] * 5
    if type(number) is not int or not isinstance(message, str) or not (param is None or isinstance(param, str)):
        raise WireError("an error is not number, code, message, param, seconds")
    retry_after_s = None if wait_s is None else fields.number({"seconds": wait_s}, "seconds")
    kind = _ERRORS.get(code if isinstance(code, str) else "internal", RankError)
    return number, kind(message, param=param, retry_after_s=retry_after_s)
