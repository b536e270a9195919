"""How workers serve: a server of the fabric that greets with the model's card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from plait_disagg.messages.wire import HANDSHAKE, SEND_S, Role, card_payload, check_role
from plait_disagg.values import ModelCard
from plait_fabric import Listener, Message
from plait_fabric.rpc.metrics import Metrics
from plait_fabric.rpc.server import Peer, Server, ServerProtocol
from plait_fabric.threads import set_threads

__all__ = ["start_server"]


def start_server(
    role: Role,
    card: Callable[[], ModelCard],
    listeners: Sequence[Listener],
    *,
    on_message: Callable[[Peer, Message], None],
    on_lost: Callable[[Peer], None],
    metrics: Callable[[], Metrics],
) -> Server:
    """Serve clients of that role; the rest is as `ServerProtocol` says. Only the compute thread has a team."""
    protocol = ServerProtocol(
        handshake=HANDSHAKE,
        on_hello=partial(check_role, role=role),
        welcome=lambda: card_payload(card()),
        on_message=on_message,
        on_lost=on_lost,
        metrics=metrics,
        send_timeout_s=SEND_S,
    )
    return Server(protocol, listeners, name=role, on_thread=partial(set_threads, 1))
