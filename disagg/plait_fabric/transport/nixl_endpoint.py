"""One end of a one-sided channel: registered memory here, the peer's there, and every call of the NIXL library.

NIXL (`pip install plait[nixl]`) moves bytes over whatever UCX finds: RDMA where the machine has a card, copies between
address spaces (CMA) on one host, else TCP. It makes progress only inside its calls, and only one thread may call an
agent at a time; so each channel has an agent of its own, all calls hold its lock, and whoever waits calls `poll`. Its
own progress thread stays off: where cores are scarce it makes a round trip a thousand times longer (1.5.1, two cores).

Where a peer may write travels as an address and a length. NIXL can also pass on serialised descriptors, but those are
pickles.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from plait_fabric.errors import PeerLost, ProtocolViolation, Unsupported
from plait_fabric.memory.pool import anonymous_memory

_MODULE = "nixl_cu12._api"
_MAGIC = b"PLTNXL\x00\x01"
_HEAD = struct.Struct("!8sIQQ")
DESCRIPTION_HEAD_BYTES = _HEAD.size
MAX_DESCRIPTION_BYTES = 1 << 16
_QUARANTINE_S = 10.0
"""How long memory stays mapped after its channel was closed: between address spaces of one host nothing but the mapping
itself stops a peer that is in the middle of a write, and what is mapped there next would get its bytes."""

_quarantine: deque[tuple[float, mmap.mmap]] = deque()


def load_nixl() -> Any:
    """Import the library. Raises `Unsupported` where it is not installed, or does not run here."""
    raises = logging.raiseExceptions
    try:
        library = importlib.import_module(_MODULE)
    except ImportError as error:
        raise Unsupported(f"nixl:// needs the extra: pip install 'plait[nixl]' ({error})") from error
    logging.raiseExceptions = raises  # the library turns it off for all
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it would tell standard output of every channel
    return library


def description_bytes(head: bytes) -> int:
    """Return how many bytes follow the head of a description. Raises `ProtocolViolation`."""
    magic, length, _, _ = _HEAD.unpack(head)
    if magic != _MAGIC or length > MAX_DESCRIPTION_BYTES:
        raise ProtocolViolation("the peer registered no memory")
    return int(length)


class NixlEndpoint:
    """Memory to send from and memory that the peer writes to, of `nbytes` each. Any thread may call."""

    def __init__(self, nbytes: int, *, transport: str) -> None:
        """Register the memory. `transport`: the only one that UCX may use ("tcp"), "" for the best that it finds.

        Raises `Unsupported`.
        """
        library = load_nixl()
        self._lock = threading.Lock()
        self._outgoing, self.incoming = anonymous_memory(nbytes), anonymous_memory(nbytes)
        """`incoming` is what the peer writes to."""
        self._peer = ""
        self._peer_address = self._peer_bytes = 0
        try:
            agent = library.nixl_agent(
                f"plait-{uuid.uuid4().hex}", library.nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            agent.create_backend("UCX", {"engine_config": f"TLS={transport}"} if transport else {})
            regions = [(_address(it), nbytes, 0, "") for it in (self._outgoing, self.incoming)]
            self._registered = agent.register_memory(regions, "DRAM")
        except Exception as error:  # the library's errors have no common base
            raise Unsupported(
                f"NIXL cannot start with the transport {transport or 'of its choice'}: {error}"
            ) from error
        self._agent: Any = agent

    @property
    def outgoing(self) -> memoryview:
        """The memory to send from, as much of it as the peer has room for at the same place."""
        return memoryview(self._outgoing)[: self._peer_bytes]

    def description(self) -> bytes:
        """Return what the peer needs for `join`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return _HEAD.pack(_MAGIC, len(metadata), _address(self.incoming), len(self.incoming)) + metadata

    def join(self, description: bytes) -> None:
        """Connect to the peer whose description this is. Raises `ProtocolViolation`."""
        _, _, self._peer_address, theirs = _HEAD.unpack_from(description)
        self._peer_bytes = min(theirs, len(self._outgoing))
        name: Any = self._call(lambda agent: agent.add_remote_agent(description[DESCRIPTION_HEAD_BYTES:]))
        self._peer = name.decode() if isinstance(name, bytes) else str(name)
        if not self._peer:
            raise ProtocolViolation("the peer's description names no agent")
        self._call(lambda agent: agent.make_connection(self._peer))

    def write(self, spans: Sequence[tuple[int, int]], note: bytes) -> Iterator[None]:
        """Write spans (offset, length) of our memory to the same places of the peer's, which then gets the note.

        An iterator that ends when that is done: between its steps the caller may wait, and give up. Raises `PeerLost`.
        """
        ours, theirs = _address(self._outgoing), self._peer_address
        handle = self._call(
            lambda agent: agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(ours + at, nbytes, 0) for at, nbytes in spans], "DRAM"),
                agent.get_xfer_descs([(theirs + at, nbytes, 0) for at, nbytes in spans], "DRAM"),
                self._peer,
                note,
            )
        )
        try:
            state = self._call(lambda agent: agent.transfer(handle))
            while state == "PROC":
                yield
                state = self._call(lambda agent: agent.check_xfer_state(handle))
        finally:
            with self._lock, contextlib.suppress(Exception):
                handle.release()
        if state != "DONE":
            raise PeerLost(f"a write to the peer's memory failed ({state})")

    def poll(self) -> list[bytes]:
        """Make progress and return the notes that have arrived."""
        with self._lock:
            if self._agent is None:
                return []
            try:
                arrived: dict[Any, list[bytes]] = self._agent.get_new_notifs()
            except Exception:  # about a peer that is gone, which its socket says as well
                return []
        return [note for notes in arrived.values() for note in notes]

    def tell(self, note: bytes) -> None:
        """Send the peer a note. One that is lost or gone is ignored."""
        with contextlib.suppress(PeerLost):
            self._call(lambda agent: agent.send_notif(self._peer, note))

    def close(self) -> None:
        """Disconnect. The memory stays as long as it is referred to, and for a moment longer. Idempotent."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            with contextlib.suppress(Exception):  # of a peer that is gone
                agent.remove_remote_agent(self._peer)
            with contextlib.suppress(Exception):
                agent.deregister_memory(self._registered)
        now_s = time.monotonic()
        while _quarantine and now_s - _quarantine[0][0] > _QUARANTINE_S:
            _quarantine.popleft()
        _quarantine.append((now_s, self.incoming))

    def _call(self, call: Any) -> Any:
        with self._lock:
            if self._agent is None:
                raise PeerLost("the channel was closed")
            try:
                return call(self._agent)
            except Exception as error:
                raise PeerLost(f"the peer's memory cannot be reached: {error}") from error


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
