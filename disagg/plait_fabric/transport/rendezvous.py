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
from plait_fabric.transport.acceptor import Greeting, SocketListener
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
from plait_fabric.transport.waiting import HUNG_UP, finish_connect
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
            raise PeerLost(HUNG_UP)
        response = handshake.respond(challenge)
        finish_connect(sock, deadline, lambda: sock.send(response))
        proof, descriptors, _, _ = finish_connect(sock, deadline, lambda: socket.recv_fds(sock, PROOF_BYTES + 1, 2))
        try:
            if not proof:
                raise PeerLost(HUNG_UP)
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


def _greet(sock: socket.socket, secret: bytes, options: FabricOptions) -> Greeting:
    """Authenticate a client, pass our segment and map the client's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise AuthFailed(f"the peer runs as user {user}")
    handshake = ServerHandshake(secret, "shm")
    sock.send(handshake.challenge)
    yield
    response = sock.recv(RESPONSE_BYTES + 1)
    if not response:
        raise PeerLost(HUNG_UP)
    try:
        proof = handshake.prove(response)
    except AuthFailed:
        sock.send(REFUSED)
        raise
    outgoing, descriptor = create_segment(options)
    credit, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            socket.send_fds(sock, [proof], [descriptor, theirs.fileno()])
        finally:
            theirs.close()
            os.close(descriptor)
        yield
        incoming = _registered(sock)
        return ShmChannel(
            control=sock, credit=credit, outgoing=outgoing, incoming=incoming, peer="shm client", options=options
        )
    except BaseException:
        credit.close()
        raise


def _registered(sock: socket.socket) -> Segment:
    packet, descriptors, _, _ = socket.recv_fds(sock, len(_REGISTER) + 1, 1)
    try:
        if not packet:
            raise PeerLost(HUNG_UP)
        if packet != _REGISTER or len(descriptors) != 1:
            raise ProtocolViolation("it registered no segment")
        return Segment.attach(descriptors[0])
    finally:
        close_descriptors(descriptors)


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
        greet=lambda peer: _greet(peer, secret, options),
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
