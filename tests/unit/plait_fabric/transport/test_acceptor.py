"""The thread behind a listener: what its end and `close` do to each other."""

from __future__ import annotations

import socket
import time
from typing import Any

from plait_fabric import listen
from suites.fabric_channel import SECRET


def test_a_listener_whose_thread_ends_first_closes_well(monkeypatch):
    """A client wakes the thread after `close` has begun and before it wakes it: no error."""
    listener: Any = listen("tcp://127.0.0.1:0", secret=SECRET)
    port = int(listener.address.rsplit(":", 1)[1])
    told = listener._changed.notify_all

    def overtaken() -> None:
        told()
        with socket.create_connection(("127.0.0.1", port)):
            until_s = time.monotonic() + 10
            while listener._sock.fileno() >= 0 and time.monotonic() < until_s:
                time.sleep(0.005)

    monkeypatch.setattr(listener._changed, "notify_all", overtaken)
    listener.close()
    assert not listener._thread.is_alive()
    assert listener._sock.fileno() == -1
