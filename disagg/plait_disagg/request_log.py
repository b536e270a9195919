"""Which requests the work at hand is for, so that every line of the log names them.

Whoever works for requests says so, on its thread or in its task; the log's handlers ask when they write a line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeAlias

MAX_REQUESTS = 32
"""The most that are named at once: a batch may be of thousands, and one that fails is tried again one by one."""

_Ids: TypeAlias = Callable[[], Iterable[str]]

_at_hand: ContextVar[_Ids] = ContextVar("at_hand", default=tuple)


def work_for(ids: _Ids) -> None:
    """Say that this thread or task works for the requests with these ids from now on; they are read only when a line
    is written."""
    _at_hand.set(ids)


@contextmanager
def on_behalf_of(ids: _Ids) -> Iterator[None]:
    """Work for these requests, and then for those of before again."""
    token = _at_hand.set(ids)
    try:
        yield
    finally:
        _at_hand.reset(token)


def requests_at_hand() -> list[str]:
    """Return the ids of the requests that this thread or task works for, at most `MAX_REQUESTS`."""
    return list(islice(dict.fromkeys(filter(None, _at_hand.get()())), MAX_REQUESTS))


def add_requests(record: logging.LogRecord) -> bool:
    """Set a line's `requests`: ` [id, id]` of those that its message does not name, or nothing. A filter for handlers
    whose format ends with it."""
    said = record.getMessage().split()
    ids = [each for each in requests_at_hand() if each not in said]
    record.requests = f" [{', '.join(ids)}]" if ids else ""
    return True
