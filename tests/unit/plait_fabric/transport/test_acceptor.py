"""The thread behind a listener: what its end and `close` do to each other."""

from __future__ import annotations

import socket
import threading

from plait_fabric import FabricOptions
from plait_fabric.transport.acceptor import Listener
from suites.fabric_channel import WAIT_S


class _Overtaken:
    """A socket whose thread ends before it is woken: a client came first."""

    def __init__(self, sock: socket.socket, ended: threading.Event) -> None:
        self.sock = sock
        self.ended = ended
        self.close = sock.close
        self.raised: OSError | None = None

    def shutdown(self, how: int) -> None:
        with socket.create_connection(self.sock.getsockname()):
            assert self.ended.wait(WAIT_S)
        try:
            self.sock.shutdown(how)
        except OSError as error:
            self.raised = error
            raise


def _never_ends(sock):
    yield


def test_a_listener_whose_thread_ends_first_closes_well():
    """A client wakes the thread after `close` has begun and before it wakes it: no error."""
    options, ended = FabricOptions(), threading.Event()
    sock = socket.create_server(("127.0.0.1", 0))
    listener = Listener(sock, address="tcp://listener", options=options, greet=_never_ends, on_close=ended.set)
    listener._sock = overtaken = _Overtaken(sock, ended)
    listener.close()
    assert sock.fileno() == -1
    assert overtaken.raised is not None
