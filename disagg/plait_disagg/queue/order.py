"""Which waiting item is next, which is rejected, and which is given up. Pure: time is passed in as an argument.

Earliest deadline first. A request without a deadline is treated as if it had one `PATIENCE_S` after its arrival:
urgent requests may pass it, but none that arrives later than that can, so no request starves. Prism orders what
waits for the wire the same way (NSDI'25, 4.3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from plait_disagg.errors import Busy, DeadlinePassed, RankError
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.pace import Pace

MAX_ITEMS = 1_024
"""The max items of one batch, so that the numbers describing it fit into a message's header."""

PATIENCE_S = 1.0
"""The deadline assumed for requests that have none: ranking deadlines are some tens of milliseconds (Prism), so one
second is later than all of them."""

_WORTH_S = 1.5e-3
"""The waiting requests are handed out in two batches if computing all of them takes at least this long both here and
downstream: the second is prepared while the first is being computed. From here on two batches gave more answers
per second than one (8 callers, 2 busy cores: 4 to 11 % more where it takes 2 ms, 80 % where it takes 10 ms);
three never did."""

_SHARE = 0.25
"""How long a batch may take, and wait for more, as a share of its most urgent request's total time, so that one batch
can run while the next one gathers."""


class Downstream(NamedTuple):
    """Where batches go from here, if they do (a CN's HNs).

    `open` of them are not answered yet, `idle` workers have nothing to do until one arrives, and `room` more may be
    sent before an answer arrives.
    """

    open: int = 0
    idle: int = 0
    room: int = 0


class Item(Protocol):
    """What a batch is made of. Times are on the worker's clock."""

    @property
    def rows(self) -> int:
        """How much of a batch it fills."""

    @property
    def request_ids(self) -> Sequence[str]:
        """The ids of the requests in it, for the log."""

    @property
    def alone(self) -> bool:
        """Whether it must not share a batch."""

    @property
    def gone(self) -> bool:
        """Whether nobody is waiting for it any more."""

    @property
    def came_s(self) -> float:
        """Arrival time."""

    @property
    def due_s(self) -> float | None:
        """Time after which its answer is worth nothing, or less."""

    @property
    def lost_s(self) -> float | None:
        """Time after which it needs no more work: `due_s`, or later if only part of it is due then."""

    def fail(self, error: RankError) -> None:
        """Report the error to whoever is waiting for it."""


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch(Generic[T]):
    """A batch, and what was given up while taking it."""

    batch: list[T]
    late: list[T]


class WaitQueue(Generic[T]):
    """The waiting items, in their order. Not locked."""

    def __init__(self, knobs: WorkerKnobs, pace: Pace, *, refuses: bool = True) -> None:
        """Create an empty queue.

        `refuses`: whether this worker enforces deadlines, if its knobs ask for it; batches are kept as short as the
        deadlines require in any case.
        """
        self.knobs = knobs
        self._pace = pace
        self._refuses = refuses
        self._keys: list[float] = []  # ascending; three lists, so that a sum of rows is one call
        self._rows: list[int] = []
        self._items: list[T] = []
        self.busy_until_s = 0.0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def rows(self) -> int:
        """Rows of all items."""
        return sum(self._rows)

    @property
    def begins_s(self) -> float:
        """When what waits becomes a batch though it does not fill one: `batch_wait_ms` after the oldest item, sooner
        where that is more than a deadline leaves. The queue must not be empty."""
        patience_s = self.knobs.batch_wait_ms / 1e3
        return min(
            item.came_s + (patience_s if item.due_s is None else min(patience_s, _SHARE * (item.due_s - item.came_s)))
            for item in self._items
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting and nothing is running."""
        return not self._items and not self.busy_until_s

    @property
    def _judges(self) -> bool:
        return self._refuses and self.knobs.refuse_late

    def add(self, item: T) -> None:
        """Add an item behind everything that is as urgent."""
        key = self._key(item)
        place = bisect_right(self._keys, key)
        self._keys.insert(place, key)
        self._rows.insert(place, item.rows)
        self._items.insert(place, item)

    def check(self, item: T, now_s: float, *, busy_downstream: bool = False) -> None:
        """Raise `Busy` or `DeadlinePassed` if the item cannot be accepted.

        `Busy`: there is no room, or the item's deadline cannot be met behind what goes before it. `DeadlinePassed`:
        it has already passed.

        Where nothing is waiting and nothing is running, here or, by `busy_downstream`, at a CN's HNs, nothing is
        rejected, however bad the forecast: only new measurements correct it.
        """
        if item.lost_s is not None and now_s > item.lost_s:
            raise too_late(item, now_s)
        if len(self) >= self.knobs.largest_waiting:
            raise Busy(f"{self.knobs.largest_waiting} requests are waiting already")
        if item.due_s is None or not self._judges or (self.idle and not busy_downstream):
            return
        wait_s = max(0.0, self.busy_until_s - now_s) + self._queue_s(item, item.due_s) + self._pace.after_s
        late_s = now_s + wait_s * self._pace.margin - item.due_s
        if late_s > 0:
            raise Busy(
                f"the answer would take {wait_s * 1e3:.0f} ms, which is {late_s * 1e3:.0f} ms after the deadline; "
                f"try again in {late_s * 1e3:.0f} ms"
            )

    def take(self, now_s: float, downstream: Downstream = Downstream()) -> TakenBatch[T]:  # noqa: B008  # immutable
        """Take the next batch: as many as fit, in order, without those that would be too late.

        While a worker `downstream` is idle, the waiting items are split over several batches (`_pieces`).
        """
        batch: list[T] = []
        late: list[T] = []
        rows = taken = max_rows = 0
        share_rows = -(-self.rows // self._pieces(downstream))
        for item in self._items:
            if item.gone or self._too_late(item, now_s, last=taken + 1 == len(self._items)):
                late.append(item)
                taken += 1
                continue
            if batch and (item.alone or batch[0].alone or len(batch) == MAX_ITEMS):
                break
            if not batch:
                max_rows = self._batch_rows(None if item.due_s is None else item.due_s - item.came_s)
                max_rows = min(max_rows, share_rows)
            elif rows + item.rows > max_rows:
                break
            batch.append(item)
            rows += item.rows
            taken += 1
        del self._keys[:taken], self._rows[:taken], self._items[:taken]
        return TakenBatch(batch=batch, late=late)

    def _pieces(self, downstream: Downstream) -> int:
        """Return the number of batches to split the waiting items into.

        One for each idle worker, as far as this worker can hand them out while the first is processed; and two if
        that is worth it: otherwise closed-loop callers would make this worker and the others wait for each other
        again and again. Not with several threads here: taking turns, each side has all the cores that they share.
        """
        own_s, after_s = self._pace.batch_s(self.rows), self._pace.after_s
        if not downstream.idle or not own_s:
            return 1
        min_batches = 2 if self.knobs.threads == 1 and min(own_s, after_s) >= _WORTH_S else 1
        return max(1, min(downstream.room, max(min_batches, min(downstream.idle, int(after_s / own_s)))))

    def _too_late(self, item: T, now_s: float, *, last: bool) -> bool:
        """Return whether it is too late for an item.

        That may be before its deadline, if it would miss it even alone and others could use the time.
        """
        if item.lost_s is None:
            return False
        judged = self._judges and not last
        needed_s = self._pace.batch_s(item.rows) + self._pace.after_s if judged else 0.0
        return now_s + needed_s > item.lost_s

    def _queue_s(self, item: T, due_s: float) -> float:
        """Return the seconds of what goes before the item and of the batch that it will be in, which others fill up."""
        before = sum(self._rows[: bisect_right(self._keys, self._key(item))])
        batch_rows = max(item.rows, self._batch_rows(due_s - item.came_s))
        return (before // batch_rows + 1) * self._pace.batch_s(batch_rows)

    def _batch_rows(self, budget_s: float | None) -> int:
        """Return how many rows a batch may have whose most urgent item had `budget_s` at its arrival."""
        if budget_s is None or not self.knobs.refuse_late:
            return self.knobs.largest_batch_rows
        return min(self.knobs.largest_batch_rows, self._pace.rows_within(_SHARE * budget_s))

    def _key(self, item: T) -> float:
        if self.knobs.order == "arrival":
            return 0.0
        return item.came_s + PATIENCE_S if item.due_s is None else item.due_s


def too_late(item: Item, now_s: float) -> DeadlinePassed:
    """Return the reason why an item was given up."""
    if item.lost_s is None or now_s > item.lost_s:
        return DeadlinePassed("the deadline passed while the request waited")
    return DeadlinePassed("the request waited so long that its deadline could not be met any more")
