"""A `LoraSource` with slow fetches, to prove what is asynchronous without sleeping where an event suffices."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.lora.source import LoraEntry, LoraSource


class DelayedSource:
    """Another source whose fetches take `delay_s` seconds longer, or block until they are released.

    `fetched` lists every fetch that began, in order; `max_at_once` is the max number that ran at the same time.
    """

    def __init__(self, source: LoraSource, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.fetched: list[str] = []
        self.max_at_once = 0
        self._source = source
        self._held: set[str] = set()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    def hold(self, *names: str) -> None:
        """Make fetches of `names` wait for `let_go` from now on."""
        with self._changed:
            self._held.update(names)

    def let_go(self, *names: str) -> None:
        """Let present and future fetches of `names` continue."""
        with self._changed:
            self._held.difference_update(names)
            self._changed.notify_all()

    def wait_fetching(self, count: int, timeout_s: float = 10.0) -> None:
        """Return once `count` fetches have begun. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.fetched) >= count, timeout_s):
                raise TimeoutError(f"{len(self.fetched)} of {count} fetches began within {timeout_s} s")

    def names(self) -> Collection[str]:
        """Return the inner source's names."""
        return self._source.names()

    def find(self, name: str) -> LoraEntry | None:
        """Return the inner source's entry."""
        return self._source.find(name)

    def fetch(self, name: str) -> Path:
        """Fetch from the inner source, later."""
        with self._changed:
            self.fetched.append(name)
            self._running += 1
            self.max_at_once = max(self.max_at_once, self._running)
            self._changed.notify_all()
            try:
                if self.delay_s:
                    self._changed.wait_for(lambda: self._closed, self.delay_s)
                self._changed.wait_for(lambda: self._closed or name not in self._held)
                if self._closed:
                    raise EngineStopped("the source was closed")
            finally:
                self._running -= 1
        return self._source.fetch(name)

    def close(self) -> None:
        """Make every waiting fetch fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.close()
