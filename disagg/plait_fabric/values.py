"""The records of the fabric: addresses, limits, options, messages and statistics. No I/O here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args

from plait_fabric.errors import BadAddress, FrameTooLarge, LeaseMisuse, WeakSecret

Scheme = Literal["inproc", "shm", "tcp", "nixl"]

MIN_SECRET_BYTES = 16
MAX_INLINE_BYTES = 32_768
"""The max payload of a control packet; fixed, so that both sides size their packets alike."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a listener. `target` is a name (inproc), a socket path (shm) or a host (tcp, nixl)."""

    scheme: Scheme
    target: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `inproc://name`, `shm:///path/of/socket`, `tcp://host:port` or `nixl://host:port`.

        Raises `BadAddress`.
        """
        scheme, _, target = text.partition("://")
        if scheme not in get_args(Scheme) or not target:
            raise BadAddress(
                f"{text!r} is not an address; use inproc://name, shm:///path, tcp://host:port or nixl://host:port"
            )
        if scheme in ("inproc", "shm"):
            return cls(scheme=cast("Scheme", scheme), target=target)
        host, _, port = target.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
            raise BadAddress(f"{text!r} needs a host and a port up to 65535, for example tcp://127.0.0.1:9000")
        return cls(scheme=cast("Scheme", scheme), target=host.removeprefix("[").removesuffix("]"), port=int(port))

    def __str__(self) -> str:
        if self.scheme not in ("tcp", "nixl"):
            return f"{self.scheme}://{self.target}"
        host = f"[{self.target}]" if ":" in self.target else self.target
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """Limits of one message. Both sides check them before they allocate."""

    header_bytes: int = 65_536
    buffers: int = 1_024
    message_bytes: int = 1 << 30

    def check(self, header_bytes: int, buffers: int, message_bytes: int) -> None:
        """Raise `FrameTooLarge` (marked usable: nothing was sent or allocated) if a limit is exceeded."""
        if header_bytes <= self.header_bytes and buffers <= self.buffers and message_bytes <= self.message_bytes:
            return
        for what, value, limit in (
            ("header bytes", header_bytes, self.header_bytes),
            ("buffers", buffers, self.buffers),
            ("message bytes", message_bytes, self.message_bytes),
        ):
            if value > limit:
                raise FrameTooLarge(f"{value} {what} are over the limit of {limit}", channel_usable=True)


@dataclass(frozen=True, kw_only=True)
class FabricOptions:
    """How a channel is built. Each side chooses its own, but `limits` should agree. Nobody checks them.

    `pool_bytes` bounds the payload that waits in one direction, and so the largest message. It is address space: memory
    is allocated page by page on first use, and kept until the channel closes. The default holds one message of the
    maximum size (SDXL's residuals at 1024x1024 in fp16 are 53 MB per row). `in_flight_messages` is the credit window:
    messages sent and not yet released by the receiver, at most 256 (shm and inproc; on tcp the kernel's socket buffers
    and the receiver's pool are the bound). Payloads up to `inline_bytes`, at most `MAX_INLINE_BYTES`, travel in the
    control packet (shm), which is faster for small ones than a slot and its acknowledgement. A peer that sends part of
    a frame and then nothing for `stall_timeout_s` is disconnected; a host that does not answer for
    `tcp_keepalive_idle_s` and three probes is lost (tcp). A `recv` that finds nothing polls for `spin_s` before it
    sleeps (shm and tcp): waking up costs more than a small message, but a polling core does nothing else. Messages from
    `one_sided_from_bytes` on are written into the peer's memory, smaller ones go over the socket (nixl);
    `nixl_transport` is the only one that UCX may use for that ("tcp"), or "" for the best that it finds.
    """

    limits: MessageLimits = field(default_factory=MessageLimits)
    pool_bytes: int = 1 << 30
    in_flight_messages: int = 128
    inline_bytes: int = 8_192
    handshake_timeout_s: float = 2.0
    pending_handshakes: int = 64
    stall_timeout_s: float = 10.0
    spin_s: float = 0.0
    tcp_keepalive_idle_s: int = 5
    one_sided_from_bytes: int = 524_288
    nixl_transport: str = ""


def new_secret() -> bytes:
    """Return a fresh random secret, long enough for `connect` and `listen`."""
    return secrets.token_bytes(32)


def check_secret(secret: bytes) -> None:
    """Raise `WeakSecret` when it is too short to authenticate with."""
    if len(secret) < MIN_SECRET_BYTES:
        raise WeakSecret(f"the fabric secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How a message was delivered: over the real transport (measured), or at the speed of a link model.

    Modelled: `modelled_s` from the post to the delivery according to the link; `late_s` by how much the host was
    slower than that although a receiver was waiting for the message.
    """

    kind: Literal["measured", "modelled"] = "measured"
    link: str = ""
    modelled_s: float = 0.0
    late_s: float = 0.0

    @property
    def host_slower(self) -> bool:
        """Whether the receiver saw a later time than the model's."""
        return self.late_s > 0


MEASURED = Delivery()


class Message:
    """A received message. Its buffers are lent: they are the caller's, writable, until `release()`.

    The buffers view the fabric's own memory (no copy was made). After `release()` that
    memory carries other messages: read nothing through a view or a tensor that you kept. Such a
    view never crashes the process (it keeps the mapping alive), but its contents change.
    Use the message as a context manager, or call `release()` once, from any thread.
    """

    __slots__ = ("_buffers", "_lent", "_releases", "delivery", "header")

    def __init__(
        self,
        header: Mapping[str, Any],
        buffers: Sequence[memoryview],
        on_release: Callable[[], None],
        *,
        delivery: Delivery = MEASURED,
        lent: bool = True,
    ) -> None:
        """`lent` False: the buffers are in nobody else's memory."""
        self.header = header
        self._lent = lent
        self.delivery = delivery
        self._buffers: tuple[memoryview, ...] | None = tuple(buffers)
        self._releases = [on_release]  # popped once: that is atomic, and cheaper than a lock for every message

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """The payload, one writable view of bytes per sent buffer. Raises `LeaseMisuse` after release."""
        if self._buffers is None:
            raise LeaseMisuse("the message was released; its buffers belong to the channel again")
        return self._buffers

    def keep(self) -> list[memoryview]:
        """Return the payload as the caller's own, which outlives the release: what is lent is copied."""
        return [memoryview(bytearray(buffer)) for buffer in self.buffers] if self._lent else list(self.buffers)

    def release(self) -> None:
        """Return the memory to the sender. Raises `LeaseMisuse` on the second call."""
        try:
            on_release = self._releases.pop()
        except IndexError:
            raise LeaseMisuse("the message was released twice") from None
        self._buffers = None
        on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._buffers is not None:
            self.release()


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """A snapshot of a pool. A `leases` count that stays above zero at rest is a leak."""

    capacity_bytes: int
    leased_bytes: int
    leases: int
    peak_leased_bytes: int
    waits: int
    copies: int
    copied_bytes: int


@dataclass(kw_only=True)
class ChannelStatistics:
    """A snapshot of a channel, counted since it was made.

    `copies` and `copied_bytes` count payload copies that this process made while sending; receiving
    makes none (except for payloads of at most `inline_bytes`, which are moved out of the packet).
    `send_waits` counts sends that had to wait for the peer (credit, room in the pool or in the
    socket); `recv_waits` counts receives that found nothing ready.
    `open_messages` counts received messages that have not been released yet.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    copies: int = 0
    copied_bytes: int = 0
    send_waits: int = 0
    recv_waits: int = 0
    open_messages: int = 0
