"""Flow control that travels with a batch and its answer: deadlines, windows, and how long the batch waited.

Fields of the headers of `wire.py`'s `dense` (`flow`) and `done` (`queued_ms`); times travel as the time remaining.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plait_fabric.rpc.fields import Header, WireError

_MAX_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Flow control of a batch.

    Its sender's `window`, how many of its batches are `open` here including this one, when the first of its requests
    is due and when the last one is. Times are on the owner's clock; None means never.
    """

    window: int = 1
    open: int = 1
    due_s: float | None = None
    lost_s: float | None = None


def due_of(deadlines: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return when the first is due, and when the last is due (None if any has no deadline); None if none has one."""
    known = list(deadlines)
    firm = [moment for moment in known if moment is not None]
    return min(firm, default=None), max(firm) if firm and len(firm) == len(known) else None


def flow_field(flow: Flow, now_s: float) -> list[float]:
    """Return the header field that `parse_flow` reads back.

    None values are left out: they would cost the header its fast encoding.
    """
    times = [moment - now_s for moment in (flow.due_s, flow.lost_s) if moment is not None]
    return [flow.window, flow.open, *times]


def parse_flow(header: Header, now_s: float) -> Flow:
    """Parse the flow control of a `dense` message. Raises `WireError`."""
    field = header.get("flow", [1, 1])
    if not isinstance(field, list) or not 2 <= len(field) <= 4 or not all(map(_is_time, field)):
        raise WireError("flow is not two numbers and up to two times")
    window, opened, due_s, lost_s = (*field, None, None)[:4]
    if type(window) is not int or type(opened) is not int or window < 1 or opened < 1:
        raise WireError("flow does not begin with two numbers from 1 on")
    return Flow(
        window=window,
        open=opened,
        due_s=None if due_s is None else now_s + due_s,
        lost_s=None if lost_s is None else now_s + lost_s,
    )


def parse_queued_s(header: Header) -> float:
    """Return how long the batch of a `done` message waited at the HN, in seconds, or 0 if the field is missing.

    Raises `WireError`.
    """
    queued_ms = header.get("queued_ms", 0.0)
    if not _is_time(queued_ms) or queued_ms < 0:
        raise WireError("queued_ms is no time")
    return float(queued_ms) / 1e3


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_S < value < _MAX_S
