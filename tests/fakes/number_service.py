"""A workload of the fabric's request and reply layer: numbers go there, numbers come back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plait_fabric import Message, listen, new_secret
from plait_fabric.rpc import fields
from plait_fabric.rpc.server import Peer, Server, ServerProtocol

SECRET = new_secret()
VERSION = 7
WAIT_S = 60.0


@dataclass(eq=False)
class Numbers:
    """A server whose questions a test answers itself, or that answers each with twice its value."""

    server: Server
    asked: queue.SimpleQueue[tuple[Peer, int, int]]
    lost: queue.SimpleQueue[Peer]

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.server.addresses[0]

    def stop(self, flush_s: float = 0.0) -> None:
        """Nobody new; everybody leaves."""
        self.server.close_listeners()
        self.server.hang_up(flush_s)


@contextmanager
def serving(address: str, *, doubles: bool = True, **options: Any) -> Iterator[Numbers]:
    """A service of numbers in this process; ``options`` as for `ServerProtocol`."""
    asked: queue.SimpleQueue[tuple[Peer, int, int]] = queue.SimpleQueue()
    lost: queue.SimpleQueue[Peer] = queue.SimpleQueue()

    def on_message(peer: Peer, message: Message) -> None:
        with message:
            number, value = (fields.integer(message.header, name) for name in ("number", "value"))
        if doubles:
            peer.send({"number": number, "value": 2 * value})
        else:
            asked.put((peer, number, value))

    options = {"version": VERSION, "send_timeout_s": 1.0} | options
    protocol = ServerProtocol(
        on_hello=lambda _: None,
        welcome=dict,
        on_message=options.pop("on_message", on_message),
        on_lost=lost.put,
        **options,
    )
    made = Numbers(Server(protocol, [listen(address, secret=SECRET)], name="numbers"), asked, lost)
    try:
        yield made
    finally:
        made.stop()
