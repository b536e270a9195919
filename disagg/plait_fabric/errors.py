"""All errors of the fabric, and whether the channel can be used afterwards.

::

    FabricError
    +-- BadAddress           caller: the address cannot be parsed, or its folder is not private
    +-- WeakSecret           caller: the shared secret is too short
    +-- BadHeader            caller: the header is not a small JSON object      channel usable
    +-- BadTensor            caller or peer: a tensor cannot be described        channel usable
    +-- LeaseMisuse          caller: double release, or use after hand-over      channel usable
    +-- FabricTimeout        no one's fault; also a builtin TimeoutError
    |   +-- ConnectTimeout   no channel was made
    |   +-- AcceptTimeout    the listener is usable
    |   +-- RecvTimeout      channel usable, nothing was lost
    |   +-- SendTimeout      usable unless part of a frame had left (see the instance)
    +-- PoolExhausted        operator: leases are held too long, or the pool is small; channel usable
    +-- FrameTooLarge        usable when we refused to send, closed when the peer announced it
    +-- ProtocolViolation    peer: it sent what no correct peer sends            channel closed
    +-- AuthFailed           operator: the two sides hold different secrets      no channel was made
    +-- AddressInUse         operator: another process listens there already
    +-- Unreachable          operator: nothing listens there
    +-- Unsupported          operator: this platform lacks what the channel needs
    +-- ChannelClosed        caller: this side was closed
    +-- PeerLost             peer: it died or the link was cut                   channel closed
        +-- PeerClosed       the peer sent a goodbye before it closed
"""

from __future__ import annotations


class FabricError(Exception):
    """Base class of all fabric errors.

    `channel_usable` tells whether the channel (or listener) that raised it can be used again.
    """

    channel_usable: bool = False

    def __init__(self, message: str, *, channel_usable: bool | None = None) -> None:
        super().__init__(message)
        if channel_usable is not None:
            self.channel_usable = channel_usable


class BadAddress(FabricError, ValueError):
    """The address is not `inproc://`, `shm://` or `tcp://`, or its folder is not private."""


class WeakSecret(FabricError, ValueError):
    """The shared secret is shorter than the minimum."""


class BadHeader(FabricError, ValueError):
    """The header is not a JSON object."""

    channel_usable = True


class BadTensor(FabricError, ValueError):
    """A tensor has a type or layout that the fabric does not carry, or its description is invalid."""

    channel_usable = True


class LeaseMisuse(FabricError, RuntimeError):
    """A lease or message was released twice, or used after it was released or handed over."""

    channel_usable = True


class FabricTimeout(FabricError, TimeoutError):
    """An operation did not finish in time."""

    channel_usable = True


class ConnectTimeout(FabricTimeout):
    """The listener did not complete the handshake in time."""

    channel_usable = False


class AcceptTimeout(FabricTimeout):
    """No authenticated peer arrived in time."""


class RecvTimeout(FabricTimeout):
    """No complete message arrived in time; what has arrived so far is kept for the next `recv`."""


class SendTimeout(FabricTimeout):
    """The peer did not take the message in time."""


class PoolExhausted(FabricError):
    """The pool has no room for the lease and none was released in time."""

    channel_usable = True


class FrameTooLarge(FabricError):
    """A header, a buffer count or a payload exceeds its limit."""


class ProtocolViolation(FabricError):
    """The peer sent bytes that no correct peer sends."""


class AuthFailed(FabricError):
    """The peer does not have our secret."""


class AddressInUse(FabricError):
    """Another listener is using the address."""


class Unreachable(FabricError):
    """Nothing listens at the address."""


class Unsupported(FabricError):
    """The platform lacks what the channel needs (`shm://` needs Linux)."""


class ChannelClosed(FabricError):
    """This side of the channel, or this listener, was closed."""


class PeerLost(FabricError):
    """The peer died, or the link to it was cut."""


class PeerClosed(PeerLost):
    """The peer closed the channel cleanly."""
