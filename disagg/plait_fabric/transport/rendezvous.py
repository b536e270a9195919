"""How two processes of one host connect: a private unix socket, the handshake, and the exchange of segments.

The socket file has mode 0600 in a folder of mode 0700 that belongs to us, and the kernel vouches
for the peer's user id. A file that a killed listener left behind is recognised (nothing answers)
and replaced.

After the handshake of `auth.py` the server's last packet carries its segment and the peer's end of
the credit line; the client answers with its own segment.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait_fabric.errors import (
    AddressInUse,
    AuthFailed,
    BadAddress,
    PeerLost,
    ProtocolViolation,
    Unreachable,
)
from plait_fabric.memory.segment import Segment, close_descriptors, require_linux
from plait_fabric.protocols import Channel
from plait_fabric.transport.acceptor import SocketListener
from plait_fabric.transport.auth import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    REFUSED,
    RESPONSE_BYTES,
    ClientHandshake,
    ServerHandshake,
)
from plait_fabric.transport.base import Deadline
from plait_fabric.transport.shm import ShmChannel, create_segment
from plait_fabric.transport.waiting import finish_connect
from plait_fabric.values import Address, FabricOptions

_LONGEST_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes including the final zero (unix(7))."""
_REGISTER = b"PLTSEG\x00\x02"
_CREDENTIALS = struct.Struct("3i")


def connect(address: Address, secret: bytes, options: FabricOptions, deadline: Deadline) -> ShmChannel:
    """Connect and authenticate; see `endpoints.connect`."""
    require_linux()
    _check_path(address)
    handshake = ClientHandshake(secret, "shm")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            finish_connect(sock, deadline, lambda: sock.connect(address.target))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise Unreachable(f"nobody listens at {address}: {error.strerror}") from error
        challenge = finish_connect(sock, deadline, lambda: sock.recv(CHALLENGE_BYTES + 1))
        if not challenge:
            raise PeerLost("the listener hung up during the handshake")
        response = handshake.respond(challenge)
        finish_connect(sock, deadline, lambda: sock.send(response))
        proof, descriptors, _, _ = finish_connect(sock, deadline, lambda: socket.recv_fds(sock, PROOF_BYTES + 1, 2))
        try:
            if not proof:
                raise PeerLost("the listener hung up during the handshake")
            handshake.verify(proof)
            if len(descriptors) != 2:
                raise ProtocolViolation("the listener passed no segment")
            return _register(sock, descriptors, address, options, deadline)
        finally:
            close_descriptors(descriptors)
    except BaseException:
        sock.close()
        raise


def _register(
    sock: socket.socket, descriptors: list[int], address: Address, options: FabricOptions, deadline: Deadline
) -> ShmChannel:
    """Map the server's segment and pass ours."""
    incoming = Segment.attach(descriptors[0])
    credit = socket.socket(fileno=os.dup(descriptors[1]))
    try:
        outgoing, descriptor = create_segment(options)
        try:
            finish_connect(sock, deadline, lambda: socket.send_fds(sock, [_REGISTER], [descriptor]))
        finally:
            os.close(descriptor)
        return ShmChannel(
            control=sock, credit=credit, outgoing=outgoing, incoming=incoming, peer=str(address), options=options
        )
    except BaseException:
        credit.close()
        raise


class _ShmArrival:
    """An `Arrival` that waits for the client's response, then for its segment."""

    def __init__(self, sock: socket.socket, secret: bytes, options: FabricOptions) -> None:
        self.sock = sock
        self._handshake = ServerHandshake(secret, "shm")
        self._options = options
        self._outgoing: Segment | None = None
        self._credit: socket.socket | None = None

    def start(self) -> None:
        credentials = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (os.geteuid(), 0):
            raise AuthFailed(f"the peer runs as user {user}")
        self.sock.send(self._handshake.challenge)

    def advance(self) -> Channel | None:
        if self._outgoing is None:
            self._prove()
            return None
        return self._accept_segment(self._outgoing)

    def _prove(self) -> None:
        response = self.sock.recv(RESPONSE_BYTES + 1)
        if not response:
            raise PeerLost("it hung up during the handshake")
        try:
            proof = self._handshake.prove(response)
        except AuthFailed:
            self.sock.send(REFUSED)
            raise
        self._outgoing, descriptor = create_segment(self._options)
        self._credit, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            socket.send_fds(self.sock, [proof], [descriptor, theirs.fileno()])
        finally:
            theirs.close()
            os.close(descriptor)

    def abandon(self) -> None:
        self.sock.close()
        if self._credit is not None:
            self._credit.close()

    def _accept_segment(self, outgoing: Segment) -> Channel:
        packet, descriptors, _, _ = socket.recv_fds(self.sock, len(_REGISTER) + 1, 1)
        try:
            if not packet:
                raise PeerLost("it hung up during the handshake")
            if packet != _REGISTER or len(descriptors) != 1 or self._credit is None:
                raise ProtocolViolation("it registered no segment")
            incoming = Segment.attach(descriptors[0])
        finally:
            close_descriptors(descriptors)
        return ShmChannel(
            control=self.sock,
            credit=self._credit,
            outgoing=outgoing,
            incoming=incoming,
            peer="shm client",
            options=self._options,
        )


def listen(address: Address, secret: bytes, options: FabricOptions) -> SocketListener:
    """Listen; see `endpoints.listen`."""
    require_linux()
    path = _check_path(address)
    _make_private_folder(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _alone_in(path.parent):
            _remove_leftover(address, path)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(128)
            ours = path.stat().st_ino
    except OSError as error:
        sock.close()
        raise AddressInUse(f"cannot listen at {address}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return SocketListener(
        sock,
        address=str(address),
        options=options,
        arrive=lambda peer: _ShmArrival(peer, secret, options),
        on_close=lambda: _unlink_if_ours(path, ours),
    )


def _check_path(address: Address) -> Path:
    path = Path(address.target)
    if not path.is_absolute() or len(os.fsencode(address.target)) > _LONGEST_PATH_BYTES:
        raise BadAddress(f"{address} needs an absolute path of at most {_LONGEST_PATH_BYTES} bytes")
    return path


def _make_private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BadAddress(f"cannot use the folder {folder}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise BadAddress(f"the folder {folder} must belong to this user with mode 0700")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two starting listeners cannot take each other for a leftover."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_leftover(address: Address, path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise AddressInUse(f"cannot listen at {address}: {error.strerror}") from error
        else:
            raise AddressInUse(f"{address} already has a listener")


def _unlink_if_ours(path: Path, inode: int) -> None:
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except OSError:
        return
