"""The messages between workers: a small JSON header and the sections of a layout (`layout.py`).

A client sends a hello with its role, the server a welcome with its model's card; then requests go one way and answers
the other, matched by number::

    rank     ingress -> CN or whole    one request; its layout follows from the model's card
    cancel   ingress -> CN or whole    nobody waits for the answer any more
    version  back                      a refresh: the model's version from now on
    dense    CN -> HN                  the crossing tensors of a batch, in the layout that the HN's welcome says
    answers  back, from all            the outcomes of one or more requests, or batches: outputs, or why there are none

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

VERSION = 6
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
    header: dict[str, Any] = {"kind": "answers"}
    if len(answers) < len(outcomes):
        header = failures_header([(number, it) for number, it in outcomes if isinstance(it, RankError)])
    if not answers:
        return header, []
    outputs = {part.name: [_float32(it.outputs[part.name]) for _, it in answers] for part in layout.parts}
    described = header["answers"] = [_described(number, it) for number, it in answers]
    return header, pack(
        layout, RowCounts(items=sum([rows for _, rows, *_ in described])), outputs, pool, timeout_s=SEND_S
    )


def _described(number: int, answer: RankAnswer) -> list[Any]:
    rows, times = next(iter(answer.outputs.values())).shape[0], vars(answer.timings).values()
    return [number, rows, answer.bytes_crossed, answer.version, *[round(ms, 4) for ms in times]]


def _float32(output: torch.Tensor) -> torch.Tensor:
    return output if output.dtype is torch.float32 else output.to(torch.float32)  # the question costs less than `to`


def failures_header(errors: Sequence[tuple[int, RankError]]) -> dict[str, Any]:
    """Return the message that these requests or batches ended with errors."""
    described = [
        [number, _CODES.get(type(it), "internal"), it.message[:2000], it.param, it.retry_after_s]
        for number, it in errors
    ]
    return {"kind": "answers", "errors": described}


def parse_answers(
    header: Header, buffers: Sequence[memoryview], layout: Layout
) -> list[tuple[int, RankAnswer | RankError]]:
    """Return the outcomes by number; outputs view `buffers`. Raises `WireError`."""
    _check_kind(header, "answers")
    outcomes: list[tuple[int, RankAnswer | RankError]] = list(map(_parse_error, fields.entries(header, "errors")))
    described = [*map(_parse_described, fields.entries(header, "answers"))]
    if not described:
        return outcomes
    rows = [count for _, count, *_ in described]
    outputs = unpack(layout, RowCounts(items=sum(rows)), buffers)
    for (number, _, nbytes, version, times), mine in zip(described, cut(outputs, rows), strict=True):
        outcomes.append((number, RankAnswer(outputs=mine, timings=times, bytes_crossed=nbytes, version=version)))
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
    _check_kind(header, "dense")
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


def _check_kind(header: Header, kind: str) -> None:
    if header.get("kind") != kind:
        raise WireError(f"a message of kind {str(header.get('kind'))[:50]!r}")


def _moment(header: Header, field: str) -> float | None:
    """Return when what travels as the time remaining will be; None if the field is absent."""
    return None if header.get(field) is None else time.monotonic() + fields.number(header, field)


def _flat(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensors[name].shape[0] for name in layout.given])


def _parse_described(entry: Any) -> tuple[int, int, int, str, RankTimings]:
    parts: list[Any] = entry if isinstance(entry, list) and len(entry) == 8 else [None] * 8
    number, rows, nbytes, version, *ms = parts
    if {type(number), type(rows), type(nbytes)} != {int} or type(version) is not str or min(number, rows, nbytes) < 0:
        raise WireError("an answer is not number, rows, bytes, version and four times")
    if not {*map(type, ms)} <= {int, float} or rows > _MAX_ROWS:
        raise WireError("an answer has more rows than there may be, or times that are no numbers")
    queued_ms, lookup_ms, wire_ms, dense_ms = ms
    if not 0 <= queued_ms < _MAX_MS or not 0 <= dense_ms < _MAX_MS:  # these move a CN's window
        raise WireError("an answer waited or was computed for no time that may be")
    times = RankTimings(queued_ms=queued_ms, lookup_ms=lookup_ms, wire_ms=wire_ms, dense_ms=dense_ms)
    return number, rows, nbytes, version, times


def _parse_error(entry: Any) -> tuple[int, RankError]:
    number, code, message, param, wait_s = entry if isinstance(entry, list) and len(entry) == 5 else [None] * 5
    if type(number) is not int or not isinstance(message, str) or not (param is None or isinstance(param, str)):
        raise WireError("an error is not number, code, message, param, seconds")
    retry_after_s = None if wait_s is None else fields.number({"seconds": wait_s}, "seconds")
    kind = _ERRORS.get(code if isinstance(code, str) else "internal", RankError)
    return number, kind(message, param=param, retry_after_s=retry_after_s)
