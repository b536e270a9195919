"""The compute thread: batches in order, bounded, isolated, and drained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fakes.queued_item import QueuedItem
from plait_disagg.errors import Busy, RankError, WorkerUnavailable
from plait_disagg.queue.jobs import as_rank_error
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.loop import BatchLoop, Inbox
from plait_disagg.queue.pace import Pace
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


def _inbox(**knobs: Any) -> Inbox[Piece]:
    return Inbox(WorkerKnobs(**knobs), Pace(), time.monotonic)


def _loop(work: Callable[[list[Piece]], None], **knobs: Any) -> BatchLoop[Piece]:
    return BatchLoop(work, name="test", knobs=WorkerKnobs(**knobs), clock=time.monotonic)


def test_batches_keep_the_order_and_the_bound() -> None:
    """As many rows as allowed, first come first served; what is too large, or must be alone, runs alone."""
    inbox = _inbox(largest_batch_rows=7)
    pieces = [Piece(3), Piece(3), Piece(3), Piece(50), Piece(1), Piece(2, alone=True), Piece(1), Piece(9, gone=True)]
    for piece in pieces:
        inbox.put(piece)
    batches = []
    while len(inbox):
        batches.append(inbox.take())
    assert batches == [pieces[:2], [pieces[2]], [pieces[3]], [pieces[4]], [pieces[5]], [pieces[6]]]
    inbox.close()
    assert inbox.take() is None


def test_a_full_inbox_is_busy_and_a_closed_one_unavailable() -> None:
    """New items are refused; one that was taken before always finds room while it is open."""
    inbox = _inbox(largest_waiting=2)
    inbox.put(Piece())
    inbox.put(Piece())
    with pytest.raises(Busy):
        inbox.put(Piece())
    assert inbox.put_again(Piece())
    inbox.close()
    inbox.close()
    taken = inbox.take()
    assert taken is not None
    assert len(taken) == 3
    with pytest.raises(WorkerUnavailable):
        inbox.put(Piece())
    assert not inbox.put_again(Piece())


def test_a_lost_device_ends_the_loop() -> None:
    """Its process can compute nothing more: who is there is told so, and the worker says that it is dead."""
    tries = []
    go = threading.Event()

    def work(batch: list[Piece]) -> None:
        go.wait(60)
        tries.append(batch)
        raise RuntimeError("CUDA error: unspecified launch failure")

    loop, pieces = _loop(work), [Piece(), Piece(), Piece()]
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


def test_a_batch_that_hangs_is_noticed_and_waiting_is_not() -> None:
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

    loop = BatchLoop(work, name="test", knobs=WorkerKnobs(), clock=lambda: time.monotonic() + ahead_s[0])
    try:
        quick, hangs = Piece(1), Piece(2)
        loop.put(quick)
        assert quick.ended.wait(60)
        wait_for(lambda: loop.idle)
        checks_pass(3_600)
        loop.put(hangs)
        assert begun.wait(60)
        with pytest.raises(Stuck, match="a batch of 2 rows has not ended"):
            checks_pass(120)
    finally:
        go.set()
        loop.close()
    assert loop.join(60)


def test_what_everybody_would_meet_is_not_tried_again() -> None:
    """When there is nobody to ask, one attempt for all is enough."""
    attempts = []

    def work(batch: list[Piece]) -> None:
        attempts.append(len(batch))
        raise WorkerUnavailable("nobody there")

    pieces = [Piece(), Piece(), Piece()]
    room = threading.Event()
    loop: BatchLoop[Piece] = BatchLoop(
        work, name="test", knobs=WorkerKnobs(), clock=time.monotonic, wait_for_room=lambda: _wait(room)
    )
    for piece in pieces:
        loop.put(piece)
    room.set()
    assert all(piece.ended.wait(60) for piece in pieces)
    assert attempts == [3]
    assert all(isinstance(piece.error, WorkerUnavailable) for piece in pieces)
    loop.close()
    assert loop.join(60)


def test_closing_works_off_what_waits_and_abandoning_fails_it() -> None:
    """Items that were accepted are answered either way."""
    go = threading.Event()

    def work(batch: list[Piece]) -> None:
        _wait(go)
        for piece in batch:
            piece.ended.set()

    for abandon in (False, True):
        go.clear()
        loop = _loop(work, largest_batch_rows=1)
        running, waiting = Piece(), Piece()
        loop.put(running)
        wait_for(lambda loop=loop: not loop.waiting)  # type: ignore[misc]
        loop.put(waiting)
        loop.close()
        assert not loop.join(0.01)
        if abandon:
            loop.abandon(WorkerUnavailable("stopped"))
        go.set()
        assert loop.join(60)
        assert running.ended.is_set()
        assert waiting.ended.is_set()
        assert running.error is None
        assert isinstance(waiting.error, WorkerUnavailable) is abandon


def test_knobs_change_between_batches() -> None:
    """A smaller batch holds from the next one on."""
    sizes: list[int] = []
    go = threading.Event()

    def work(batch: list[Piece]) -> None:
        _wait(go)
        sizes.append(len(batch))
        for piece in batch:
            piece.ended.set()

    loop = _loop(work, largest_batch_rows=10)
    pieces = [Piece() for _ in range(5)]
    loop.put(pieces[0])
    wait_for(lambda: not loop.waiting)
    for piece in pieces[1:]:
        loop.put(piece)
    loop.reconfigure(WorkerKnobs(largest_batch_rows=2))
    go.set()
    assert all(piece.ended.wait(60) for piece in pieces)
    assert sizes == [1, 2, 2]
    loop.close()
    assert loop.join(60)


def test_a_batch_that_is_not_full_waits_for_more() -> None:
    """For as long as its oldest item may wait, or until it is full; by default not at all."""
    inbox = _inbox(batch_wait_ms=1_000.0, largest_batch_rows=3)
    pieces = [Piece() for _ in range(3)]
    taken: list[list[Piece] | None] = []
    taker = threading.Thread(target=lambda: taken.append(inbox.take()))
    pieces[0].came_s = pieces[1].came_s = pieces[2].came_s = time.monotonic() + 60.0
    inbox.put(pieces[0])
    taker.start()
    inbox.put(pieces[1])
    assert not taken
    inbox.put(pieces[2])
    taker.join(60)
    assert taken == [pieces]
    early = Piece()  # it came long ago
    inbox.put(early)
    assert inbox.take() == [early]


def test_where_batches_wait_for_more_none_is_run_at_once() -> None:
    """Not even by the thread that brought it: it would never have company."""
    for wait_ms in (0.0, 5.0):
        loop = _loop(lambda batch: None, batch_wait_ms=wait_ms)
        assert loop.run_here(Piece()) == (wait_ms == 0.0)
        loop.close()
        assert loop.join(60)


def test_what_is_too_late_is_refused_and_counted() -> None:
    """By the loop's own measurements, while a batch runs; when it is idle again, nothing is refused."""
    go = threading.Event()

    def work(batch: list[Piece]) -> None:
        _wait(go)
        for piece in batch:
            piece.ended.set()

    loop = _loop(work)
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
    loop.close()
    assert loop.join(60)


@pytest.mark.parametrize(
    "bad",
    [
        {"threads": -1},
        {"cores": (-1,)},
        {"window": 0},
        {"largest_batch_rows": 0},
        {"order": "lifo"},
        {"batch_wait_ms": -1.0},
        {"wire": "float8"},
        {"cache_rows": -1},
        {"cache": "fifo"},
    ],
)
def test_knobs_that_can_not_be_are_refused(bad: dict[str, Any]) -> None:
    """When they are made, not when they are used."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        WorkerKnobs(**bad)


def test_only_what_does_not_fit_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Any other failure of the fabric is the worker's own, and its log has the details."""
    assert "cannot be passed on" in as_rank_error(FrameTooLarge("9 buffers are over the limit")).message
    assert "internal error (PeerLost)" in as_rank_error(PeerLost("the link was cut")).message
    assert "the link was cut" in caplog.text


def _wait(event: threading.Event) -> None:
    assert event.wait(60)
