"""Sends later, on a thread of its own, what a caller that must not wait could not send at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Outbox"]

_LINGER_S = 1.0
"""How long the thread waits for more before it ends: a peer that was slow once may be slow again at once."""


class Outbox:
    """A queue of sends, made in order. Any thread may post; none of them waits for another's send."""

    def __init__(self, *, name: str, on_thread: Callable[[], None] = lambda: None) -> None:
        """Start nothing yet; the thread, when it is needed, first calls `on_thread`."""
        self._name = name
        self._on_thread = on_thread
        self._sends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._posted = 0
        self._is_running = False

    @property
    def is_empty(self) -> bool:
        """Whether everything that was posted has been sent, or has failed."""
        return not self._posted

    def post(self, send: Callable[[], None]) -> None:
        """Have `send` called, which may wait and must not raise."""
        with self._lock:
            self._posted += 1
            self._sends.put(send)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        self._on_thread()
        while True:
            try:
                send = self._sends.get(timeout=_LINGER_S)
            except queue.Empty:
                with self._lock:
                    if not self._posted:
                        self._is_running = False
                        return
                continue
            try:
                send()
            finally:
                with self._lock:
                    self._posted -= 1
