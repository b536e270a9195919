"""The calling end of a channel: calls leave from their callers' threads, answers arrive on the thread that reads.

So an answer crosses the wire while the caller computes, and a large request leaves while a large answer arrives.
Every call is settled exactly once: by an answer that is taken, or by `on_lost`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from plait_fabric.errors import FabricError, FabricTimeout, PoolExhausted, RecvTimeout, SendTimeout
from plait_fabric.memory.pool import Pool
from plait_fabric.protocols import Buffer, Channel, Header
from plait_fabric.rpc.fields import HANDSHAKE_S, LEAVING, LEFT, SEND_S, WireError, greeting, read_greeting
from plait_fabric.rpc.replicas import ReplicaLink
from plait_fabric.values import Message

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often a connection that receives nothing checks whether an answer is overdue."""

_REST_S = 1.0
"""How long a connection stays a last choice after its server announced that it accepts no more calls; by then the
server has hung up, or is accepting calls again."""

Packed: TypeAlias = tuple[Header, Sequence[Buffer]]
Pack: TypeAlias = Callable[[Pool], Packed]
"""Builds a message; large buffers may be leases of the channel's pool."""

T = TypeVar("T")


def bare(header: Header) -> Pack:
    """Return a `Pack` that sends a header alone."""
    return lambda _: (header, ())


class ConnectionLost(Exception):
    """The replica died, hung, misbehaved, or was never there; calls open there will not be answered.

    `hung`: it did not answer in time, so asking it again may cost as much again.
    """

    def __init__(self, replica: str, why: str, *, hung: bool = False) -> None:
        super().__init__(why)
        self.replica = replica
        self.hung = hung


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProtocol(Generic[T]):
    """What a workload sends and receives as a client. `T` is what it wants to remember about a call.

    The callbacks run on the thread that attaches or reads. `on_welcome`, and `on_message`, which owns the message,
    may raise `WireError` to disconnect. `on_lost` gets the calls that will not be answered any more, and why.
    `on_leaving`: the server asks to be let go (`Connection.let_go`). A call that is older than `answer_timeout_s`, if
    given, costs the connection.
    """

    version: int
    hello: Mapping[str, Any]
    on_welcome: Callable[[Connection[T], Mapping[str, Any]], None]
    on_message: Callable[[Connection[T], Message], None]
    on_lost: Callable[[Connection[T], list[T], str], None]
    on_leaving: Callable[[Connection[T]], None] = lambda _: None
    send_timeout_s: float = SEND_S
    answer_timeout_s: float | None = None


class Connection(Generic[T]):
    """One channel at a time to one replica at a time, and the calls open on it. Any thread may call.

    `window`: how many calls should be open at most, for callers that choose among connections. A caller that must not
    wait, an event loop, gives `later` with its message: what the peer does not take at once is then packed and sent by
    another thread, which first calls `on_thread`, and whoever made the call hears of a failure through `on_lost`.
    """

    def __init__(
        self, protocol: ClientProtocol[T], *, window: int = 1, on_thread: Callable[[], None] = lambda: None
    ) -> None:
        self._protocol = protocol
        self._outbox = Outbox(name="outbox", on_thread=on_thread)
        self._channel: Channel | None = None
        self._open: dict[int, tuple[T, float]] = {}
        self._next_number = 0
        self._lock = threading.Lock()
        self._closed = False
        self.window = window
        self.replica = ""
        self.why_down = "not connected yet"
        self.rests_until_s = 0.0
        self.is_leaving = self._is_let_go = False
        self.looks = 0

    @property
    def up(self) -> bool:
        """Whether a call would be sent now."""
        return self._channel is not None

    @property
    def open_calls(self) -> int:
        """The number of calls without an answer yet."""
        return len(self._open)

    def attach(self, link: ReplicaLink) -> None:
        """Perform the handshake with the replica and use its channel. Raises `ConnectionLost`, with the channel
        closed."""
        protocol, channel = self._protocol, link.channel
        try:
            channel.send(greeting("hello", protocol.version, protocol.hello), timeout_s=protocol.send_timeout_s)
            with channel.recv(HANDSHAKE_S) as message:
                protocol.on_welcome(self, read_greeting("welcome", protocol.version, message.header))
        except BaseException as error:
            channel.close()
            if not isinstance(error, FabricError | WireError):
                raise
            raise ConnectionLost(link.replica, str(error), hung=isinstance(error, FabricTimeout)) from error
        with self._lock:
            self.replica, self._channel, self.why_down = link.replica, channel, "the peer was lost"
            self.is_leaving = self._is_let_go = False
            closed = self._closed  # close() may have looked before there was a channel
        if closed:
            channel.close()

    def call(
        self, item: T, pack: Callable[[int, Pool], Packed], *, later: Callable[[int, Pool], Packed] | None = None
    ) -> int:
        """Send a call, whose message `pack` makes from its number, and return that number. With `later`, `pack` must
        not wait.

        Raises `ConnectionLost` if it was not accepted, a `FabricError` if its message does not fit the fabric (the
        channel stays open), or what `pack` raises.
        """
        with self._lock:
            channel = self._usable()
            number = self._next_number
            self._next_number += 1
            self._open[number] = (item, time.monotonic())
        try:
            if later is None:
                self._send(channel, partial(pack, number))
            elif not self._send_at_once(channel, partial(pack, number)):
                self._outbox.post(partial(self._send_later, channel, partial(later, number), number))
        except BaseException as error:
            mine = self.take(number) is not None  # else on_lost was faster and has it
            if mine or not isinstance(error, ConnectionLost):
                raise
        return number

    def send(self, pack: Pack, *, later: Pack | None = None) -> None:
        """Send a message that needs no answer. Raises as `call` does."""
        channel = self._usable()
        if later is None:
            self._send(channel, pack)
        elif not self._send_at_once(channel, pack):
            self._outbox.post(partial(self._send_later, channel, later, None))

    def take(self, number: int) -> T | None:
        """Return the call with that number, once; None if it is not open (any more)."""
        with self._lock:
            found = self._open.pop(number, None)
        return None if found is None else found[0]

    def was_called(self, number: int) -> bool:
        """Return whether any call ever had that number: numbers are unique over all its channels."""
        return number < self._next_number

    def withdraw(self, item: T) -> int | None:
        """Take back an open call and return its number, or None if it is not open here. Scans all open calls."""
        with self._lock:
            number = next((number for number, (open_item, _) in self._open.items() if open_item is item), None)
            if number is not None:
                del self._open[number]
        return number

    def rest(self) -> None:
        """Mark the connection as a last choice for a while: the server is stopping and takes no more calls."""
        self.rests_until_s = time.monotonic() + _REST_S

    def let_go(self) -> None:
        """Tell a server that is leaving that no more calls come. Those that are open are answered. Idempotent."""
        if not self._is_let_go:
            self._is_let_go = True
            with suppress(ConnectionLost, FabricError):
                self.send(bare(LEFT))

    def close(self) -> None:
        """Close the connection for good; open calls are lost. Idempotent."""
        with self._lock:
            self._closed = True
            channel = self._channel
        if channel is not None:
            channel.close()

    def read(self) -> None:
        """Receive answers until the channel is lost, then report the calls that were open."""
        channel = self._channel
        if channel is None:
            return
        why = self._read(channel)
        channel.close()
        with self._lock:
            self._channel = None
            self.why_down = f"the peer was lost: {why}"
            lost = [item for item, _ in self._open.values()]
            self._open.clear()
        if not self._closed:
            _log.warning("lost %s: %s", self.replica, why)
        self._protocol.on_lost(self, lost, self.why_down)

    def _usable(self) -> Channel:
        if self._channel is None:
            raise ConnectionLost(self.replica, self.why_down)
        return self._channel

    def _send(self, channel: Channel, pack: Pack) -> None:
        try:
            header, buffers = pack(channel.pool)
            channel.send(header, buffers, timeout_s=self._protocol.send_timeout_s)
        except FabricError as error:
            if error.channel_usable and not isinstance(error, FabricTimeout):
                raise
            raise self._hung_up(channel, error) from error

    def _send_at_once(self, channel: Channel, pack: Pack) -> bool:
        """Send without waiting; return False if the peer does not take it now, or others wait already."""
        if not self._outbox.is_empty:
            return False
        try:
            header, buffers = pack(channel.pool)
            channel.send(header, buffers, timeout_s=0.0)
        except FabricError as error:
            if not error.channel_usable:
                raise self._hung_up(channel, error) from error
            if isinstance(error, PoolExhausted | SendTimeout):
                return False
            raise
        return True

    def _send_later(self, channel: Channel, pack: Pack, number: int | None) -> None:
        """Send on the outbox's thread. If that fails and the call is still open here, it is lost."""
        try:
            self._send(channel, pack)
        except Exception as error:
            if not isinstance(error, ConnectionLost | FabricError):
                _log.exception("a message for %s could not be sent", self.replica)
            item = None if number is None else self.take(number)
            if item is not None:
                self._protocol.on_lost(self, [item], str(error))

    def _hung_up(self, channel: Channel, error: FabricError) -> ConnectionLost:
        channel.close()
        hung = isinstance(error, FabricTimeout)
        return ConnectionLost(self.replica, f"the peer was lost: {error}", hung=hung)

    def _read(self, channel: Channel) -> str:
        on_message, look_s = self._protocol.on_message, None if self._protocol.answer_timeout_s is None else _LOOK_S
        try:
            while True:
                try:
                    message = channel.recv(look_s)
                except RecvTimeout:
                    self._check_overdue()
                    continue
                if message.header.get("op") == LEAVING["op"]:
                    message.release()
                    self.is_leaving, self.looks = True, 0
                    self._protocol.on_leaving(self)
                else:
                    on_message(self, message)
        except (FabricError, WireError) as error:
            return str(error)
        except Exception as error:
            _log.exception("an answer of %s could not be taken", self.replica)
            return f"internal error ({type(error).__name__})"

    def _check_overdue(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
        timeout_s = self._protocol.answer_timeout_s
        if oldest is not None and timeout_s is not None and time.monotonic() - oldest[1] > timeout_s:
            raise WireError(f"no answer within {timeout_s:g} s")


class Outbox:
    """A queue of sends, made in order by a thread. Any thread may post; none of them waits for another's send."""

    def __init__(self, *, name: str, on_thread: Callable[[], None] = lambda: None) -> None:
        """Start nothing yet; the thread, when it is needed, first calls `on_thread`."""
        self._thread = ThreadPoolExecutor(1, name, on_thread)
        self._last: Future[None] | None = None
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether everything that was posted has been sent, or has failed."""
        return self._last is None or self._last.done()

    def post(self, send: Callable[[], None]) -> Future[None]:
        """Have `send` called, which may wait and must not raise."""
        with self._lock:
            self._last = self._thread.submit(send)
            return self._last
