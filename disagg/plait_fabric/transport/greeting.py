"""How two ends meet on a fresh, non-blocking connection: each proves that it has the secret before anything is parsed.

::

    server -> client   magic | server nonce                      (40 bytes)
    client -> server   magic | client nonce | client tag         (72 bytes)
    server -> client   server tag, or zeros for "refused"        (32 bytes)

    tag(role) = HMAC-SHA256(secret, "plait-fabric/1 " role | channel kind | server nonce | client nonce)

The role is in the tag, so a tag that is reflected to its sender never verifies; both nonces are in it, so nothing
can be replayed; the channel kind is in it, so a tcp tag opens no shm channel. The client proves itself first, so an
unauthenticated client gets no tag from the server to attack. This authenticates the peers; it neither encrypts nor
signs what follows: across an untrusted network use a tunnel.

A greeting is a generator that goes on whenever there is something to read: a listener holds many at once
(`acceptor.py`), whoever connects waits for its own (`meet`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, TypeVar

from plait_fabric.errors import AuthFailed, ConnectTimeout, PeerLost, ProtocolViolation
from plait_fabric.values import Scheme
from plait_fabric.waiting import POLL_IN, Deadline, Waiter

_MAGIC = b"PLTFAB\x00\x01"
_NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
RESPONSE_BYTES = len(_MAGIC) + _NONCE_BYTES + PROOF_BYTES
_REFUSED = bytes(PROOF_BYTES)

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
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.send(_MAGIC + ours)
    response = yield from receive(sock, RESPONSE_BYTES)
    if not response.startswith(_MAGIC):
        raise ProtocolViolation("the peer does not speak the fabric's handshake")
    theirs, tag = response[len(_MAGIC) : -PROOF_BYTES], response[-PROOF_BYTES:]
    if not hmac.compare_digest(_tag(secret, b"client", scheme, ours, theirs), tag):
        sock.send(_REFUSED)
        raise AuthFailed("the peer does not hold our secret")
    return _tag(secret, b"server", scheme, ours, theirs)


def introduce(sock: socket.socket, secret: bytes, scheme: Scheme) -> Greeting[Callable[[bytes], None]]:
    """Prove ourselves to a listener; return what checks its proof, which comes next, and raises `AuthFailed`."""
    challenge = yield from receive(sock, CHALLENGE_BYTES)
    if not challenge.startswith(_MAGIC):
        raise ProtocolViolation("the listener does not speak the fabric's handshake")
    theirs, ours = challenge[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    sock.send(_MAGIC + ours + _tag(secret, b"client", scheme, theirs, ours))
    return partial(_check_proof, _tag(secret, b"server", scheme, theirs, ours))


def _tag(secret: bytes, role: bytes, scheme: Scheme, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"plait-fabric/1 " + role + b"|" + scheme.encode() + b"|" + server_nonce + client_nonce
    return hmac.digest(secret, text, hashlib.sha256)


def _check_proof(expected: bytes, proof: bytes) -> None:
    if hmac.compare_digest(proof, _REFUSED):
        raise AuthFailed("the listener refused us: the two sides hold different secrets")
    if not hmac.compare_digest(expected, proof):
        raise AuthFailed("the listener does not hold our secret")


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
