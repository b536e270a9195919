"""A simulated link: any channel, with messages held back until an RDMA link would have delivered them.

The sender stamps a message with the times at which it was posted and at which its port took it (`LinkPort`); the
receiver computes when its own port would have delivered it and holds it until then. The time that the inner channel
takes is part of that delay, so it does not show as long as it is shorter. Where it is longer, the message is late and
says so (`Message.delivery`). Nothing is sped up.

Both ends are wrapped, with the same link and clocks of the same epoch (on one host), each process with one `LinkPort`
for all channels that share a port. The credit window of the inner channel stands for the depth of the queue pair. The
time that this process spends inside the wrapper between a delivery and the next send (waking up late, releasing memory)
is subtracted from the next post, at most `_MAX_OWED_S`: an RDMA host does not spend it.

In virtual time (`tests/contract/test_fabric_modelled.py`) a message costs exactly what `link` specifies, however long
the host takes.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

from plait_fabric.errors import BadHeader, ChannelClosed, FabricError, ProtocolViolation, RecvTimeout, SendTimeout
from plait_fabric.link.link import Link
from plait_fabric.memory.pool import Lease, release_all
from plait_fabric.protocols import Buffer, Channel, Header
from plait_fabric.values import ChannelStatistics, Delivery, Message
from plait_fabric.waiting import Deadline

KEY = "_link"

_MAX_OWED_S = 1e-3
"""The max time attributed to the wrapper itself; anything longer means that the machine was doing other work."""


class LinkPort:
    """One port of a process, for all channels that share it. Thread-safe. Times are seconds of any one clock.

    Full duplex: each direction serves one message after the other, in the order of the calls. So k messages of n bytes
    for one host that are posted at once are delivered at intervals of n / bytes_per_s: incast. The fabric between the
    ports has room for all, and big messages are not interleaved packet by packet.
    """

    def __init__(self) -> None:
        self._until_s = {"send": -math.inf, "receive": -math.inf}
        self._lock = threading.Lock()

    def reserve(self, side: Literal["send", "receive"], at_s: float, busy_s: float) -> float:
        """Reserve a side for `busy_s` from `at_s` on, or once it is free; return when that begins."""
        with self._lock:
            begins_s = max(at_s, self._until_s[side])
            self._until_s[side] = begins_s + busy_s
            return begins_s


class _Held(NamedTuple):
    message: Message
    header: Mapping[str, Any]
    posted_s: float
    due_s: float
    late_s: float


def modelled(
    channel: Channel, link: Link, *, clock: Clock | None = None, port: LinkPort | None = None
) -> ModelledChannel:
    """Wrap the channel so that it behaves as if over `link`; by default in real time and with a port of its own."""
    return ModelledChannel(channel, link, clock or MonotonicClock(), port or LinkPort())


class ModelledChannel:
    """A `Channel` at a link's speed; owns the inner one."""

    def __init__(self, inner: Channel, link: Link, clock: Clock, port: LinkPort) -> None:
        self._inner = inner
        self.pool, self.peer = inner.pool, inner.peer
        self._link = link
        self._clock = clock
        self._port = port
        self._token = f"{zlib.crc32(repr((clock.epoch, link)).encode()):08x}"
        self._stamping = threading.Lock()
        self._receiving = threading.Lock()
        self._closing = threading.Event()
        self._held: _Held | None = None
        self._failure: FabricError | None = None
        self._owed_s = 0.0
        self._posted_s = -math.inf

    @property
    def closed(self) -> bool:
        """Whether the inner channel is closed."""
        return self._failure is not None or self._inner.closed

    def send(self, header: Header, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None) -> None:
        """Stamp the message with its modelled times and send it over the inner channel."""
        if not isinstance(header, Mapping):
            self._inner.send(header, buffers, timeout_s=timeout_s)  # it knows what to say
            return
        if KEY in header:
            release_all(buffers)
            raise BadHeader(f"the header key {KEY!r} belongs to the fabric")
        if not self._stamping.acquire(timeout=-1 if timeout_s is None else timeout_s):
            release_all(buffers)
            raise SendTimeout(f"another message to {self.peer} has not left within {timeout_s} s")
        try:
            stamp = self._stamp(sum(map(_payload_bytes, buffers)))
            self._inner.send({**header, KEY: stamp}, buffers, timeout_s=timeout_s)
        finally:
            self._stamping.release()

    def _stamp(self, nbytes: int) -> list[Any]:
        owed_s, self._owed_s = min(self._owed_s, _MAX_OWED_S), 0.0
        self._posted_s = posted_s = max(self._posted_s, self._clock.now_s() - owed_s)
        leaves_s = self._port.reserve("send", posted_s + self._link.sender_s, self._link.busy_s(nbytes))
        return [self._token, posted_s, leaves_s]

    def recv(self, timeout_s: float | None = None) -> Message:
        """Receive a message at its modelled time.

        The timeout runs on the real clock until a message arrives, then on the link's.
        """
        deadline = Deadline(timeout_s)
        with self._receiving:
            began_s = self._clock.now_s()
            if self._held is None:
                if self._failure is not None:
                    raise type(self._failure)(str(self._failure))
                self._held = self._fetch(self._inner.recv(timeout_s), began_s)
            held = self._held
            left_s = deadline.left_s()
            give_up_s = math.inf if left_s is None else self._clock.now_s() + left_s
            if held.due_s > give_up_s:
                self._clock.wait_until(give_up_s, self._closing)
                self._raise_if_closing()
                raise RecvTimeout(f"no message within {timeout_s} s")
            waits = held.due_s > self._clock.now_s()
            self._clock.wait_until(held.due_s, self._closing)
            self._raise_if_closing()
            self._held = None
            message = self._deliver(held)
            # The wake-up's lateness; what comes after this line is the caller's own time.
            self._owed_s = max(0.0, self._clock.now_s() - held.due_s) if waits else 0.0
            return message

    def _fetch(self, message: Message, began_s: float) -> _Held:
        """Return a message that has just arrived with the time at which it would have been delivered."""
        header = dict(message.header)
        nbytes = sum(buffer.nbytes for buffer in message.buffers)
        ready_s = self._clock.now_s()
        try:
            posted_s, leaves_s = self._read_stamp(header.pop(KEY, None), ready_s)
        except ProtocolViolation as error:
            message.release()
            self._failure = error
            self._inner.close()
            raise
        link = self._link
        begins_s = self._port.reserve("receive", leaves_s + link.flight_s(nbytes), link.busy_s(nbytes))
        due_s = begins_s + link.busy_s(nbytes) + link.completion_s
        late_s = max(0.0, ready_s - due_s) if began_s < due_s else 0.0
        return _Held(message, header, posted_s, due_s, late_s)

    def _read_stamp(self, stamp: object, now_s: float) -> tuple[float, float]:
        if not isinstance(stamp, list) or len(stamp) != 3:
            raise ProtocolViolation("the peer does not model its link")
        token, posted_s, leaves_s = stamp
        if token != self._token:
            raise ProtocolViolation("the peer models another link, or has another host's clock")
        if not all(isinstance(moment, float) and math.isfinite(moment) for moment in (posted_s, leaves_s)):
            raise ProtocolViolation("the peer's stamp is no pair of moments")
        if not posted_s <= min(leaves_s, now_s):
            raise ProtocolViolation("the peer's clock is ahead of ours, or jumped")
        return posted_s, leaves_s

    def _deliver(self, held: _Held) -> Message:
        delivery = Delivery(
            kind="modelled", link=self._link.name, modelled_s=held.due_s - held.posted_s, late_s=held.late_s
        )
        return Message(held.header, held.message.buffers, self._releaser(held.message), delivery=delivery)

    def _releaser(self, message: Message) -> Callable[[], None]:
        def release() -> None:
            began_s = self._clock.now_s()
            message.release()
            self._owed_s += self._clock.now_s() - began_s

        return release

    def _raise_if_closing(self) -> None:
        if self._closing.is_set():
            self._drop_held()
            raise ChannelClosed("this side of the channel was closed")

    def _drop_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.message.release()

    def close(self) -> None:
        """Close the inner channel."""
        self._closing.set()
        self._inner.close()
        with self._receiving:
            self._drop_held()

    def statistics(self) -> ChannelStatistics:
        """Return the inner channel's statistics, without a message that is still held back."""
        counted = self._inner.statistics()
        held = self._held
        if held is None:
            return counted
        return replace(
            counted,
            messages_received=counted.messages_received - 1,
            bytes_received=counted.bytes_received - sum(buffer.nbytes for buffer in held.message.buffers),
            open_messages=counted.open_messages - 1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _payload_bytes(buffer: object) -> int:
    """Return the bytes of a buffer of any kind, or 0 for an invalid one, which the inner channel rejects."""
    if isinstance(buffer, bytes | bytearray):
        return len(buffer)
    return buffer.nbytes if isinstance(buffer, Lease | memoryview) else 0


_SPIN_S = 2e-4
"""The part of a wait that is spent spinning: a sleep on Linux ends some 60 us late (50 us timer slack, prctl(2), and
the wake-up)."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Monotonic time."""

    @property
    def epoch(self) -> str:
        """Equal for two clocks whose times can be compared."""

    def now_s(self) -> float:
        """Return the current time."""

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """Return at that time, at once if it has passed, or when `stop` is set."""


class MonotonicClock:
    """CLOCK_MONOTONIC, which all processes of a host share and which no change of the date affects."""

    def __init__(self) -> None:
        self._nothing = select.poll()
        self.epoch = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else socket.gethostname()

    def now_s(self) -> float:
        """Return the seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def wait_until(self, at_s: float, stop: threading.Event) -> None:
        """Sleep, then spin at the end."""
        left_s = at_s - time.monotonic()
        if left_s > _SPIN_S:
            stop.wait(left_s - _SPIN_S)
        while time.monotonic() < at_s and not stop.is_set():
            # Lets other threads have the interpreter in under a microsecond; `time.sleep(0)` takes 80 on some machines.
            self._nothing.poll(0)
