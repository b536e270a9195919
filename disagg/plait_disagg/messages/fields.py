"""The fields of a message's header, which is foreign input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Header", "WireError", "entries", "integer", "integers", "text"]

Header: TypeAlias = Mapping[str, Any]

_MAX = 4_096


class WireError(Exception):
    """The peer sent what no correct peer sends."""


def integer(header: Header, key: str, end: int) -> int:
    """A number below ``end``, not negative. Raises `WireError`."""
    value = header.get(key)
    if type(value) is not int or not 0 <= value < end:
        raise WireError(f"{key} is no number in its range")
    return value


def entries(header: Header, key: str) -> list[Any]:
    """A list of anything, not too long; empty if there is none. Raises `WireError`."""
    value = header.get(key, [])
    if not isinstance(value, list) or len(value) > _MAX:
        raise WireError(f"{key} is no list")
    return value


def integers(header: Header, key: str, end: int) -> tuple[int, ...]:
    """A list of numbers below ``end``, none negative. Raises `WireError`."""
    values = entries(header, key)
    if not all(type(value) is int and 0 <= value < end for value in values):
        raise WireError(f"{key} is no list of numbers in their range")
    return tuple(values)


def text(header: Header, key: str, *, most: int = 200) -> str:
    """A short text, "" if there is none. Raises `WireError`."""
    value = header.get(key, "")
    if not isinstance(value, str) or len(value) > most:
        raise WireError(f"{key} is no short text")
    return value
