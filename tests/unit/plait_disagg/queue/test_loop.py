"""The compute thread: batches in order, bounded, isolated, and drained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fakes.queued_item import QueuedItem
from plait_disagg.errors import Busy, RankError, WorkerUnavailable
from plait_disagg.queue.jobs import as_rank_error
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.loop import BatchLoop
from plait_fabric import FrameTooLarge, PeerLost
from plait_kernels.heartbeat import Stuck
from support.waiting import wait_for


class Piece(QueuedItem):
    """An item whose end can be waited for."""

    def __init__(self, rows: int = 1, *, alone: bool = False, gone: bool = False) -> None:
        super().__init__(rows=rows, alone=alone, gone=gone)
        self.ended = threading.Event()

    def fail(self, error: RankError) -> None:
        super().fail(error)
        self.ended.set()


Work = Callable[[list[Piece]], None]
Start = Callable[..., BatchLoop[Piece]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(work, **knobs)`: a loop, which is closed in the end, and then does end."""
    made: list[BatchLoop[Piece]] = []

    def start(
        work: Work,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait_for_room: Callable[[], object] = lambda: None,
        **knobs: Any,
    ) -> BatchLoop[Piece]:
        made.append(BatchLoop(work, name="test", knobs=WorkerKnobs(**knobs), clock=clock, wait_for_room=wait_for_room))
        return made[-1]

    yield start
    for loop in made:
        loop.close()
        assert loop.join(60)


def ending(go: threading.Event, sizes: list[int]) -> Work:
    """Work that ends its items when it may, and notes how many."""

    def work(batch: list[Piece]) -> None:
        assert go.wait(60)
        sizes.append(len(batch))
        for piece in batch:
            piece.ended.set()

    return work


def test_what_was_taken_before_always_finds_room_while_the_loop_is_open(start: Start) -> None:
    """New items do not."""
    go, sizes = threading.Event(), list[int]()
    loop = start(ending(go, sizes), wait_for_room=go.wait, largest_waiting=1)
    loop.put(Piece())
    with pytest.raises(Busy):
        loop.put(Piece())
    loop.put_again(Piece())
    loop.close()
    go.set()
    assert loop.join(60)
    assert sizes == [2]
    loop.put_again(late := Piece())
    assert isinstance(late.error, WorkerUnavailable)


def test_a_lost_device_ends_the_loop(start: Start) -> None:
    """Its process can compute nothing more: who is there is told so, and the worker says that it is dead."""
    tries = []
    go = threading.Event()

    def work(batch: list[Piece]) -> None:
        go.wait(60)
        tries.append(batch)
        raise RuntimeError("CUDA error: unspecified launch failure")

    loop, pieces = start(work), [Piece(), Piece(), Piece()]
    loop.put(pieces[0])
    wait_for(lambda: not loop.waiting)
    for piece in pieces[1:]:
        loop.put(piece)
    go.set()
    assert loop.join(60)
    assert not loop.alive
    assert len(tries) == 1
    assert all(isinstance(piece.error, WorkerUnavailable) for piece in pieces)
    with pytest.raises(WorkerUnavailable):
        loop.put(Piece())


def test_a_batch_that_hangs_is_noticed_and_waiting_is_not(start: Start) -> None:
    """The thread lives, and gets nowhere (finding 9)."""
    ahead_s, go, begun = [0.0], threading.Event(), threading.Event()

    def work(batch: list[Piece]) -> None:
        if batch[0].rows == 2:
            begun.set()
            go.wait(60)
        for piece in batch:
            piece.ended.set()

    def checks_pass(seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            ahead_s[0] += 5.0
            loop.heartbeat.check()

    loop = start(work, clock=lambda: time.monotonic() + ahead_s[0])
    quick, hangs = Piece(1), Piece(2)
    loop.put(quick)
    assert quick.ended.wait(60)
    wait_for(lambda: loop.idle)
    checks_pass(3_600)
    loop.put(hangs)
    assert begun.wait(60)
    with pytest.raises(Stuck, match="a batch of 2 rows has not ended"):
        checks_pass(120)
    go.set()


def test_what_everybody_would_meet_is_not_tried_again(start: Start) -> None:
    """When there is nobody to ask, one attempt for all is enough."""
    attempts = []

    def work(batch: list[Piece]) -> None:
        attempts.append(len(batch))
        raise WorkerUnavailable("nobody there")

    pieces = [Piece(), Piece(), Piece()]
    loop = start(work, batch_wait_ms=1_000.0, largest_batch_rows=3)
    for piece in pieces:
        piece.came_s = time.monotonic() + 60.0
        loop.put(piece)
    assert all(piece.ended.wait(60) for piece in pieces)
    assert attempts == [3]
    assert all(isinstance(piece.error, WorkerUnavailable) for piece in pieces)


def test_what_waits_for_a_loop_that_is_abandoned_fails(start: Start) -> None:
    """And what runs is answered: what was accepted has an end either way."""
    go, running, waiting = threading.Event(), Piece(), Piece()
    loop = start(ending(go, []), largest_batch_rows=1)
    loop.put(running)
    wait_for(lambda: not loop.waiting)
    loop.put(waiting)
    loop.abandon(WorkerUnavailable("stopped"))
    assert not loop.join(0.01)
    go.set()
    assert running.ended.wait(60)
    assert waiting.ended.wait(60)
    assert running.error is None
    assert isinstance(waiting.error, WorkerUnavailable)


def test_knobs_change_between_batches(start: Start) -> None:
    """A smaller batch holds from the next one on."""
    go, sizes = threading.Event(), list[int]()
    loop = start(ending(go, sizes), largest_batch_rows=10)
    pieces = [Piece() for _ in range(5)]
    loop.put(pieces[0])
    wait_for(lambda: not loop.waiting)
    for piece in pieces[1:]:
        loop.put(piece)
    loop.reconfigure(WorkerKnobs(largest_batch_rows=2))
    go.set()
    assert all(piece.ended.wait(60) for piece in pieces)
    assert sizes == [1, 2, 2]


def test_what_came_long_ago_waits_for_nobody(start: Start) -> None:
    """A batch that is not full waits for as long as its oldest item may; by default not at all."""
    go, early = threading.Event(), Piece()
    go.set()
    start(ending(go, []), clock=lambda: 100.0, batch_wait_ms=1_000.0).put(early)
    assert early.ended.wait(60)


def test_where_batches_wait_for_more_none_is_run_at_once(start: Start) -> None:
    """Not even by the thread that brought it: it would never have company."""
    for wait_ms in (0.0, 5.0):
        assert start(lambda batch: None, batch_wait_ms=wait_ms).run_here(Piece()) == (wait_ms == 0.0)


def test_what_is_too_late_is_refused_and_counted(start: Start) -> None:
    """By the loop's own measurements, while a batch runs; when it is idle again, nothing is refused."""
    go = threading.Event()
    loop = start(ending(go, []))
    for _ in range(3):
        loop.pace.saw_batch(1, 500.0)
    running, hopeless, first = Piece(), Piece(), Piece()
    for piece in (hopeless, first):
        piece.came_s, piece.due_s = time.monotonic(), time.monotonic() + 200.0
    loop.put(running)
    wait_for(lambda: not loop.waiting and not loop.idle)  # it is taken a moment before it runs
    with pytest.raises(Busy, match="try again in"):
        loop.put(hopeless)
    assert loop.refused == 1
    go.set()
    assert running.ended.wait(60)
    wait_for(lambda: loop.batches == 1 and not loop.waiting and loop.idle)
    loop.put(first)
    assert first.ended.wait(60)
    assert first.error is None


def test_only_what_does_not_fit_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Any other failure of the fabric is the worker's own, and its log has the details."""
    assert "cannot be passed on" in as_rank_error(FrameTooLarge("9 buffers are over the limit")).message
    assert "internal error (PeerLost)" in as_rank_error(PeerLost("the link was cut")).message
    assert "the link was cut" in caplog.text
