"""How two processes of one host connect: a private unix socket, the handshake, and the exchange of segments.

The socket file has mode 0600 in a folder of mode 0700 that belongs to us, and the kernel vouches
for the peer's user id. A file that a killed listener left behind is recognised (nothing answers)
and replaced.

After the handshake of `greeting.py` the server's last packet carries its segment; the client answers with its own.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from plait_fabric.errors import AddressInUse, AuthFailed, BadAddress, PeerLost, ProtocolViolation, Unreachable
from plait_fabric.memory.segment import closing, map_segment
from plait_fabric.transport.acceptor import Listener
from plait_fabric.transport.greeting import HUNG_UP, PROOF_BYTES, authenticate, introduce, wait_for_bytes
from plait_fabric.transport.shm import ShmChannel, segment_with_ring
from plait_fabric.values import Address, FabricOptions
from plait_fabric.waiting import Deadline

_LONGEST_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes including the final zero (unix(7))."""
_REGISTER = b"PLTSEG\x00\x03"
_CREDENTIALS = struct.Struct("3i")


def connect(address: Address, secret: bytes, options: FabricOptions, deadline: Deadline) -> ShmChannel:
    """Connect and authenticate; see `endpoints.connect`."""
    path = _path_of(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        try:
            sock.connect(str(path))
        except OSError as error:
            raise Unreachable(f"nobody listens at {address}: {error.strerror}") from error
        check = introduce(sock, secret, "shm", deadline)
        incoming = _receive_segment(sock, PROOF_BYTES, check, deadline)
        outgoing = _pass_segment(sock, _REGISTER, options)
        return ShmChannel(control=sock, outgoing=outgoing, incoming=incoming, peer=str(address), options=options)
    except BaseException:
        sock.close()
        raise


def _greet(sock: socket.socket, secret: bytes, options: FabricOptions, deadline: Deadline) -> ShmChannel:
    """Authenticate a client, pass our segment and map the client's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise AuthFailed(f"the peer runs as user {user}")
    outgoing = _pass_segment(sock, authenticate(sock, secret, "shm", deadline), options)
    incoming = _receive_segment(sock, len(_REGISTER), _check_register, deadline)
    return ShmChannel(control=sock, outgoing=outgoing, incoming=incoming, peer="shm client", options=options)


def _pass_segment(sock: socket.socket, packet: bytes, options: FabricOptions) -> memoryview:
    """Send a new segment of ours with the packet, and return it."""
    segment, descriptor = segment_with_ring(options)
    with closing([descriptor]):
        socket.send_fds(sock, [packet], [descriptor])
    return segment


def _receive_segment(
    sock: socket.socket, nbytes: int, check: Callable[[bytes], None], deadline: Deadline
) -> memoryview:
    """Map the segment that comes with a packet. Raises `PeerLost`, `ProtocolViolation`, `ConnectTimeout`, and what
    `check` of the packet raises."""
    wait_for_bytes(sock, deadline)
    packet, descriptors, _, _ = socket.recv_fds(sock, nbytes + 1, 1)
    with closing(descriptors):
        if not packet:
            raise PeerLost(HUNG_UP)
        check(packet)
        if len(descriptors) != 1:
            raise ProtocolViolation("the peer passed no segment")
        return map_segment(descriptors[0])


def _check_register(packet: bytes) -> None:
    if packet != _REGISTER:
        raise ProtocolViolation("it registered no segment")


def listen(address: Address, secret: bytes, options: FabricOptions) -> Listener:
    """Listen; see `endpoints.listen`."""
    path = _path_of(address)
    _make_private_folder(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing([folder]):
            fcntl.flock(folder, fcntl.LOCK_EX)  # or two starting listeners take each other for a leftover
            _remove_leftover(address, path)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(128)
            ours = path.stat().st_ino
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise AddressInUse(f"cannot listen at {address}: {error.strerror}") from error
        raise
    return Listener(
        sock,
        address=str(address),
        options=options,
        greet=lambda peer, deadline: _greet(peer, secret, options, deadline),
        on_close=lambda: _unlink_if_ours(path, ours),
    )


def _path_of(address: Address) -> Path:
    """Return the path of the socket: a name of this process is one in a folder of this process."""
    if address.scheme == "inproc":
        return Path(_own_folder(), hashlib.sha256(os.fsencode(address.target)).hexdigest()[:32])
    path = Path(address.target)
    if not path.is_absolute() or len(os.fsencode(address.target)) > _LONGEST_PATH_BYTES:
        raise BadAddress(f"{address} needs an absolute path of at most {_LONGEST_PATH_BYTES} bytes")
    return path


@cache
def _own_folder() -> str:
    """Return a folder that is removed when this process ends."""
    folder = mkdtemp(prefix="plait-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _make_private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BadAddress(f"cannot use the folder {folder}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise BadAddress(f"the folder {folder} must belong to this user with mode 0700")


def _remove_leftover(address: Address, path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise AddressInUse(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise AddressInUse(f"{address} already has a listener")


def _unlink_if_ours(path: Path, inode: int) -> None:
    with suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()
