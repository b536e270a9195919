"""Who is next, who is refused, who is given up: the queue of a worker in virtual time."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest

from fakes.queued_item import QueuedItem
from plait_disagg.errors import Busy, DeadlinePassed
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.order import PATIENCE_S, Downstream, WaitQueue, too_late
from plait_disagg.queue.pace import Pace

DEADLINE_S = 0.05


def good_ones(knobs, *, rate_per_s, fixed_s, row_s, rows, seconds, later_s=0.0) -> int:
    """Serves ``seconds`` of arrivals and counts those that were answered by their deadline. A batch takes ``fixed_s +
    rows * row_s``, times 1 to 1.5. Answers are there up to ``later_s`` after it, which nobody forecasts."""
    chance, pace, good = random.Random(0), Pace(), 0
    waiting: WaitQueue[QueuedItem] = WaitQueue(knobs, pace)
    coming, moment_s = deque[QueuedItem](), chance.expovariate(rate_per_s)
    while moment_s < seconds:
        coming.append(QueuedItem(rows=rows, came_s=moment_s, due_s=moment_s + DEADLINE_S))
        moment_s += chance.expovariate(rate_per_s)
    now_s, batch, began_s = 0.0, [], 0.0
    while coming or batch or len(waiting):
        if not batch and len(waiting):
            batch, began_s = waiting.take(now_s).batch, now_s
            if batch:
                total = sum(it.rows for it in batch)
                waiting.busy_until_s = now_s + pace.batch_s(total)
                ends_s = now_s + (fixed_s + total * row_s) * (1 + 0.5 * chance.random())
        elif batch and (not coming or ends_s <= coming[0].came_s):
            now_s = ends_s
            pace.saw_batch(sum(it.rows for it in batch), now_s - began_s)
            for it in batch:
                in_time = now_s + later_s * chance.random() <= it.came_s + DEADLINE_S
                pace.saw_end(in_time=in_time)
                good += in_time
            batch, waiting.busy_until_s = [], 0.0
        else:
            piece = coming.popleft()
            now_s = piece.came_s
            with suppress(Busy):
                waiting.check(piece, now_s)
                waiting.add(piece)
    return good


OFF = WorkerKnobs(order="arrival", refuse_late=False, largest_batch_rows=512)
ON = WorkerKnobs(largest_batch_rows=512)


def _waiting(pace: Pace | None = None, **knobs: object) -> WaitQueue[QueuedItem]:
    return WaitQueue(WorkerKnobs(**knobs), pace or Pace())  # type: ignore[arg-type]


def _pace(batch_s: float) -> Pace:
    """Of a worker whose batches all take so long."""
    pace = Pace()
    pace.saw_batch(1, batch_s)
    return pace


@pytest.mark.parametrize(
    ("own_s", "after_s", "threads", "idle", "room", "sizes"),
    [
        (0.001, 1.0, 1, 2, 8, [3, 3]),
        (0.001, 1.0, 1, 9, 36, [1, 1, 1, 1, 1, 1]),
        (0.001, 1.0, 1, 1, 4, [6]),
        (0.001, 0.0015, 1, 9, 36, [6]),
        (0.01, 0.01, 1, 1, 4, [3, 3]),
        (0.01, 0.001, 1, 1, 4, [6]),
        (0.0, 0.01, 1, 1, 4, [6]),
        (0.01, 0.01, 2, 1, 4, [6]),
        (0.01, 0.01, 1, 1, 1, [6]),
    ],
    ids=[
        "two", "many", "one", "slow-to-hand-out", "both-long", "short-there", "unknown", "threads", "window",
    ],
)  # fmt: skip
def test_what_waits_is_shared_out_among_those_who_could_work(own_s, after_s, threads, idle, room, sizes) -> None:
    """Half each for two, in order; a request is never cut, and more workers than requests get one each. For an only
    idle worker one half is made ready while the other is worked on, if both sides have enough to do."""
    pace = _pace(own_s) if own_s else Pace()
    pace.after_s = after_s
    waiting, pieces = _waiting(pace, threads=threads), [QueuedItem(came_s=0.1 * n, rows=10) for n in range(6)]
    for piece in pieces:
        waiting.add(piece)
    batches: list[list[QueuedItem]] = []
    while len(waiting):
        sent = len(batches)
        batches.append(waiting.take(1.0, Downstream(idle=max(0, idle - sent), open=sent, room=room - sent)).batch)
    assert [len(batch) for batch in batches] == sizes
    assert [piece for batch in batches for piece in batch] == pieces


@pytest.mark.parametrize(("knobs", "order"), [({}, [3, 1, 4, 0, 2]), ({"order": "arrival"}, [0, 1, 2, 3, 4])])
def test_the_most_urgent_go_first_and_arrival_decides_among_equals(knobs: dict[str, str], order: list[int]) -> None:
    """Requests without a deadline come after those that are in a hurry, in their own order. A knob gives back first
    come, first served."""
    waiting = _waiting(largest_batch_rows=1, **knobs)
    pieces = [
        QueuedItem(came_s=0.0),
        QueuedItem(came_s=0.1, due_s=0.9),
        QueuedItem(came_s=0.2),
        QueuedItem(came_s=0.3, due_s=0.5),
        QueuedItem(came_s=0.4, due_s=0.9),
    ]
    for piece in pieces:
        waiting.add(piece)
    assert [waiting.take(0.4).batch[0] for _ in pieces] == [pieces[place] for place in order]


def test_a_batch_waits_from_its_oldest_and_leaves_time_for_deadlines() -> None:
    """A more urgent one that comes later prolongs no wait; what is due in 80 ms does not wait for 200 ms."""
    waiting = _waiting(batch_wait_ms=200.0)
    waiting.add(QueuedItem(came_s=1.0))
    waiting.add(QueuedItem(came_s=1.1, due_s=1.9))
    assert waiting.begins_s == pytest.approx(1.2)
    waiting.add(QueuedItem(came_s=1.12, due_s=1.2))
    assert waiting.begins_s == pytest.approx(1.14)


def test_nobody_starves() -> None:
    """However many urgent ones keep coming, a patient one waits no longer than its patience and what was before it."""
    waiting = _waiting(largest_batch_rows=1)
    patient = QueuedItem(came_s=0.0)
    waiting.add(patient)
    for step in range(1_000):
        now_s = step * 0.01
        for _ in range(2):  # twice as many as are served
            waiting.add(QueuedItem(came_s=now_s, due_s=now_s + 0.05))
        if patient in waiting.take(now_s).batch:
            assert now_s <= PATIENCE_S + 0.05
            return
    pytest.fail("it starved")


def test_what_can_not_be_answered_in_time_is_refused_with_a_hint() -> None:
    """Behind what goes before it; what is more urgent than the queue, or patient, is taken."""
    waiting = _waiting(_pace(0.1), largest_batch_rows=1)
    waiting.busy_until_s = 0.05
    for _ in range(5):
        waiting.add(QueuedItem(due_s=0.3))
    with pytest.raises(Busy, match=r"would take 650 ms.*try again in 21\d ms"):
        waiting.check(QueuedItem(due_s=0.6), 0.0)
    waiting.check(QueuedItem(due_s=0.9), 0.0)
    waiting.check(QueuedItem(due_s=0.2), 0.0)
    waiting.check(QueuedItem(due_s=None), 0.0)


def test_an_idle_worker_refuses_nothing() -> None:
    """However bad the forecast, the next batch mends it; but a deadline that has passed already has passed. One whose
    batches are at busy HNs is not idle: what it lets in joins their queue."""
    waiting = _waiting(_pace(100.0))
    waiting.check(QueuedItem(due_s=0.001), 0.0)
    with pytest.raises(Busy):
        waiting.check(QueuedItem(due_s=0.001), 0.0, busy_downstream=True)
    with pytest.raises(DeadlinePassed):
        waiting.check(QueuedItem(due_s=0.001), 0.002)
    waiting.add(QueuedItem(due_s=0.001))
    assert len(waiting.take(0.0).batch) == 1


def test_a_worker_that_does_not_judge_keeps_batches_short_all_the_same() -> None:
    """An HN: nothing is refused or given up before the last deadline of a batch has passed."""
    pace = Pace()
    for rows in (1, 10, 20):
        pace.saw_batch(rows, 0.001 * rows)
    waiting: WaitQueue[QueuedItem] = WaitQueue(WorkerKnobs(), pace, refuses=False)
    for _ in range(10):
        piece = QueuedItem(rows=10, due_s=0.1)
        waiting.check(piece, 0.0, busy_downstream=True)
        waiting.add(piece)
    taken = waiting.take(0.099)
    assert (len(taken.batch), taken.late) == (2, [])


def test_the_hopeless_are_given_up_before_they_cost_anything() -> None:
    """Before their deadline, if others wait; after it, and when nobody waits for them, in any case."""
    waiting = _waiting(_pace(0.1), largest_batch_rows=1)
    passed, gone, hopeless = QueuedItem(due_s=-0.01), QueuedItem(gone=True, due_s=0.01), QueuedItem(due_s=0.05)
    good = QueuedItem(due_s=0.5)
    for piece in (passed, gone, hopeless, good):
        waiting.add(piece)
    taken = waiting.take(0.0)
    assert (taken.batch, taken.late) == ([good], [passed, gone, hopeless])
    assert "passed" in too_late(passed, 0.0).message
    assert "any more" in too_late(hopeless, 0.0).message
    assert isinstance(too_late(hopeless, 0.0), DeadlinePassed)


def test_without_refusal_only_passed_deadlines_are_given_up() -> None:
    """As the knob says."""
    waiting = _waiting(_pace(0.1), refuse_late=False)
    passed, late, good = QueuedItem(due_s=-0.01), QueuedItem(due_s=0.05), QueuedItem(due_s=0.5)
    for piece in (passed, late, good):
        waiting.add(piece)
    waiting.check(QueuedItem(due_s=0.001), 0.0)
    assert waiting.take(0.0).batch == [late, good]


def test_a_batch_is_no_longer_than_its_most_urgent_item_can_bear() -> None:
    """A quarter of what that was given; a single large item runs all the same."""
    pace = Pace()
    for rows in (1, 10, 20):
        pace.saw_batch(rows, 0.001 * rows)
    waiting = _waiting(pace)
    for _ in range(100):
        waiting.add(QueuedItem(rows=10, due_s=0.2))
    assert len(waiting.take(0.0).batch) == 5
    patient = _waiting(pace)
    for _ in range(100):
        patient.add(QueuedItem(rows=10))
    assert len(patient.take(0.0).batch) == 100


@pytest.mark.parametrize(("row_s", "rows"), [(2e-5, 64), (1e-6, 64)])
def test_goodput_holds_in_overload_and_collapses_without(row_s: float, rows: int) -> None:
    """At two and four times the capacity it keeps 90 % of its peak, though batches vary by half; first come, first
    served without refusal loses nearly everything."""
    per_batch = 512 // rows
    capacity_per_s = per_batch / (1e-3 + per_batch * rows * row_s) / 1.25

    def goodput(knobs: WorkerKnobs, load: float) -> float:
        seconds, rate_per_s = 4_000 / capacity_per_s, load * capacity_per_s
        return good_ones(knobs, rate_per_s=rate_per_s, fixed_s=1e-3, row_s=row_s, rows=rows, seconds=seconds) / seconds

    peak = max(goodput(ON, load) for load in (0.8, 0.9, 1.0))
    assert peak > 0.75 * capacity_per_s
    assert min(goodput(ON, load) for load in (2.0, 4.0)) > 0.9 * peak
    assert goodput(OFF, 2.0) < 0.3 * peak


def test_goodput_holds_where_answers_are_later_than_any_forecast() -> None:
    """Up to 30 of the 50 ms pass where the worker cannot see it: those who came late make it more careful."""
    work = {"fixed_s": 5e-4, "row_s": 1.2e-5, "rows": 512, "seconds": 10.0, "later_s": 0.03}
    good = [good_ones(ON, rate_per_s=load * 120, **work) for load in (0.8, 1.0, 2.0, 4.0)]
    assert min(good[2:]) > 0.9 * max(good)


def test_the_forecast_follows_the_worker_and_not_one_stall() -> None:
    """A line through what was seen; a stall moves it little, a worker that became slow moves it within ten batches."""
    pace = Pace()
    for i in range(100):
        pace.saw_batch(1 + i % 10, 0.001 + 0.0002 * (1 + i % 10))
    assert pace.batch_s(5) == pytest.approx(0.002, rel=0.01)
    assert pace.batch_s(100) == pytest.approx(0.021, rel=0.01)
    pace.saw_batch(5, 3.0)
    assert pace.batch_s(5) < 0.0025
    for _ in range(10):
        pace.saw_batch(5, 0.02)
    assert pace.batch_s(5) > 0.005


def test_a_batch_may_take_twice_what_it_costs_at_least() -> None:
    """Where the fixed cost is more than the share, one row at a time would waste the worker."""
    pace = Pace()
    for rows in (1, 50, 100):
        pace.saw_batch(rows, 0.01 + 0.0001 * rows)
    assert pace.rows_within(0.02) == pytest.approx(100, abs=1)
    assert pace.rows_within(0.001) == pytest.approx(100, abs=1)
    assert _pace(0.1).rows_within(0.001) > 1_000_000
