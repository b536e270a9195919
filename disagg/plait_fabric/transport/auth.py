"""Mutual authentication before anything else is parsed. Sans-I/O: fixed-length blocks in and out.

::

    server -> client   magic | server nonce                      (40 bytes)
    client -> server   magic | client nonce | client tag         (72 bytes)
    server -> client   server tag, or zeros for "refused"        (32 bytes)

    tag(role) = HMAC-SHA256(secret, "plait-fabric/1 " role | channel kind | server nonce | client nonce)

The role is in the tag, so a tag that is reflected to its sender never verifies; both nonces are in it, so nothing
can be replayed; the channel kind is in it, so a tcp tag opens no shm channel. The client proves itself first, so an
unauthenticated client gets no tag from the server to attack. This authenticates the peers; it neither encrypts nor
signs what follows: across an untrusted network use a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from plait_fabric.errors import AuthFailed, ProtocolViolation

_MAGIC = b"PLTFAB\x00\x01"
_NONCE_BYTES = 32
_TAG_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
RESPONSE_BYTES = len(_MAGIC) + _NONCE_BYTES + _TAG_BYTES
PROOF_BYTES = _TAG_BYTES
REFUSED = bytes(_TAG_BYTES)


def new_secret() -> bytes:
    """Return a fresh random secret, long enough for `connect` and `listen`."""
    return secrets.token_bytes(32)


def _tag(secret: bytes, role: bytes, kind: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"plait-fabric/1 " + role + b"|" + kind.encode() + b"|" + server_nonce + client_nonce
    return hmac.digest(secret, text, hashlib.sha256)


class ServerHandshake:
    """The accepting side. Send `challenge`, feed the response, send the returned proof."""

    def __init__(self, secret: bytes, kind: str) -> None:
        self._secret, self._kind = secret, kind
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.challenge = _MAGIC + self._nonce

    def prove(self, response: bytes) -> bytes:
        """Verify the client and return our own proof. Raises `ProtocolViolation`, `AuthFailed`."""
        if len(response) != RESPONSE_BYTES or not response.startswith(_MAGIC):
            raise ProtocolViolation("the peer does not speak the fabric's handshake")
        client_nonce = response[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES]
        expected = _tag(self._secret, b"client", self._kind, self._nonce, client_nonce)
        if not hmac.compare_digest(expected, response[-_TAG_BYTES:]):
            raise AuthFailed("the peer does not hold our secret")
        return _tag(self._secret, b"server", self._kind, self._nonce, client_nonce)


class ClientHandshake:
    """The connecting side. Feed the challenge, send the response, feed the proof."""

    def __init__(self, secret: bytes, kind: str) -> None:
        self._secret, self._kind = secret, kind
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._server_nonce = b""

    def respond(self, challenge: bytes) -> bytes:
        """Answer the server's challenge. Raises `ProtocolViolation`."""
        if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
            raise ProtocolViolation("the listener does not speak the fabric's handshake")
        self._server_nonce = challenge[len(_MAGIC) :]
        tag = _tag(self._secret, b"client", self._kind, self._server_nonce, self._nonce)
        return _MAGIC + self._nonce + tag

    def verify(self, proof: bytes) -> None:
        """Check that the server also has the secret. Raises `AuthFailed`."""
        if hmac.compare_digest(proof, REFUSED):
            raise AuthFailed("the listener refused us: the two sides hold different secrets")
        expected = _tag(self._secret, b"server", self._kind, self._server_nonce, self._nonce)
        if not hmac.compare_digest(expected, proof):
            raise AuthFailed("the listener does not hold our secret")
