"""The fabric: the data plane that carries tensors between processes, for both workloads.

One protocol (`Channel`), several transports chosen by the address: `shm:///path/of/socket` shares memory between
processes of one host, `inproc://name` between threads of one process, `tcp://host:port` crosses hosts. Peers
authenticate each other before anything is parsed; nothing is pickled.
`modelled(channel, link)` makes any of them as slow as an RDMA link, or simulates it in virtual time.

::

    with listen("tcp://127.0.0.1:0", secret=secret) as listener:
        channel = listener.accept(timeout_s=10)
        with recv_tensors(channel, timeout_s=1) as message:
            send_tensors(channel, {"step": message.header["step"]}, residuals(message.tensors))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait_fabric.endpoints import connect, listen
from plait_fabric.errors import (
    AcceptTimeout,
    AddressInUse,
    AuthFailed,
    BadAddress,
    BadHeader,
    BadTensor,
    ChannelClosed,
    ConnectTimeout,
    FabricError,
    FabricTimeout,
    FrameTooLarge,
    LeaseMisuse,
    PeerClosed,
    PeerLost,
    PoolExhausted,
    ProtocolViolation,
    RecvTimeout,
    SendTimeout,
    Unreachable,
    Unsupported,
    WeakSecret,
)
from plait_fabric.link.link import BadLink, Link
from plait_fabric.link.link_files import LINKS, read_links
from plait_fabric.link.modelled import modelled
from plait_fabric.memory.pool import Lease, Pool
from plait_fabric.protocols import Buffer, Channel, Header
from plait_fabric.transport.acceptor import Listener
from plait_fabric.values import (
    ChannelStatistics,
    Delivery,
    FabricOptions,
    Message,
    MessageLimits,
    PoolStatistics,
    new_secret,
)

if TYPE_CHECKING:
    from plait_fabric.tensors import TensorMessage, lease_tensor, recv_tensors, send_tensors, tensors_of

__all__ = [
    "LINKS",
    "AcceptTimeout",
    "AddressInUse",
    "AuthFailed",
    "BadAddress",
    "BadHeader",
    "BadLink",
    "BadTensor",
    "Buffer",
    "Channel",
    "ChannelClosed",
    "ChannelStatistics",
    "ConnectTimeout",
    "Delivery",
    "FabricError",
    "FabricOptions",
    "FabricTimeout",
    "FrameTooLarge",
    "Header",
    "Lease",
    "LeaseMisuse",
    "Link",
    "Listener",
    "Message",
    "MessageLimits",
    "PeerClosed",
    "PeerLost",
    "Pool",
    "PoolExhausted",
    "PoolStatistics",
    "ProtocolViolation",
    "RecvTimeout",
    "SendTimeout",
    "TensorMessage",
    "Unreachable",
    "Unsupported",
    "WeakSecret",
    "connect",
    "lease_tensor",
    "listen",
    "modelled",
    "new_secret",
    "read_links",
    "recv_tensors",
    "send_tensors",
    "tensors_of",
]

_LATER = ("TensorMessage", "lease_tensor", "recv_tensors", "send_tensors", "tensors_of")


def __getattr__(name: str) -> Any:
    """Import torch only when it is used: who moves bytes needs none of it."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.tensors"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
