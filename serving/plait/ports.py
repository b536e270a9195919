"""Ports of this machine: one that is free, whether one can be had, and whether who listens there is well."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
from urllib.parse import urlsplit

from plait.errors import ServeError

__all__ = ["check_port", "free_port", "health"]


def free_port(host: str) -> int:
    """A port that is free now."""
    with _listener(host, 0) as listener:
        return int(listener.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raises `ServeError` with one sentence if the port can not be had."""
    try:
        _listener(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} on {host} is in use by another program; choose another with --port"
            ) from error
        raise ServeError(f"can not listen on {host}:{port}: {error.strerror or error}") from error


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def health(url: str, *, timeout_s: float = 5.0) -> str | None:
    """None if ``/health`` below the URL answers 200, else what is wrong."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}/health")
        answer = connection.getresponse()
        body = answer.read(10_000)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({error})"
    finally:
        connection.close()
    if answer.status == 200:
        return None
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(body).get("reason"))
    return f"HTTP {answer.status}"
