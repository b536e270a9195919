"""The thread behind a listener: what its end and `close` do to each other."""

from __future__ import annotations

import os
import socket
import threading

from plait_fabric import FabricOptions
from plait_fabric.transport import acceptor
from plait_fabric.transport.tcp import TcpArrival
from suites.fabric_channel import SECRET, WAIT_S


def test_a_listener_whose_thread_ends_first_closes_well(monkeypatch):
    """A client wakes the thread after `close` has begun and before it wakes it: no error."""
    options, ended, write = FabricOptions(), threading.Event(), os.write
    sock = socket.create_server(("127.0.0.1", 0))
    target = sock.getsockname()
    listener = acceptor.SocketListener(
        sock,
        address="tcp://listener",
        options=options,
        arrive=lambda peer: TcpArrival(peer, SECRET, options),
        on_close=ended.set,
    )

    def overtaken(descriptor: int, data: bytes) -> int:
        with socket.create_connection(target):
            assert ended.wait(WAIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(acceptor.os, "write", overtaken)
    listener.close()
    assert sock.fileno() == -1
