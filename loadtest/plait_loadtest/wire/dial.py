"""Where the server is and how to connect: URL, names, TLS, and the bytes of a request. All sockets are opened here."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from urllib.parse import quote, urlsplit

from plait_loadtest.errors import LoadtestError, ScenarioError
from plait_loadtest.failures import PORTS, limit_of
from plait_loadtest.scenario import LoadTarget
from plait_loadtest.values import Failure, PreparedRequest, RequestOutcome
from plait_loadtest.wire.framing import HTTP2

LOOKUP_S = 5.0
"""How long a name's addresses are used for new connections before it is looked up again."""

LookUp = Callable[[str, int], Awaitable[list[str]]]
"""`(host, port) -> addresses`, the preferred one first; raises socket.gaierror."""

_LOOPBACK = ["::1", "127.0.0.1"]  # of localhost (RFC 6761); many hosts files know one of them

_DEFAULT_HEADERS = (("accept", "*/*"), ("user-agent", "plait-loadtest"))
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PATH_SAFE = "/?&=%:@!$'()*+,;~-._[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A parsed URL. `authority` is the Host header."""

    host: str
    port: int
    uses_tls: bool
    authority: str


def place_of(url: str) -> Place:
    """Parse `http[s]://host[:port]`. Raises `ScenarioError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ScenarioError(f"target.url: {url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ScenarioError(f"target.url: {url!r} is not http(s)://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ScenarioError(f"target.url: {url!r} goes on after host and port; put that into target.path")
    if parts.username is not None:
        raise ScenarioError("target.url: has a user name; put an authorization into target.headers")
    return Place(
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        uses_tls=parts.scheme == "https",
        authority=parts.netloc,
    )


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a name; see `LookUp`."""
    if host == "localhost":
        return _LOOPBACK
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


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
        lines = [f"{prepared.method} {quote(prepared.path, safe=_PATH_SAFE)} HTTP/1.1"]
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
    """Opens connections to one place, to each address of its name in turn. A new connection goes to what the name meant
    at most `LOOKUP_S` ago; one that an address refuses goes to the next, and the address is left out until then.

    `turn`: which address is first. `on_addresses` receives how many take turns.
    """

    def __init__(
        self, place: Place, target: LoadTarget, *, turn: int = 0, look_up: LookUp = look_up,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:  # fmt: skip
        self.on_addresses: Callable[[int], None] = lambda _: None
        self._place = place
        self._timeout_s = target.connect_timeout_s
        self._tls = tls_of(target) if place.uses_tls else None
        self._look_up, self._clock = look_up, clock
        self._turn = turn
        self._addresses: list[str] = []
        self._asking: asyncio.Task[None] | None = None
        self._asked_ns = 0
        self._has_connected = False

    async def dial(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Protocol | Failure:
        """Return an open connection (TLS included), or why there is none: DNS or CONNECT, also for a timeout; NOT_SENT
        for a limit of this machine, with its name."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._dial(factory)
        except (socket.gaierror, UnicodeError) as error:  # the second: what no name can be
            return Failure(RequestOutcome.DNS, str(error))
        except TimeoutError:
            outcome = RequestOutcome.CONNECT if self._addresses else RequestOutcome.DNS
            return Failure(outcome, f"target.connect_timeout_s ({self._timeout_s:g} s) was over")
        except OSError as error:  # TLS errors are among them
            limit = limit_of(error)
            if limit and (limit != PORTS or self._has_connected):  # else it has no way to that address at all
                return Failure(RequestOutcome.NOT_SENT, limit)
            return Failure(RequestOutcome.CONNECT, HTTP2 if "no application protocol" in str(error) else str(error))

    async def _dial(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        *others, last = await self._in_turn()
        failed: set[str] = set()
        for address in others:
            try:
                async with asyncio.timeout(self._timeout_s / (len(others) + 1)):
                    return await self._connect(factory, address, failed)
            except OSError:
                failed.add(address)
        return await self._connect(factory, last, failed)

    async def _connect(
        self, factory: Callable[[], asyncio.Protocol], address: str, failed: set[str]
    ) -> asyncio.Protocol:
        _, protocol = await asyncio.get_running_loop().create_connection(
            factory,
            address,
            self._place.port,
            ssl=self._tls,
            server_hostname=self._place.host if self._tls is not None else None,
        )
        self._has_connected = True
        if failed:
            self._addresses = [each for each in self._addresses if each not in failed]
        return protocol

    async def _in_turn(self) -> list[str]:
        """Return the addresses, the next one first. Those of the other family (IPv4 or IPv6) are the last resort."""
        await self._know()
        own = _same_family(self._addresses)
        at, self._turn = self._turn % len(own), self._turn + 1
        return [*own[at:], *own[:at], *(each for each in self._addresses if each not in own)]

    async def _know(self) -> None:
        """Look the name up, if that was long ago. All share one look-up, and wait for it only if they know nothing."""
        now_ns = self._clock()
        if self._asking is None or (
            self._asking.done() and (not self._addresses or now_ns - self._asked_ns >= LOOKUP_S * 1e9)
        ):
            self._asked_ns = now_ns
            self._asking = asyncio.ensure_future(self._ask())
            # Everybody who waited may have run out of time: then nobody else takes its exception.
            self._asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not self._addresses:
            await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        found = await self._look_up(self._place.host, self._place.port)
        if set(found) != set(self._addresses):  # name servers change the order each time
            self._addresses = found
            self.on_addresses(len(_same_family(found)))


def _same_family(addresses: list[str]) -> list[str]:
    return [each for each in addresses if (":" in each) == (":" in addresses[0])]


def tls_of(target: LoadTarget) -> ssl.SSLContext:
    """Return how the server's certificate is judged."""
    context = ssl.create_default_context(cafile=target.ca)
    context.set_alpn_protocols(["http/1.1"])
    if not target.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def require_listener(target: LoadTarget) -> None:
    """Raise `LoadtestError` if nobody listens at the URL or its name is unknown: then no request would be sent."""
    place = place_of(target.url)
    why: Exception | None = None
    for host in _LOOPBACK if place.host == "localhost" else [place.host]:
        try:
            socket.create_connection((host, place.port), target.connect_timeout_s).close()
        except TimeoutError:
            return  # it may only be slow
        except (OSError, UnicodeError) as error:
            why = error
        else:
            return
    raise LoadtestError(f"{target.url} cannot be reached, nothing was sent: {why}")
