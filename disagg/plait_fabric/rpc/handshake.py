"""The first message each way: both peers must speak the same version; the rest of the payload is the workload's."""

from __future__ import annotations

from typing import Any, Literal

from plait_fabric.rpc.fields import Header, WireError

HANDSHAKE_S = 10.0
"""How long a client may take to send its greeting, or a server to answer it; a separate thread handles this,
whatever the process is computing."""


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
