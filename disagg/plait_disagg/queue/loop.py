"""The compute thread of a worker: it takes what is waiting, makes a batch of it, and runs it.

`order.py` decides who is next, rejected or given up. A batch that fails is run again one item at a time, so that a
fault affects only its own request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

from plait_disagg.errors import Busy, RankError, WorkerUnavailable
from plait_disagg.queue.jobs import as_rank_error
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.order import Downstream, Item, WaitQueue, too_late
from plait_disagg.queue.pace import Pace
from plait_disagg.request_log import on_behalf_of
from plait_kernels.devices import is_device_lost
from plait_kernels.heartbeat import ThreadHeartbeat
from plait_kernels.threads import pin_to_cores, set_threads

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=Item)


class BatchLoop(Generic[T]):
    """`WaitQueue` between threads: any thread puts, one takes batches and runs `work` on them. `work` reports the
    outcomes itself, or raises before it reported any.

    `wait_for_room` is called before each batch is taken and may wait: what arrives meanwhile joins the batch.
    `downstream` looks at where batches go from here. `refuses`: see `WaitQueue`.
    """

    def __init__(
        self,
        work: Callable[[list[T]], None],
        *,
        name: str,
        knobs: WorkerKnobs,
        clock: Callable[[], float],
        wait_for_room: Callable[[], object] = lambda: None,
        downstream: Callable[[], Downstream] = Downstream,
        refuses: bool = True,
    ) -> None:
        """Start the thread at once."""
        self._work = work
        self._name = name
        self._clock = clock
        self._wait_for_room = wait_for_room
        self._downstream = downstream
        self.pace = Pace()
        self._waiting: WaitQueue[T] = WaitQueue(knobs, self.pace, refuses=refuses)
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self.heartbeat = ThreadHeartbeat(clock)
        self._batch_lock = threading.Lock()
        self._abandoned: RankError | None = None
        self.batches = self.items = self.rows = self.refused = 0
        self.queued_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Items that are waiting for a batch."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting and nothing is running."""
        return self._waiting.idle

    def put(self, item: T) -> None:
        """Add an item.

        Raises `Busy` if too many are waiting or it would be answered too late, `WorkerUnavailable` after `close`.
        """
        with self._changed:
            if self._closed:
                raise WorkerUnavailable("the worker is stopping")
            try:
                self._waiting.check(item, self._clock(), busy_downstream=bool(self._downstream().open))
            except Busy:
                self.refused += 1
                raise
            self._waiting.add(item)
            self._changed.notify()

    def put_again(self, item: T) -> None:
        """Put back an item that was taken before: there is always room for it. After `close` fail it."""
        with self._changed:
            if not self._closed:
                self._waiting.add(item)
                self._changed.notify()
                return
        item.fail(WorkerUnavailable("the worker is stopping"))

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Apply new knobs from the next item, and the next batch, on; waiting items keep their place."""
        with self._changed:
            self._waiting.knobs = knobs

    def close(self) -> None:
        """Accept no more items; those already there can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def saw_given_up(self, items: Iterable[T]) -> None:
        """Record items on which the work was wasted: they were too late, here or downstream."""
        for item in items:
            if not item.gone:
                self.pace.saw_end(in_time=False)

    def saw_ends(self, items: Iterable[T]) -> None:
        """Record items that were processed, here and downstream.

        Items whose deadline has passed make `WaitQueue` more careful, those in time less; an item that was cancelled
        before its deadline counts as neither.
        """
        now_s = self._clock()
        for item in items:
            if item.due_s is not None and (now_s > item.due_s or not item.gone):
                self.pace.saw_end(in_time=now_s <= item.due_s)

    def run_here(self, item: T) -> bool:
        """Process the item on the calling thread if nothing else is waiting or running; return False if it was not
        processed.

        Only if the work is single-threaded, since a second thread that computes with a team would slow down both, and
        if batches do not wait for more.
        """
        knobs = self._waiting.knobs
        if knobs.threads != 1 or knobs.cores or knobs.batch_wait_ms or not self._batch_lock.acquire(blocking=False):
            return False
        try:
            if not self.idle or self._closed:
                return False
            with torch.inference_mode():
                self._run_batch([item], 0.0)
            return True
        finally:
            self._batch_lock.release()

    def join(self, timeout_s: float) -> bool:
        """Wait until the last item has been processed; return whether it was. Call `close` first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abandon(self, error: RankError) -> None:
        """Close, and fail what is waiting as soon as the running batch is done."""
        self._abandoned = error
        self.close()

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._serve()
        except Exception:
            _log.exception("%s: the compute thread died", self._name)

    def _serve(self) -> None:
        threads, cores = -1, tuple[int, ...]()
        free_s = 0.0  # since when it could have taken the next batch, if one waited
        while True:
            self._wait_for_room()
            batch = self._take()
            if batch is None:
                return
            knobs = self._waiting.knobs  # after the wait: a change holds from the next batch on
            if (knobs.threads, knobs.cores) != (threads, cores):
                threads, cores = knobs.threads, knobs.cores
                pin_to_cores(cores)
                set_threads(threads)
            if self._abandoned is not None:
                for item in batch:
                    item.fail(self._abandoned)
            elif batch:
                with self._batch_lock:
                    free_s = self._run_batch(batch, free_s)

    def _take(self) -> list[T] | None:
        """Wait for items and take a batch, empty if none of them needs work; return None after the last one."""
        with self._changed:
            while (wait_s := self._wait_s()) != 0:
                self._changed.wait(wait_s)
            taken = self._waiting.take(self._clock(), self._downstream()) if len(self._waiting) else None
        if taken is None:
            return None
        self.saw_given_up(taken.late)
        for item in taken.late:
            item.fail(too_late(item, self._clock()))
        return taken.batch

    def _wait_s(self) -> float | None:
        """Return how long to wait for more items: 0 for not at all, None until the first arrives. Needs the lock."""
        waiting = self._waiting
        if self._closed:
            return 0
        if not len(waiting):
            return None
        if not waiting.knobs.batch_wait_ms or waiting.rows >= waiting.knobs.largest_batch_rows:
            return 0
        return max(0.0, waiting.begins_s - self._clock())

    def _run_batch(self, batch: list[T], free_s: float) -> float:
        """Return when the next batch could be taken if one is already waiting, otherwise 0.

        A batch occupies the worker from when it could have been taken, so that waiting for room at an HN counts.
        """
        taken_s = self._clock()
        rows = sum(item.rows for item in batch)
        self.batches += 1
        self.items += len(batch)
        self.rows += rows
        self.queued_s += sum(taken_s - item.came_s for item in batch)
        expected_s = self.pace.batch_s(rows)
        self._waiting.busy_until_s = taken_s + expected_s
        self.heartbeat.begin(f"a batch of {rows} rows", expected_s or None)
        try:
            self._attempt(batch)
        finally:
            self.heartbeat.rest()
        ended_s = self._clock()
        self.pace.saw_batch(rows, ended_s - (free_s or taken_s))
        if self.waiting:
            return ended_s
        self._waiting.busy_until_s = 0.0
        return 0.0

    def _attempt(self, batch: list[T]) -> None:
        with on_behalf_of(lambda: (each for item in batch for each in item.request_ids)):
            try:
                self._work(batch)
            except Exception as error:
                if is_device_lost(error):
                    _log.exception("%s: the device is lost, and this worker with it", self._name)
                    self.abandon(WorkerUnavailable("the device failed"))
                if self._abandoned is not None or len(batch) == 1 or isinstance(error, WorkerUnavailable | Busy):
                    known = self._abandoned or as_rank_error(error)  # more tries would meet the same
                    for item in batch:
                        item.fail(known)
                    return
                for item in batch:
                    self._attempt([item])
