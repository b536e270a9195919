"""Ports of this machine: find a free one, check or hold one, and check the health of the server behind one."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from plait.errors import ServeError

_QUIET_PORTS = range(20_000, 32_768)
"""Above the ports of Ray's workers (up to 19,999), below Linux's own default range for connections."""

_TRIES = 50

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""And how a machine reaches what listens on them itself."""


def free_port(host: str, *, among: range = _QUIET_PORTS) -> int:
    """Return a port that is free now: one of some tens of `among` below the kernel's ephemeral range, or any. Raises
    `ServeError`.

    Ray Serve binds it only seconds later, and would occasionally find a port of that range taken by then.
    """
    quiet = range(among.start, min(among.stop, _first_given()))
    for port in random.SystemRandom().sample(quiet, k=min(_TRIES, len(quiet))):
        try:
            _bound(host, port).close()
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break  # the host is to blame, not the port
    with _told(host, 0, "--port"), _bound(host, 0) as listener:
        return int(listener.getsockname()[1])


def _first_given() -> int:
    """Return the first port of the kernel's ephemeral range."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _QUIET_PORTS.stop


def check_port(host: str, port: int, *, option: str = "--port") -> None:
    """Check that the port is available. Raises `ServeError` with one sentence that names the option to change if it is
    not."""
    with _told(host, port, option):
        _bound(host, port).close()


@contextlib.contextmanager
def _told(host: str, port: int, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use by another program; choose another with {option}"
            raise ServeError(message) from error
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens, unless the port is `shared`."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Where nobody listens yet, SO_REUSEADDR would share the port with all who have it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if not shared:
            bound.listen(1)
    except BaseException:
        bound.close()
        raise
    return bound


def hold_port(host: str, port: int, *, option: str = "server.direct_port") -> socket.socket:
    """Reserve the port (0: any free one) for processes of this user that share it, until the socket is closed.

    Ray takes dozens of ports from the range that free ones come from. The socket does not listen, so no connection
    is answered. Raises `ServeError`, also if connections of a program that did not share the port ended a moment
    ago.
    """
    with _told(host, port, option):
        return _bound(host, port, shared=True)


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches what listens there."""
    reachable = WILDCARDS.get(host, host)  # a wildcard cannot be visited
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def with_port(url: str, port: int) -> str:
    """Return the URL with another port on the same host."""
    return f"{url.rpartition(':')[0]}:{port}"


def health(url: str, *, timeout_s: float = 5.0) -> str | None:
    """Return None if `/health` below the URL answers 200, else what is wrong."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}/health", headers={"host": "localhost"})  # which is always answered
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
