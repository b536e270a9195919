"""Changes to a worker between two of its batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from plait_disagg.errors import WorkerUnavailable
from plait_disagg.tables.errors import OtherVersion

_LOOK_S = 0.01

_AGREE_S = 5.0
"""How long a batch waits for CN and shards to serve one version: a refresh reaches them within milliseconds."""
_AGAIN_S = 0.003


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


def run_agreed(between: BatchBoundary, batch: Callable[[], None], clock: Callable[[], float]) -> None:
    """Run a batch; while shards have other rows than it asks for, run it again, with room for a change in between: who
    must switch may be the CN. Raises `WorkerUnavailable` if they do not agree in time, and what `batch` raises."""
    until_s = clock() + _AGREE_S
    while True:
        try:
            with between.batch():
                batch()
            return
        except OtherVersion as error:
            if clock() > until_s:
                raise WorkerUnavailable(f"a refresh is on its way: {error}", retry_after_s=1.0) from error
        time.sleep(_AGAIN_S)
