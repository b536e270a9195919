"""The composition root of the fabric: the address selects the channel."""

from __future__ import annotations

from plait_fabric.errors import FabricError, Unreachable
from plait_fabric.protocols import Channel, Listener
from plait_fabric.transport import inproc, rendezvous, tcp
from plait_fabric.transport.base import Deadline
from plait_fabric.values import Address, FabricOptions, check_secret


def connect(address: str, *, secret: bytes, timeout_s: float = 10.0, options: FabricOptions | None = None) -> Channel:
    """Connect to the listener at `address` and authenticate both ways, within `timeout_s` seconds.

    `secret` (at least 16 bytes) must be the listener's. Tries once. Raises `BadAddress`,
    `WeakSecret`, `Unreachable`, `ConnectTimeout`, `AuthFailed`, `PeerLost`, `ProtocolViolation`,
    `Unsupported`.
    """
    parsed, options, deadline = Address.parse(address), options or FabricOptions(), Deadline(timeout_s)
    check_secret(secret)
    try:
        if parsed.scheme == "inproc":
            return inproc.connect(parsed, secret, options)
        if parsed.scheme == "tcp":
            return tcp.connect(parsed, secret, options, deadline)
        if parsed.scheme == "nixl":
            from plait_fabric.transport import nixl

            return nixl.connect(parsed, secret, options, deadline)
        return rendezvous.connect(parsed, secret, options, deadline)
    except FabricError:
        raise
    except OSError as error:  # of this process: it has no descriptors left, or no memory for a segment
        raise Unreachable(f"cannot connect to {address}: {error}") from error


def listen(address: str, *, secret: bytes, options: FabricOptions | None = None) -> Listener:
    """Listen at `inproc://name`, `shm:///path/of/socket`, `tcp://host:port` or `nixl://host:port` (0: any free port).

    The folder of an shm socket is created with mode 0700 if it is missing, and must be private to
    this user if it exists. Raises `BadAddress`, `WeakSecret`, `AddressInUse`, `Unsupported`.
    """
    parsed, options = Address.parse(address), options or FabricOptions()
    check_secret(secret)
    if parsed.scheme == "inproc":
        return inproc.InprocListener(parsed, secret, options)
    if parsed.scheme == "tcp":
        return tcp.listen(parsed, secret, options)
    if parsed.scheme == "nixl":
        from plait_fabric.transport import nixl

        return nixl.listen(parsed, secret, options)
    return rendezvous.listen(parsed, secret, options)
