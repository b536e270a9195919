"""The first message each way: both peers must be of one version; what else they say is the workload's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait_fabric.rpc.fields import Header, WireError

__all__ = ["HANDSHAKE_S", "Handshake"]

HANDSHAKE_S = 10.0
"""How long a client may take to say hello, or a server to answer it; a thread of its own does, whatever it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """``version``: of all messages of the workload; both sides of a channel must have the same."""

    version: int

    def hello(self, payload: Header) -> dict[str, Any]:
        """Make the first message of a client."""
        return {"op": "hello", "version": self.version, **payload}

    def welcome(self, payload: Header) -> dict[str, Any]:
        """Make the server's answer to it."""
        return {"op": "welcome", "version": self.version, **payload}

    def read_hello(self, header: Header) -> Mapping[str, Any]:
        """Return the client's payload. Raises `WireError`."""
        return self._read(header, "hello", "client")

    def read_welcome(self, header: Header) -> Mapping[str, Any]:
        """Return the server's payload. Raises `WireError`."""
        return self._read(header, "welcome", "server")

    def _read(self, header: Header, op: str, peer: str) -> Mapping[str, Any]:
        if header.get("op") != op:
            raise WireError(f"the {peer} must begin with {op}, version {self.version}")
        if header.get("version") != self.version:
            raise WireError(f"the {peer} speaks version {header.get('version')!s:.20}, this side {self.version}")
        own = ("op", "version")
        return {key: value for key, value in header.items() if key not in own and not key.startswith("_")}
