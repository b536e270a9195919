"""Where the server is and how to connect: URL, names, TLS, and the bytes of a request. All sockets are opened here."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import LoadTarget
from plait_loadtest.values import Failure, PreparedRequest, RequestOutcome

_DEFAULT_HEADERS = (("accept", "*/*"), ("user-agent", "plait-loadtest"))
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PATH_SAFE = "/?&=%:@!$'()*+,;~-._[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A parsed URL. `authority` is the Host header; `prefix` is the URL's path, prepended to every request's path."""

    host: str
    port: int
    uses_tls: bool
    authority: str
    prefix: str


def place_of(url: str) -> Place:
    """Parse `http[s]://host[:port][/prefix]`. Raises `ScenarioError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ScenarioError(f"target.url: {url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ScenarioError(f"target.url: {url!r} must be http://host:port or https://host:port")
    return Place(
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        uses_tls=parts.scheme == "https",
        authority=parts.netloc,
        prefix=parts.path.rstrip("/"),
    )


class RequestWriter:
    """Encodes prepared requests for one server. The scenario's headers override a request's own."""

    def __init__(self, place: Place, headers: Mapping[str, str]) -> None:
        self._place = place
        self._headers = {name.lower(): value for name, value in headers.items()}

    def bytes_of(self, prepared: PreparedRequest) -> bytes:
        """Return the whole request. Raises `ScenarioError` if a header has a line end or characters outside Latin-1."""
        host = {"host": self._place.authority, **dict(_DEFAULT_HEADERS)}
        fields = {**host, **{name.lower(): value for name, value in prepared.headers}, **self._headers}
        if prepared.body or prepared.method in _WITH_BODY:
            fields["content-length"] = str(len(prepared.body))
        path = self._place.prefix + prepared.path
        lines = [f"{prepared.method} {quote(path, safe=_PATH_SAFE)} HTTP/1.1"]
        for name, value in fields.items():
            if "\n" in value or "\r" in value or "\n" in name or "\r" in name:
                raise ScenarioError(f"the header {name!r} holds a line end")
            lines.append(f"{name}: {value}")
        try:
            head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        except UnicodeEncodeError as error:
            raise ScenarioError(f"a header is not Latin-1: {error.object[error.start : error.end]!r}") from error
        return head + prepared.body


class Dialler:
    """Opens connections to one place. A name is looked up until that succeeds once; then its addresses are kept."""

    def __init__(self, place: Place, target: LoadTarget) -> None:
        self._place = place
        self._timeout_s = target.connect_timeout_s
        self._tls = _tls(verify=target.verify_tls) if place.uses_tls else None
        self._addresses: list[str] = []
        self._lookup: asyncio.Task[list[str]] | None = None

    async def dial(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Protocol | Failure:
        """Return an open connection (TLS included), or why there is none: DNS or CONNECT, also for a timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._dial(factory)
        except (socket.gaierror, UnicodeError) as error:  # the second: what no name can be
            return Failure(RequestOutcome.DNS, str(error))
        except TimeoutError:
            outcome = RequestOutcome.CONNECT if self._addresses else RequestOutcome.DNS
            return Failure(outcome, f"target.connect_timeout_s ({self._timeout_s:g} s) was over")
        except OSError as error:  # TLS errors are among them
            return Failure(RequestOutcome.CONNECT, str(error))

    async def _dial(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        if not self._addresses:
            self._addresses = await self._look_up()
        for address in self._addresses[:-1]:
            try:
                protocol = await self._connect(factory, address)
            except OSError:
                continue
            self._addresses = [address]  # localhost: a server that listens on IPv4 only refuses once, not every time
            return protocol
        return await self._connect(factory, self._addresses[-1])

    async def _connect(self, factory: Callable[[], asyncio.Protocol], address: str) -> asyncio.Protocol:
        _, protocol = await asyncio.get_running_loop().create_connection(
            factory,
            address,
            self._place.port,
            ssl=self._tls,
            server_hostname=self._place.host if self._tls is not None else None,
        )
        return protocol

    async def _look_up(self) -> list[str]:
        """Return the addresses; all waiting requests share one lookup, and the next request retries a failed one."""
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.ensure_future(self._ask())
            # Everybody who waited may have run out of time: then nobody else takes its exception.
            self._lookup.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._lookup)

    async def _ask(self) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _tls(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
