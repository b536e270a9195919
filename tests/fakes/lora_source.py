"""A `LoraSource` with fetches that a test holds, to prove what is asynchronous without sleeping."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.lora.source import LoraEntry, LoraSource


class DelayedSource:
    """Another source whose fetches block until they are released.

    `fetched` lists every fetch that began, in order.
    """

    def __init__(self, source: LoraSource) -> None:
        self.fetched: list[str] = []
        self._source = source
        self._held: set[str] = set()
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
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or name not in self._held)
            if self._closed:
                raise EngineStopped("the source was closed")
        return self._source.fetch(name)

    def close(self) -> None:
        """Make every waiting fetch fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.close()
