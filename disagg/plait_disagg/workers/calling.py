"""How workers call each other: a client of the fabric whose errors are those of ranking."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from plait_disagg.errors import RankError, Unavailable
from plait_disagg.messages.wire import HANDSHAKE, SEND_S, Role, parse_card, role_payload
from plait_disagg.values import ModelCard
from plait_fabric import FabricError, Message, Pool
from plait_fabric.rpc.client import Client, Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost, Packed
from plait_fabric.threads import set_threads

__all__ = ["call", "start_client"]

T = TypeVar("T")


def start_client(
    connect: Connect,
    role: Role,
    *,
    on_card: Callable[[Connection[T], ModelCard], None],
    on_message: Callable[[Connection[T], Message], None],
    on_lost: Callable[[Connection[T], list[T], str], None],
    answer_timeout_s: float,
    **options: Any,
) -> Client[T]:
    """Connect to servers of that role: ``options`` as for `Client`, the rest as `ClientProtocol` says."""
    protocol = ClientProtocol(
        handshake=HANDSHAKE,
        hello=role_payload(role),
        on_welcome=lambda connection, payload: on_card(connection, parse_card(payload)),
        on_message=on_message,
        on_lost=on_lost,
        send_timeout_s=SEND_S,
        answer_timeout_s=answer_timeout_s,
    )
    return Client(connect, protocol, on_thread=partial(set_threads, 1), **options)


def call(connection: Connection[T], item: T, pack: Callable[[int, Pool], Packed]) -> None:
    """As `Connection.call`. Raises `Unavailable` if it was not taken, `RankError`."""
    try:
        connection.call(item, pack)
    except ConnectionLost as error:
        raise Unavailable(str(error)) from error
    except FabricError as error:
        raise RankError(f"the request does not fit the fabric: {error}") from error
