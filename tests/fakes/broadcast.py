"""Serve's handle of a deployment, as far as it asks all replicas at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest


class BroadcastHandle:
    """A handle whose replicas answer `method` with what a test sets; an exception in place of all answers is raised.
    While `gate` is closed nobody answers in time."""

    def __init__(self, method: str, *answers: Any) -> None:
        self.method = method
        self.answers: Any = answers
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()

    def broadcast(self, method: str) -> BroadcastHandle:
        """What Serve's handle does."""
        assert method == self.method
        self.calls += 1
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> Any:
        """Waits on a thread; where a loop runs, Serve's own refuses to."""
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        assert return_exceptions
        self.waited_s = timeout_s
        self.gate.wait(timeout_s)
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers
