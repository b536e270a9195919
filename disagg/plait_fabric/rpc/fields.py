"""Typed reading of a message's header, which is untrusted input: every error names the field.

And the first message each way: both peers must speak the same version; the rest of its payload is the workload's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any, Literal, TypeAlias

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


SEND_S = 1.0
"""A peer that accepts no message for this long, with its window of unread ones full, is considered dead."""

HANDSHAKE_S = 10.0
"""How long a client may take to send its greeting, or a server to answer it; a separate thread handles this,
whatever the process is computing."""


LEAVING: Header = {"op": "leaving"}
"""A server's: it is about to stop, and serves until its clients have found another."""

LEFT: Header = {"op": "left"}
"""A client's answer to that: it calls no more."""


def greeting(op: Literal["hello", "welcome"], version: int, payload: Header) -> dict[str, Any]:
    """Make a client's hello or a server's welcome. `version`: of the workload's protocol as a whole."""
    return {"op": op, "version": version, **payload}


def read_greeting(op: Literal["hello", "welcome"], version: int, header: Header) -> dict[str, Any]:
    """Return the payload of a hello or welcome. Raises `WireError`, also if its version differs."""
    if header.get("op") != op:
        raise WireError(f"the peer must begin with {op}, version {version}")
    if header.get("version") != version:
        raise WireError(f"the peer speaks version {header.get('version')!s:.20}, this side {version}")
    own = ("op", "version", "_tensors")
    return {field: value for field, value in header.items() if field not in own}
