"""Measured step costs, from which `policy.choose` and the deadline checks estimate the near future.

Symbols: T(r) = seconds of a call with r rows; a < b = row counts that were measured.

A row count is *known* once it was measured three times: its T is then the lower quartile of its newest calls, so that
neither the first call (which may compile or allocate) nor calls that share the cores with a decode, or with what is
compiled, decide. Others are estimated from the known ones, and optimistically, so that `policy.choose` tries them:

- below all known: T(b) r / b, no worse per row than the nearest;
- between two: on the line through them, so that a count is tried only where the ends say that it pays;
- from twice the largest known b on: as if a doubling cost only half as much again, and nothing were gained beyond it.
  So sizes are tried in doublings, and one that is much worse than its half ends the search;
- less than twice b: on the line through the two largest known.

Where sets are inputs or merged at will, a way of which no count is known is hoped to take
`_HOPED_SHARE_OF_ANOTHER_WAY` of the best other one.

What is in use is measured all the time. A count that looked worse is forgotten after `_FORGET_AFTER_CALLS` calls
without it, and so tried again: the host may have changed. All others are forgotten when the one in use becomes much
faster at once: what runs the steps has changed (a module was compiled, another process ended).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from plait_serving.diffusion.queue.policy import JOIN_SHARE, GroupKey
from plait_serving.diffusion.request_terms import RowKind

# A count follows a host that became slower within 24 calls, about a request; 3 % of noise leave it within 1 %.
_KEPT_CALLS = 31
# The lowest of three is free of two slow calls: the first, and a disturbed one.
_CALLS_TO_KNOW = 3
# Trying a forgotten count takes three calls: with the four doublings up to 16 rows about one call in a hundred.
_FORGET_AFTER_CALLS = 1000
# Three calls in a row that are all so many times faster than known are no noise. Slower ones say nothing: a GPU decodes
# images beside steps.
_FASTER_AT_ONCE = 1.2
# Between a launch-bound GPU (0) and a compute-bound CPU (1).
_HOPED_SHARE_OF_ANOTHER_ROW = 0.5
# Low enough that another way is tried, high enough that it is not when it would have to be much faster to pay.
_HOPED_SHARE_OF_ANOTHER_WAY = 0.8
MAX_KINDS = 1024
"""The kinds of rows whose seconds are kept, those that were measured last: four times as many as requests may wait by
default, so that those of what waits are there. They take a few MB."""


class StepCosts:
    """Seconds per denoiser call, by the kind of its rows, how LoRA sets act, and rows. Thread-safe."""

    def __init__(self, first_guess_s: float = 0.05) -> None:
        self._first_guess_s = first_guess_s
        self._ways: OrderedDict[RowKind, dict[str, _Kind]] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, key: GroupKey, rows: int, seconds: float) -> None:
        """Record that a call of `rows` rows of a group took `seconds`."""
        with self._lock:
            self._ways.setdefault(key.row, {}).setdefault(_way(key), _Kind()).record(rows, seconds)
            self._ways.move_to_end(key.row)
            if len(self._ways) > MAX_KINDS:
                self._ways.popitem(last=False)

    def shortest_s(self, key: GroupKey, rows: int) -> float:
        """Return the seconds that one call takes at least, however LoRA sets act; 0 before any such call was measured
        often enough to refuse a request by it."""
        with self._lock:
            return min((kind.step_s(rows) for kind in self._ways.get(key.row, {}).values() if kind.known), default=0.0)

    def measured_s(self, key: GroupKey, rows: int) -> float | None:
        """Return the expected seconds of one call if calls of as many rows were measured often enough, else None."""
        with self._lock:
            kind = self._ways.get(key.row, {}).get(_way(key))
            return None if kind is None else kind.known.get(rows)

    def step_s(self, key: GroupKey, rows: int) -> float:
        """Return the expected seconds of one call."""
        with self._lock:
            ways = self._ways.get(key.row, {})
            kind = ways.get(_way(key))
            if kind is not None and kind.known:
                return kind.step_s(rows)
            hoped = [_HOPED_SHARE_OF_ANOTHER_WAY * other.step_s(rows) for other in ways.values() if other is not kind]
            own = [] if kind is None else [kind.step_s(rows)]
            guess_s = self._first_guess_s * rows
            # Merging begins: what it takes says whether two sets as inputs could be worth a try.
            return min(own + hoped, default=guess_s / _HOPED_SHARE_OF_ANOTHER_WAY if key.row_wise else guess_s)


@dataclass(slots=True)
class _Calls:
    """The newest calls with one row count. `last_call` counts all calls of the kind."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))
    last_call: int = 0


@dataclass(slots=True)
class _Kind:
    """The calls of one kind by row count. `known`: T of the counts that were measured often enough."""

    calls: int = 0
    by_rows: dict[int, _Calls] = field(default_factory=dict)
    known: dict[int, float] = field(default_factory=dict)

    def record(self, rows: int, seconds: float) -> None:
        self.calls += 1
        used = self.by_rows.setdefault(rows, _Calls())
        used.last_call = self.calls
        used.seconds.append(seconds)
        newest = list(used.seconds)[-_CALLS_TO_KNOW:]
        if len(newest) == _CALLS_TO_KNOW and _FASTER_AT_ONCE * max(newest) < self.known.get(rows, 0.0):
            used.seconds = deque(newest, maxlen=_KEPT_CALLS)
            self.by_rows = {rows: used}
            self.known.clear()
        if len(used.seconds) >= _CALLS_TO_KNOW:
            self.known[rows] = sorted(used.seconds)[len(used.seconds) // 4]
            self._forget_what_looked_worse(rows)

    def step_s(self, rows: int) -> float:
        if rows in self.known:
            return self.known[rows]
        if not self.known:
            nearest = min(self.by_rows, key=lambda seen: abs(seen - rows))
            return min(self.by_rows[nearest].seconds) * rows / nearest
        estimate_s = _estimate_s(self.known, rows)
        own = self.by_rows.get(rows)
        return estimate_s if own is None else min(estimate_s, *own.seconds)

    def _forget_what_looked_worse(self, rows: int) -> None:
        """Forget the counts that were not used for long and looked worse than `rows`, the one in use.

        One that looked better needs no second chance: it is used, and so measured, as soon as there are as many rows.
        """
        row_s = self.known[rows] / rows
        last_call = self.calls - _FORGET_AFTER_CALLS
        for other in [other for other, calls in self.by_rows.items() if calls.last_call <= last_call]:
            other_s = self.known.get(other)
            if other_s is None or (1.0 + JOIN_SHARE) * other_s / other > row_s:
                del self.by_rows[other]
                self.known.pop(other, None)


def _estimate_s(known: dict[int, float], rows: int) -> float:
    """Return T of a row count that is not known, as the module docstring describes."""
    below = sorted(seen for seen in known if seen < rows)
    above = min((seen for seen in known if seen > rows), default=None)
    if not below:
        assert above is not None
        return known[above] * rows / above
    b = below[-1]
    if above is not None:
        return known[b] + (known[above] - known[b]) * (rows - b) / (above - b)
    hoped_row_s = _HOPED_SHARE_OF_ANOTHER_ROW * known[b] / b
    if rows >= 2 * b:
        return (known[b] + b * hoped_row_s) * rows / (2 * b)
    another_row_s = hoped_row_s
    if len(below) > 1:
        a = below[-2]
        another_row_s = max(0.0, (known[b] - known[a]) / (b - a))
    return known[b] + another_row_s * (rows - b)


def _way(key: GroupKey) -> str:
    """Return how LoRA sets act in a call: merged, which runs on torch; rows of several; one for all rows, as an
    executor takes it; not at all."""
    return "merged" if key.loras else "row-wise" if key.row_wise else "shared" if key.shared else "plain"
