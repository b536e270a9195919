"""Which host names the server answers to, and whose pages may change something.

A page of another origin can point its own domain name at 127.0.0.1 and then read a local server's answers as if they
were its own (DNS rebinding). The Host header still carries that other name, so a server on loopback answers only to
its own. Without that trick such a page can read no answer, but it can send requests that a form could have sent; its
Origin header gives it away.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from plait_serving.http.edge.errors import ApiError

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The host names of a server that listens on loopback only."""


def host_name(header: str) -> str:
    """Return the Host header without its port, in lower case: `[::1]:8000` is `[::1]`."""
    header = header.strip().lower()
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _as_in_a_header(host: str) -> str:
    """Return the host as a header has it: an IPv6 address has brackets there."""
    return f"[{host}]".lower() if ":" in host and not host.startswith("[") else host.lower()


_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class HostMiddleware:
    """Refuses requests for other names, and changes by pages of other names, with 403; no `hosts` means that any name
    is accepted."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(map(_as_in_a_header, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call. Raises a 403 `ApiError`."""
        if scope["type"] == "http" and self._hosts:
            headers = Headers(scope=scope)
            names = {host_name(header) for header in headers.getlist("host")}
            if not names or names - self._hosts:  # of two, a proxy before us may have read the other
                message = "this server does not answer to that host name: it is not among server.allowed_hosts"
                raise ApiError(403, message, code="host_not_allowed", kind="permission_error")
            if scope["method"] not in _READING and self._pages(headers) - self._hosts:
                message = "this server takes no requests from pages of other hosts: see server.allowed_hosts"
                raise ApiError(403, message, code="origin_not_allowed", kind="permission_error")
        await self._app(scope, receive, send)

    @staticmethod
    def _pages(headers: Headers) -> frozenset[str]:
        """Return the hosts whose pages sent the request; a browser that hides it says `null`, which is none of ours."""
        return frozenset(host_name(header.partition("://")[2]) for header in headers.getlist("origin"))
