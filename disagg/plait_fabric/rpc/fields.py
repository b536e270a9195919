"""Typed reading of a message's header, which is untrusted input. Every error names the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any, TypeAlias

Header: TypeAlias = Mapping[str, Any]

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

_MAX_ENTRIES = 4_096


class WireError(ValueError):
    """The peer sent what no correct peer sends; the channel must be closed."""


def only(header: Header, fields: Set[str]) -> None:
    """Reject a header that does not have exactly these fields. Raises `WireError`."""
    if set(header) != fields:
        raise WireError(f"the fields must be {sorted(fields)}, not {sorted(header)!s:.200}")


def integer(header: Header, field: str, min_value: int = 0, max_value: int = MAX_INTEGER) -> int:
    """Read an integer in that range. Raises `WireError`."""
    value = header.get(field)
    if type(value) is not int or not min_value <= value <= max_value:
        raise WireError(f"{field} must be an integer in [{min_value}, {max_value}]")
    return value


def entries(header: Header, field: str, max_entries: int = _MAX_ENTRIES) -> list[Any]:
    """Read a list of any values, empty if the field is absent. Raises `WireError`."""
    value = header.get(field, [])
    if not isinstance(value, list) or len(value) > max_entries:
        raise WireError(f"{field} must be a list of at most {max_entries}")
    return value


def integers(header: Header, field: str, max_value: int = MAX_INTEGER) -> tuple[int, ...]:
    """Read a list of non-negative integers, empty if the field is absent. Raises `WireError`."""
    values = entries(header, field)
    if not all(type(value) is int and 0 <= value <= max_value for value in values):
        raise WireError(f"{field} must be a list of integers in [0, {max_value}]")
    return tuple(values)


def text(header: Header, field: str, max_chars: int = 200, *, default: str | None = None) -> str:
    """Read a short text, or the default if the field is absent. Raises `WireError`."""
    value = header.get(field, default)
    if not isinstance(value, str) or len(value) > max_chars:
        raise WireError(f"{field} must be a text of at most {max_chars} characters")
    return value


def boolean(header: Header, field: str) -> bool:
    """Read a boolean. Raises `WireError`."""
    value = header.get(field)
    if not isinstance(value, bool):
        raise WireError(f"{field} must be true or false")
    return value


def number(header: Header, field: str) -> float:
    """Read a finite number. Raises `WireError`."""
    value: Any = header.get(field)
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise WireError(f"{field} must be a finite number")
    return float(value)
