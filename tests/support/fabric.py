"""Places to listen, replicas to connect to, and a listener whose connections a test can see and cut."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from plait_fabric import Channel, FabricError, Listener, connect
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink

_numbers = itertools.count()


def new_address(scheme: str, folder: Path) -> str:
    """Return somewhere to listen that nobody else does: a name, a socket in a private folder, or any free port."""
    number = next(_numbers)
    place = {"inproc": f"{folder.name}-{number}", "shm": f"{folder}/{number}"}.get(scheme, "127.0.0.1:0")
    return f"{scheme}://{place}"


class Replicas:
    """Replicas by name: where each listens. A test takes one away by removing it, or by stopping what listens there.

    ``asked``: whom `connect` was to leave out, each time, and ``asked_s`` when; ``links``: what it opened.
    """

    def __init__(self, addresses: Mapping[str, str] | None = None, *, secret: bytes, **options: Any) -> None:
        self.addresses = dict(addresses or {})
        self.asked: list[frozenset[str]] = []
        self.asked_s: list[float] = []
        self.links: list[ReplicaLink] = []
        self._secret, self._options = secret, options

    def connect(self, left_out: frozenset[str]) -> ReplicaLink:
        """A channel to the first that can be reached (`Connect`)."""
        self.asked_s.append(time.monotonic())
        self.asked.append(left_out)
        whys = []
        for name, address in list(self.addresses.items()):
            if name not in left_out:
                try:
                    channel = connect(address, secret=self._secret, **self._options)
                except FabricError as error:
                    whys.append(f"{name}: {error}")
                else:
                    self.links.append(ReplicaLink(replica=name, channel=channel))
                    return self.links[-1]
        raise NoReplica("; ".join(whys) or "there is no other")


class CutListener:
    """Passes on what `listener` accepts; `channels` are all that it accepted so far."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.channels: list[Channel] = []

    @property
    def address(self) -> str:
        """The address to connect to."""
        return self._listener.address

    @property
    def rejected(self) -> int:
        """Connections dropped so far."""
        return self._listener.rejected

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Wait for the next peer."""
        channel = self._listener.accept(timeout_s)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def cut(self) -> None:
        """Stop listening and close every channel, as the end of its process would."""
        self.close()
        for channel in list(self.channels):
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
