"""Channels between threads of one process: leases change owner, nothing is copied.

A lease that is sent is the memory that the receiver reads. Bytes that are not in a lease are
copied once, so that the sender may change them after `send`. Credit: a message counts against
the window from `send` until the receiver releases it.
"""

from __future__ import annotations

import hmac
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from plait_fabric.errors import (
    AcceptTimeout,
    AddressInUse,
    AuthFailed,
    ChannelClosed,
    FabricError,
    PeerClosed,
    RecvTimeout,
    SendTimeout,
    Unreachable,
)
from plait_fabric.memory.pool import Lease, Pool, release_all
from plait_fabric.protocols import Channel
from plait_fabric.transport.base import ChannelBase, Deadline
from plait_fabric.transport.frames import decode_header
from plait_fabric.transport.staging import Part, Staged, stage
from plait_fabric.values import Address, FabricOptions, Message, check_secret


@dataclass(frozen=True)
class _Parcel:
    header: bytes
    staged: Staged


class _Lane:
    """One direction: a bounded queue. `credit` is what the sender may still have outstanding."""

    def __init__(self, credit: int) -> None:
        self.pools: list[Pool] = []
        self.changed = threading.Condition()
        self.parcels: deque[_Parcel] = deque()
        self.credit = credit
        self.ended = False

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        for pool in self.pools:
            pool.shut(PeerClosed("the channel was closed"))


class InprocChannel(ChannelBase):
    """One end of a pair of lanes."""

    def __init__(self, peer: str, options: FabricOptions, outbound: _Lane, inbound: _Lane) -> None:
        super().__init__(pool=Pool.anonymous(options.pool_bytes), peer=peer, limits=options.limits)
        self._outbound = outbound
        self._inbound = inbound
        outbound.pools.append(self._pool)

    def _deliver(self, header: bytes, parts: list[Part], deadline: Deadline) -> None:
        lane = self._outbound
        self._take_credit(deadline)
        try:
            staged = stage(self._pool, parts, deadline.left_s(), lambda _: True)
        except BaseException:
            with lane.changed:
                lane.credit += 1
            raise
        with lane.changed:
            if lane.ended:
                failure = self._ended()
            else:
                lane.parcels.append(_Parcel(header, staged))
                lane.changed.notify_all()
                return
        release_all(staged.leases)
        raise failure

    def _take_credit(self, deadline: Deadline) -> None:
        lane = self._outbound
        with lane.changed:
            if not lane.credit and not lane.ended:
                self._count_send_wait()
                lane.changed.wait_for(lambda: lane.credit or lane.ended, deadline.left_s())
            if lane.ended:
                raise self._ended()
            if not lane.credit:
                raise SendTimeout(f"the peer released no message within {deadline.timeout_s} s")
            lane.credit -= 1

    def _ended(self) -> FabricError:
        return self._fail(PeerClosed(f"the peer {self._peer} closed the channel"))

    def _collect(self, deadline: Deadline) -> tuple[Message, int]:
        lane = self._inbound
        with lane.changed:
            self._raise_if_unusable_unless_parcels(lane)
            if not lane.parcels and not lane.ended:
                self._count_recv_wait()
                lane.changed.wait_for(lambda: lane.parcels or lane.ended, deadline.left_s())
            if isinstance(self._failure, ChannelClosed):
                self._raise_if_unusable()
            if not lane.parcels:
                if lane.ended:
                    raise self._ended()
                raise RecvTimeout(f"no message within {deadline.timeout_s} s")
            parcel = lane.parcels.popleft()
        views = parcel.staged.views()
        nbytes = sum(view.nbytes for view in views)
        return Message(decode_header(parcel.header), views, self._releaser(parcel.staged.leases)), nbytes

    def _raise_if_unusable_unless_parcels(self, lane: _Lane) -> None:
        if isinstance(self._failure, ChannelClosed) or not lane.parcels:
            self._raise_if_unusable()

    def _releaser(self, leases: list[Lease]) -> Callable[[], None]:
        def release() -> None:
            self._count_release()
            release_all(leases)
            with self._inbound.changed:
                self._inbound.credit += 1
                self._inbound.changed.notify_all()

        return release

    def close(self) -> None:
        """End both lanes, which wakes both ends, and release what was not received."""
        if not self._close_once():
            return
        self._outbound.end()
        self._inbound.end()
        with self._inbound.changed:
            waiting = list(self._inbound.parcels)
            self._inbound.parcels.clear()
        for parcel in waiting:
            release_all(parcel.staged.leases)


def pair(
    options: FabricOptions | None = None, *, names: tuple[str, str] = ("inproc", "inproc")
) -> tuple[InprocChannel, InprocChannel]:
    """Return two connected ends with no listener and no secret, for tests and fakes."""
    options = options or FabricOptions()
    there, back = _Lane(options.in_flight_messages), _Lane(options.in_flight_messages)
    return InprocChannel(names[1], options, there, back), InprocChannel(names[0], options, back, there)


class InprocListener:
    """A name in this process's table of listeners."""

    def __init__(self, address: Address, secret: bytes, options: FabricOptions) -> None:
        self._address = address
        self._secret = check_secret(secret)
        self._options = options
        self._changed = threading.Condition()
        self._waiting: deque[InprocChannel] = deque()
        self._closed = False
        self._rejected = 0
        with _listeners_lock:
            if address.target in _listeners:
                raise AddressInUse(f"{address} already has a listener in this process")
            _listeners[address.target] = self

    @property
    def address(self) -> str:
        """The name, as an address."""
        return str(self._address)

    @property
    def rejected(self) -> int:
        """Connections with a wrong secret so far."""
        return self._rejected

    def admit(self, secret: bytes, options: FabricOptions) -> InprocChannel:
        """Check the secret, queue our end and return theirs; called by the connecting side."""
        with self._changed:
            if self._closed:
                raise Unreachable(f"nobody listens at {self._address}")
            if not hmac.compare_digest(self._secret, secret):
                self._rejected += 1
                raise AuthFailed("the listener refused us: the two sides hold different secrets")
            there, back = _Lane(options.in_flight_messages), _Lane(self._options.in_flight_messages)
            client = InprocChannel(self.address, options, there, back)
            self._waiting.append(InprocChannel(self.address, self._options, back, there))
            self._changed.notify_all()
        return client

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next connected end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            if self._closed:
                raise ChannelClosed("the listener was closed")
            if not self._waiting:
                raise AcceptTimeout(f"nobody connected within {timeout_s} s")
            return self._waiting.popleft()

    def close(self) -> None:
        """Remove the name and wake `accept`."""
        with _listeners_lock:
            if _listeners.get(self._address.target) is self:
                del _listeners[self._address.target]
        with self._changed:
            self._closed = True
            abandoned = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for channel in abandoned:
            channel.close()

    def __enter__(self) -> InprocListener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_listeners: dict[str, InprocListener] = {}
_listeners_lock = threading.Lock()


def connect(address: Address, secret: bytes, options: FabricOptions) -> InprocChannel:
    """Connect to a listener of this process. Raises `Unreachable`, `AuthFailed`."""
    with _listeners_lock:
        listener = _listeners.get(address.target)
    if listener is None:
        raise Unreachable(f"nobody listens at {address}")
    return listener.admit(check_secret(secret), options)
