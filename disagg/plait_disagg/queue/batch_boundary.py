"""Changes to a worker between two of its batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

__all__ = ["BatchBoundary"]

_LOOK_S = 0.01


class BatchBoundary:
    """A guard between one thread that runs batches and others that make changes: the two never overlap.

    A change that arrives while a batch runs is made by the batch thread, before its next batch: a worker whose
    batches follow each other without a pause would never let another thread in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold off changes while a batch runs inside."""
        with self._lock:
            self._make()
            yield

    def change(self, make: Callable[[], None]) -> None:
        """Call `make`, on this thread or the batch thread, and wait for it; raise what it raises."""
        made: Future[None] = Future()
        self._waiting.append((make, made))
        while not made.done():
            if self._lock.acquire(timeout=_LOOK_S):
                try:
                    self._make()
                finally:
                    self._lock.release()
        made.result()

    def _make(self) -> None:
        while self._waiting:
            make, made = self._waiting.popleft()
            try:
                make()
            except BaseException as error:
                made.set_exception(error)
            else:
                made.set_result(None)
