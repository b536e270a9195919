"""The thread behind a listener: what its end and `close` do to each other."""

from __future__ import annotations

import os
import socket
import threading

from plait_fabric import FabricOptions
from plait_fabric.transport import acceptor
from suites.fabric_channel import WAIT_S


def _never_ends(sock):
    yield


def test_a_listener_whose_thread_ends_first_closes_well(monkeypatch):
    """A client wakes the thread after `close` has begun and before it wakes it: no error."""
    options, ended, write = FabricOptions(), threading.Event(), os.write
    sock = socket.create_server(("127.0.0.1", 0))
    target = sock.getsockname()
    listener = acceptor.Listener(
        sock,
        address="tcp://listener",
        options=options,
        greet=_never_ends,
        on_close=ended.set,
    )

    def overtaken(descriptor: int, data: bytes) -> int:
        with socket.create_connection(target):
            assert ended.wait(WAIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(acceptor.os, "write", overtaken)
    listener.close()
    assert sock.fileno() == -1
