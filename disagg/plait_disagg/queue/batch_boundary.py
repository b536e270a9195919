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
    """One thread runs batches, others make changes, never at once.

    A change that comes while a batch runs is made by the thread of the batches, before its next one: a worker whose
    batches follow each other without a pause would not let another thread in.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """No change is made inside."""
        with self._turn:
            self._make()
            yield

    def change(self, make: Callable[[], None]) -> None:
        """Calls ``make``, on this thread or that of the batches, and waits for it; raises what it raises."""
        made: Future[None] = Future()
        self._waiting.append((make, made))
        while not made.done():
            if self._turn.acquire(timeout=_LOOK_S):
                try:
                    self._make()
                finally:
                    self._turn.release()
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
