"""The composition root of the fabric: the address selects the channel."""

from __future__ import annotations

from typing import Any

from plait_fabric.errors import FabricError, PeerLost, Unreachable
from plait_fabric.protocols import Channel
from plait_fabric.transport import rendezvous, tcp
from plait_fabric.transport.acceptor import Listener
from plait_fabric.transport.greeting import HUNG_UP
from plait_fabric.values import Address, FabricOptions, Scheme, check_secret
from plait_fabric.waiting import Deadline


def connect(address: str, *, secret: bytes, timeout_s: float = 10.0, options: FabricOptions | None = None) -> Channel:
    """Connect to the listener at `address` and authenticate both ways, within `timeout_s` seconds.

    `secret` (at least 16 bytes) must be the listener's. Tries once. Raises `BadAddress`,
    `WeakSecret`, `Unreachable`, `ConnectTimeout`, `AuthFailed`, `PeerLost`, `ProtocolViolation`,
    `Unsupported`.
    """
    parsed, options, deadline = Address.parse(address), options or FabricOptions(), Deadline(timeout_s)
    check_secret(secret)
    try:
        channel: Channel = _transport(parsed.scheme).connect(parsed, secret, options, deadline)
        return channel
    except FabricError:
        raise
    except (ConnectionResetError, BrokenPipeError) as error:
        raise PeerLost(HUNG_UP) from error
    except OSError as error:  # of this process: it has no descriptors left, or no memory for a segment
        raise Unreachable(f"cannot connect to {address}: {error}") from error


def listen(address: str, *, secret: bytes, options: FabricOptions | None = None) -> Listener:
    """Listen at `inproc://name`, `shm:///path/of/socket`, `tcp://host:port` or `nixl://host:port` (0: any free port).

    The folder of an shm socket is created with mode 0700 if it is missing, and must be private to
    this user if it exists. Raises `BadAddress`, `WeakSecret`, `AddressInUse`, `Unsupported`.
    """
    parsed, options = Address.parse(address), options or FabricOptions()
    check_secret(secret)
    listener: Listener = _transport(parsed.scheme).listen(parsed, secret, options)
    return listener


def _transport(scheme: Scheme) -> Any:
    if scheme == "nixl":
        from plait_fabric.transport import nixl

        return nixl
    return tcp if scheme == "tcp" else rendezvous
