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

The sockets do not block; whoever greets waits for what comes until a deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from functools import partial

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


def wait_for_bytes(sock: socket.socket, deadline: Deadline) -> None:
    """Wait until there is something to read, if only the end. Raises `ConnectTimeout`."""
    if not Waiter(sock.fileno(), events=POLL_IN).wait(deadline.left_s()):
        raise ConnectTimeout(f"no handshake within {deadline.timeout_s} s")


def receive(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Read `nbytes`. Raises `PeerLost`, `ConnectTimeout`."""
    data = b""
    while len(data) < nbytes:
        wait_for_bytes(sock, deadline)
        chunk = sock.recv(nbytes - len(data))
        if not chunk:
            raise PeerLost(HUNG_UP)
        data += chunk
    return data


def authenticate(sock: socket.socket, secret: bytes, scheme: Scheme, deadline: Deadline) -> bytes:
    """Let a client prove itself, as `introduce` does at the other end; return our own proof, which is to be sent."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.send(_MAGIC + ours)
    response = receive(sock, RESPONSE_BYTES, deadline)
    if not response.startswith(_MAGIC):
        raise ProtocolViolation("the peer does not speak the fabric's handshake")
    theirs, tag = response[len(_MAGIC) : -PROOF_BYTES], response[-PROOF_BYTES:]
    if not hmac.compare_digest(_tag(secret, b"client", scheme, ours, theirs), tag):
        sock.send(_REFUSED)
        raise AuthFailed("the peer does not hold our secret")
    return _tag(secret, b"server", scheme, ours, theirs)


def introduce(sock: socket.socket, secret: bytes, scheme: Scheme, deadline: Deadline) -> Callable[[bytes], None]:
    """Prove ourselves to a listener; return what checks its proof, which comes next, and raises `AuthFailed`."""
    challenge = receive(sock, CHALLENGE_BYTES, deadline)
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
