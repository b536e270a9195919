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

from plait_fabric.errors import AcceptTimeout as AcceptTimeout
from plait_fabric.errors import AddressInUse as AddressInUse
from plait_fabric.errors import AuthFailed as AuthFailed
from plait_fabric.errors import BadAddress as BadAddress
from plait_fabric.errors import BadHeader as BadHeader
from plait_fabric.errors import BadTensor as BadTensor
from plait_fabric.errors import ChannelClosed as ChannelClosed
from plait_fabric.errors import ConnectTimeout as ConnectTimeout
from plait_fabric.errors import FabricError as FabricError
from plait_fabric.errors import FabricTimeout as FabricTimeout
from plait_fabric.errors import FrameTooLarge as FrameTooLarge
from plait_fabric.errors import LeaseMisuse as LeaseMisuse
from plait_fabric.errors import PeerClosed as PeerClosed
from plait_fabric.errors import PeerLost as PeerLost
from plait_fabric.errors import PoolExhausted as PoolExhausted
from plait_fabric.errors import ProtocolViolation as ProtocolViolation
from plait_fabric.errors import RecvTimeout as RecvTimeout
from plait_fabric.errors import SendTimeout as SendTimeout
from plait_fabric.errors import Unreachable as Unreachable
from plait_fabric.errors import Unsupported as Unsupported
from plait_fabric.errors import WeakSecret as WeakSecret
from plait_fabric.memory.pool import Lease as Lease
from plait_fabric.memory.pool import Pool as Pool
from plait_fabric.protocols import Buffer as Buffer
from plait_fabric.protocols import Channel as Channel
from plait_fabric.protocols import Header as Header
from plait_fabric.protocols import Listener as Listener
from plait_fabric.transport.auth import new_secret as new_secret
from plait_fabric.values import ChannelStatistics as ChannelStatistics
from plait_fabric.values import Delivery as Delivery
from plait_fabric.values import FabricOptions as FabricOptions
from plait_fabric.values import Message as Message
from plait_fabric.values import MessageLimits as MessageLimits
from plait_fabric.values import PoolStatistics as PoolStatistics

if TYPE_CHECKING:
    from plait_fabric.endpoints import connect as connect
    from plait_fabric.endpoints import listen as listen
    from plait_fabric.link.link import BadLink as BadLink
    from plait_fabric.link.link import Link as Link
    from plait_fabric.link.link_files import LINKS as LINKS
    from plait_fabric.link.link_files import read_links as read_links
    from plait_fabric.link.modelled import modelled as modelled
    from plait_fabric.tensors import TensorMessage as TensorMessage
    from plait_fabric.tensors import lease_tensor as lease_tensor
    from plait_fabric.tensors import recv_tensors as recv_tensors
    from plait_fabric.tensors import send_tensors as send_tensors
    from plait_fabric.tensors import tensors_of as tensors_of

_LATER = {
    **dict.fromkeys(("connect", "listen"), "endpoints"),
    **dict.fromkeys(("BadLink", "Link"), "link.link"),
    **dict.fromkeys(("LINKS", "read_links"), "link.link_files"),
    "modelled": "link.modelled",
    **dict.fromkeys(("TensorMessage", "lease_tensor", "recv_tensors", "send_tensors", "tensors_of"), "tensors"),
}


def __getattr__(name: str) -> Any:
    """Import transports, modelled links and torch only when they are used: many processes need one of them, or none."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
