"""How two ends meet on a fresh, non-blocking connection, before anything else is read from it.

A greeting is a generator that goes on whenever there is something to read: a listener holds many at once
(`acceptor.py`), whoever connects waits for its own (`meet`).
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from plait_fabric.errors import AuthFailed, ConnectTimeout, PeerLost
from plait_fabric.transport.auth import CHALLENGE_BYTES, REFUSED, RESPONSE_BYTES, ClientHandshake, ServerHandshake
from plait_fabric.values import Scheme
from plait_fabric.waiting import POLL_IN, Deadline, Waiter

HUNG_UP = "the peer hung up during the handshake"

T = TypeVar("T")

Greeting: TypeAlias = Generator[None, None, T]
"""Returns what was agreed on once the peer is authenticated. Raises `FabricError` or `OSError` when the connection must
be dropped."""


def receive(sock: socket.socket, nbytes: int) -> Greeting[bytes]:
    """Read `nbytes`. Raises `PeerLost`."""
    data = b""
    while len(data) < nbytes:
        yield
        chunk = sock.recv(nbytes - len(data))
        if not chunk:
            raise PeerLost(HUNG_UP)
        data += chunk
    return data


def authenticate(sock: socket.socket, secret: bytes, scheme: Scheme) -> Greeting[bytes]:
    """Let a client prove itself, as `introduce` does at the other end; return our own proof, which is to be sent."""
    handshake = ServerHandshake(secret, scheme)
    sock.send(handshake.challenge)
    response = yield from receive(sock, RESPONSE_BYTES)
    try:
        return handshake.prove(response)
    except AuthFailed:
        sock.send(REFUSED)
        raise


def introduce(sock: socket.socket, secret: bytes, scheme: Scheme) -> Greeting[ClientHandshake]:
    """Prove ourselves to a listener, whose proof comes next."""
    handshake = ClientHandshake(secret, scheme)
    challenge = yield from receive(sock, CHALLENGE_BYTES)
    sock.send(handshake.respond(challenge))
    return handshake


def meet(sock: socket.socket, greeting: Greeting[T], deadline: Deadline) -> T:
    """Wait for the end of a greeting. Raises `ConnectTimeout`, and what the greeting raises."""
    readable = Waiter(sock.fileno(), events=POLL_IN)
    try:
        while True:
            next(greeting)
            if not readable.wait(deadline.left_s()):
                raise ConnectTimeout(f"no handshake within {deadline.timeout_s} s")
    except StopIteration as met:
        agreed: T = met.value
        return agreed
    except (ConnectionResetError, BrokenPipeError) as error:
        raise PeerLost(HUNG_UP) from error
    finally:
        greeting.close()
