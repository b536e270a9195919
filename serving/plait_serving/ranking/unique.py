"""Whether the JSON of a request says something twice, without parsing it a second time.

The fast parser of the hot path keeps the last of two members with one name and reports nothing. But every member has a
colon, and counting bytes is free: as many colons as members were kept means that none was lost. Only colons inside of
strings (an id that is a time of day) make more, and then the members are counted one by one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from plait_disagg.errors import BadInput

__all__ = ["check_unique"]

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?', re.DOTALL)
_NUMBERS = re.compile(rb"\[[\s\d.eE+,-]*\]")
_MAX_QUOTES = 100_000
"""Twice as many as the largest number of tensors needs."""
_MAX_NAMED_BYTES = 256 << 10
_LONGEST_NAME = 64


class _Twice(Exception):
    """An object has two members with that name."""


def check_unique(body: bytes, end: int, members: int) -> None:
    """Raise `BadInput` if the JSON in `body[:end]`, of which a parser kept so many `members`, has more of them."""
    if body.count(b":", 0, end) == members:
        return
    if body.count(b'"', 0, end) > _MAX_QUOTES:
        raise BadInput(f"the JSON has more than {_MAX_QUOTES // 2} strings")
    if sum(match[1] is not None for match in _STRING.finditer(body, 0, end)) == members:
        return
    name = _name_of_duplicate(body[:end])
    raise BadInput(f"{name or 'a field'}: the body has it twice", param=name)


def _name_of_duplicate(text: bytes) -> str | None:
    """Return which name it is; None if what remains without the numbers is still large."""
    short = _NUMBERS.sub(b"[]", text)
    if len(short) > _MAX_NAMED_BYTES:
        return None
    try:
        json.loads(short, object_pairs_hook=_object)
    except _Twice as twice:
        return str(twice)[:_LONGEST_NAME]
    except (ValueError, RecursionError):
        pass
    return None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in members:
        if name in seen:
            raise _Twice(name)
        seen[name] = value
    return seen
