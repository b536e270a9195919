"""Which host names the server answers to, and whose pages may change something.

A page of another origin can point its own domain name at 127.0.0.1 and then read a local server's answers as if they
were its own (DNS rebinding). The Host header still carries that other name, so a server on loopback answers only to
its own. Without that trick such a page, which may be one of another port of this machine, can read no answer, but it
can send requests that a form could have sent; its Origin header gives it away, or Sec-Fetch-Site where it has none.

Pages of the origins that are allowed may read answers as well, and send keys: their browsers ask first (CORS). A proxy
that is trusted says by which name and scheme it was asked itself; what anybody else says of that is not read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from plait_serving.http.edge.auth import has_valid_key
from plait_serving.http.edge.errors import A1111, ApiError
from plait_serving.sections import ApiKey

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
_OTHER_SITES = frozenset({"cross-site", "same-site"})
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def _place(header: str, scheme: str) -> tuple[str, str]:
    """Return the host and the port of a Host header; the scheme has a port of its own if the header says none."""
    host = host_name(header)
    return host, header.strip()[len(host) :].removeprefix(":") or _DEFAULT_PORTS.get(scheme, "")


def _parts(origin: str) -> tuple[str, str, str]:
    """Return the scheme, the host and the port of an Origin header; `null` has no host."""
    scheme, _, rest = origin.strip().lower().partition("://")
    return scheme, *_place(rest, scheme)


_TOLD = ("retry-after", "x-request-id", "x-should-retry")
"""What clients read of answers beside their bodies."""


class OriginMiddleware(CORSMiddleware):
    """Answers browsers that ask for pages of these origins, and lets those read answers; others are told nothing."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(map(_as_browsers_send, origins)),
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),  # a key, and what clients of OpenAI's say of themselves; cookies are not among them
            allow_private_network=True,
            expose_headers=_TOLD,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a browser that asks; a refusal in the form of the house."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = "this server lets no pages of that origin ask so: see server.allowed_origins"
        return ApiError(403, message, code="origin_not_allowed").response("")


def _as_browsers_send(origin: str) -> str:
    scheme, host, port = _parts(origin)
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


_FORWARDED_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class TrustedProxies:
    """Has a request be as `X-Forwarded-Proto` and `X-Forwarded-Host` say, if it comes from one of these networks: of
    several values the last, which the nearest proxy has added."""

    def __init__(self, proxies: Sequence[str]) -> None:
        self._proxies = tuple(map(ipaddress.ip_network, proxies))

    def __call__(self, scope: Scope) -> None:
        """Change what a request says."""
        if self._proxies and self._is_trusted(scope):
            said = Headers(scope=scope)
            scheme, host = (_last(said, f"x-forwarded-{name}") for name in ("proto", "host"))
            if scheme in ("http", "https"):
                scope["scheme"] = scheme
            if _FORWARDED_HOST.fullmatch(host):
                kept = [pair for pair in scope["headers"] if pair[0] != b"host"]
                scope["headers"] = [*kept, (b"host", host.encode("ascii"))]

    def _is_trusted(self, scope: Scope) -> bool:
        try:
            address = ipaddress.ip_address((scope.get("client") or ("",))[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._proxies)


def _last(headers: Headers, name: str) -> str:
    return ",".join(headers.getlist(name)).rpartition(",")[2].strip()


class HostCheck:
    """Refuses, with 403, requests for other names; no `hosts` means that any name is accepted.

    So it refuses changes by pages of other origins, of other ports too, where hosts are given or keys are not, and
    where a browser may add a password by itself (`auth.py`). The server's own origin is what the request's Host header
    says, which differs from where it listens behind a tunnel or a forwarded port, with the request's scheme, or https,
    of which a proxy before it relieves it. `origins`: others that are accepted. No page can send a key without asking
    first, so a request with a valid one is from none.
    """

    def __init__(self, hosts: Sequence[str], *, origins: Sequence[str] = (), keys: Sequence[ApiKey] = ()) -> None:
        self._hosts = frozenset(map(_as_in_a_header, hosts))
        self._origins = frozenset(map(_parts, origins))
        self._keys = tuple(keys)

    def __call__(self, scope: Scope) -> None:
        """Raise a 403 `ApiError` for a request that is not answered."""
        headers = Headers(scope=scope)
        if self._hosts and not self._are_ours(headers.getlist("host")):
            message = "this server does not answer to that host name: it is not among server.allowed_hosts"
            raise ApiError(403, message, code="host_not_allowed")
        any_page = self._keys and not self._hosts and not scope["path"].startswith(A1111)
        if scope["method"] not in _READING and not any_page and self._is_of_another_page(scope, headers):
            message = "this server takes no requests from pages of other origins: see server.allowed_origins"
            raise ApiError(403, message, code="origin_not_allowed")

    def _are_ours(self, hosts: Sequence[str]) -> bool:
        """Return whether there is a host header and all are ours: of two, a proxy before us may have read the other."""
        return bool(hosts) and self._hosts.issuperset(map(host_name, hosts))

    def _is_of_another_page(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a page of another origin sent the request."""
        if "origin" in headers:
            hosts, schemes = set(headers.getlist("host")), {scope.get("scheme", "http"), "https"}
            is_other = any(
                scheme not in schemes or {_place(each, scheme) for each in hosts} != {(host, port)}
                for scheme, host, port in set(map(_parts, headers.getlist("origin"))) - self._origins
            )
        else:
            is_other = any(site.strip().lower() in _OTHER_SITES for site in headers.getlist("sec-fetch-site"))
        return is_other and not has_valid_key(headers.get("authorization"), self._keys)
