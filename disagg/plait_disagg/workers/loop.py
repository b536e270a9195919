"""The compute thread of a worker: it takes what waits, makes a batch of it, and runs it.

First come, first served. A batch that fails is run again one item at a time: a fault hurts only its own request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

import torch

from plait_disagg.threads import set_threads
from plait_disagg.workers.errors import Busy, RankError, Unavailable
from plait_disagg.workers.jobs import as_rank_error
from plait_disagg.workers.knobs import WorkerKnobs

__all__ = ["MOST_ITEMS", "ComputeLoop", "Inbox", "Item"]

_log = logging.getLogger(__name__)

MOST_ITEMS = 1_024
"""Of one batch, so that the numbers of a batch fit a message's header."""


class Item(Protocol):
    """What a batch is made of."""

    @property
    def rows(self) -> int:
        """How much of a batch it fills."""

    @property
    def alone(self) -> bool:
        """Whether it must not share a batch."""

    def dropped(self, now_s: float) -> bool:
        """Whether it needs no work any more."""

    def fail(self, error: RankError) -> None:
        """Tells whoever waits for it."""


T = TypeVar("T", bound=Item)


class Inbox(Generic[T]):
    """A bounded queue: any thread puts, one thread takes batches."""

    def __init__(self, *, largest_waiting: int) -> None:
        self.largest_waiting = largest_waiting
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._pending: deque[T] = deque()  # the taker's own
        self._closing = threading.Lock()
        self._closed = False
        self._ended = False

    def __len__(self) -> int:
        return self._queue.qsize() + len(self._pending)

    def put(self, item: T) -> None:
        """Raises `Busy` when too many wait, `Unavailable` after `close`."""
        if len(self) >= self.largest_waiting:
            raise Busy(f"{self.largest_waiting} requests are waiting already")
        with self._closing:
            if self._closed:
                raise Unavailable("the worker is stopping")
            self._queue.put(item)

    def put_again(self, item: T) -> bool:
        """An item that was taken before: it always finds room; False after `close`."""
        with self._closing:
            if not self._closed:
                self._queue.put(item)
            return not self._closed

    def close(self) -> None:
        """No more items; what is there can still be taken."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def take(self, largest_rows: int, now_s: Callable[[], float]) -> list[T] | None:
        """Waits for items and takes a batch, which is empty if none of them needs work; None after the last one."""
        self._gather()
        batch: list[T] = []
        rows, taken_s = 0, now_s()
        while self._pending and len(batch) < MOST_ITEMS:
            item = self._pending[0]
            if item.dropped(taken_s):
                self._pending.popleft()
                continue
            if batch and (rows + item.rows > largest_rows or item.alone):
                break
            batch.append(self._pending.popleft())
            rows += item.rows
            if item.alone:
                break
        return batch if batch or self._pending or not self._ended else None

    def _gather(self) -> None:
        """Moves what has arrived to the taker's side; waits if there is nothing at all."""
        try:
            while True:
                item = self._queue.get(block=not (self._pending or self._ended))
                if item is None:
                    self._ended = True
                else:
                    self._pending.append(item)
        except Empty:
            return


class ComputeLoop(Generic[T]):
    """One thread that runs ``work`` on batches. ``work`` tells the outcomes itself, or raises before it told any.

    ``wait_for_room`` is called before each batch is taken and may wait: what arrives meanwhile joins the batch.
    """

    def __init__(
        self,
        work: Callable[[list[T]], None],
        *,
        name: str,
        knobs: WorkerKnobs,
        clock: Callable[[], float],
        wait_for_room: Callable[[], None] | None = None,
    ) -> None:
        """Starts at once."""
        self._work = work
        self._name = name
        self._knobs = knobs
        self._clock = clock
        self._wait_for_room = wait_for_room
        self._inbox: Inbox[T] = Inbox(largest_waiting=knobs.largest_waiting)
        self._abandoned: RankError | None = None
        self.batches = self.items = self.rows = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Items that wait for a batch."""
        return len(self._inbox)

    def put(self, item: T) -> None:
        """See `Inbox.put`."""
        self._inbox.put(item)

    def put_again(self, item: T) -> None:
        """See `Inbox.put_again`; fails the item if nobody would take it."""
        if not self._inbox.put_again(item):
            item.fail(Unavailable("the worker is stopping"))

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Holds from the next batch on."""
        self._knobs = knobs
        self._inbox.largest_waiting = knobs.largest_waiting

    def close(self) -> None:
        """Refuses new items; those that wait are still worked on."""
        self._inbox.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until the last item was worked on; whether that was reached. Call `close` first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self, error: RankError) -> None:
        """Closes, and fails what waits as soon as the batch that runs now is done."""
        self._abandoned = error
        self._inbox.close()

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._serve()
        except Exception:
            _log.exception("%s: the compute thread died", self._name)

    def _serve(self) -> None:
        threads = -1
        while True:
            if self._wait_for_room is not None:
                self._wait_for_room()
            batch = self._inbox.take(self._knobs.largest_batch_rows, self._clock)
            if batch is None:
                return
            if self._knobs.threads != threads:  # after the wait: a change holds from the next batch on
                threads = self._knobs.threads
                set_threads(threads)
            if self._abandoned is not None:
                for item in batch:
                    item.fail(self._abandoned)
            elif batch:
                self._count(batch)
                self._attempt(batch)

    def _count(self, batch: list[T]) -> None:
        self.batches += 1
        self.items += len(batch)
        self.rows += sum(item.rows for item in batch)

    def _attempt(self, batch: list[T]) -> None:
        try:
            self._work(batch)
        except Exception as error:
            if len(batch) == 1 or isinstance(error, Unavailable | Busy):  # more tries would meet the same
                known = as_rank_error(error)
                for item in batch:
                    item.fail(known)
                return
            for item in batch:
                self._attempt([item])
