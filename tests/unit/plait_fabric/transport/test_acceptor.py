"""A listener in a process that may have no more threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from plait_fabric.endpoints import connect, listen
from plait_fabric.errors import FabricError
from plait_fabric.transport import acceptor

SECRET = b"s" * 32


def test_a_connection_that_gets_no_thread_is_dropped_and_the_next_is_not(monkeypatch):
    """What `start` raises then ends that connection alone."""
    refused = []

    class Scarce(threading.Thread):
        def start(self) -> None:
            if self.name.endswith("greeting") and not refused:
                refused.append(self.name)
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(acceptor, "threading", SimpleNamespace(Thread=Scarce, Condition=threading.Condition))
    with listen("tcp://127.0.0.1:0", secret=SECRET) as listener:
        with pytest.raises(FabricError):
            connect(listener.address, secret=SECRET)
        assert (len(refused), listener.rejected) == (1, 1)
        with connect(listener.address, secret=SECRET), listener.accept(60.0):
            assert listener.rejected == 1
