"""Attaches a command to a Ray that runs, for as long as it has a question."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.errors import ServeError
from plait.server.environment import prepare_environment

_CONNECT_S = 5.0


@contextmanager
def attached(address: str | None, port: int) -> Iterator[Any]:
    """Attach to a Ray, by default to that of `plait serve` on this port, or else to the one of this machine; yields the
    module `ray`. Raises `ServeError`."""
    where, token = _where(address, port)
    if token is not None and token.is_file():
        prepare_environment(token)  # as the server did: else Ray takes its address on loopback for a mistake
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    _reach(where)  # Ray would try for minutes
    connect(where, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()


def connect(address: str, *, logging_level: int = logging.WARNING) -> None:
    """Make this process a driver of a Ray. Raises `ServeError`."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging_level, namespace="plait")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ServeError(f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}") from error


def _where(address: str | None, port: int) -> tuple[str, Path | None]:
    """Return the address, and the file with Ray's token if it is the Ray of a `plait serve`."""
    from plait.server.state import read_record, state_root

    if address is not None:
        return address, None
    folder = state_root(os.environ) / f"port-{port}"
    record = read_record(folder)
    return ("auto", None) if record is None else (record.gcs_address or "auto", folder / "auth_token")


def _reach(address: str) -> None:
    """Connect once to an address of the form host:port. Raises `ServeError` if nobody answers there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ServeError(f"no Ray answers at {address}: {error.strerror or error}") from error
