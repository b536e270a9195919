"""The queue of a worker, whatever comes: nobody is lost, nobody twice, bounds hold, the urgent are first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.queued_item import QueuedItem
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.order import PATIENCE_S, WaitQueue
from plait_disagg.queue.pace import Pace

PIECES = st.builds(
    QueuedItem,
    rows=st.integers(1, 40),
    alone=st.booleans(),
    gone=st.booleans(),
    came_s=st.floats(0.0, 5.0),
    due_s=st.none() | st.floats(0.0, 10.0),
)
KNOBS = st.builds(WorkerKnobs, largest_batch_rows=st.integers(1, 100), refuse_late=st.booleans())


@settings(max_examples=150)
@given(knobs=KNOBS, pieces=st.lists(PIECES, max_size=30), steps_s=st.lists(st.floats(0.0, 2.0), max_size=30))
def test_everyone_is_taken_once_in_order_and_in_bounds(
    knobs: WorkerKnobs, pieces: list[QueuedItem], steps_s: list[float]
) -> None:
    """Every item ends in one batch or among the late; a batch is within the bound, or one item; what is late has a
    deadline or is gone; and while time stands still, what is taken gets less and less urgent."""
    pace = Pace()
    pace.saw_batch(10, 0.3)
    waiting: WaitQueue[QueuedItem] = WaitQueue(knobs, pace)
    for piece in pieces:
        waiting.add(piece)
    now_s, found, last = 0.0, [], float("-inf")
    steps = iter(steps_s)
    while len(waiting):
        taken = waiting.take(now_s)
        assert taken.batch or taken.late
        found += taken.batch + taken.late
        assert sum(it.rows for it in taken.batch) <= knobs.largest_batch_rows or len(taken.batch) == 1
        assert all(not it.gone for it in taken.batch)
        assert len(taken.batch) == 1 or not any(it.alone for it in taken.batch)
        assert all(it.gone or it.due_s is not None for it in taken.late)
        keys = [it.came_s + PATIENCE_S if it.due_s is None else it.due_s for it in taken.batch]
        assert keys == sorted(keys)
        assert not keys or keys[0] >= last
        last = keys[-1] if keys else last
        now_s += next(steps, 0.0)
    assert sorted(map(id, found)) == sorted(map(id, pieces))
