"""What a thread is doing, and whether it still gets anywhere: tells a long step from one that hangs.

The thread says what it begins and how long such work was measured to take; whoever supervises it asks from time to
time. Only time between two such checks counts, and little of it where they lie far apart: then the process was
stopped or its host slept, and the thread had no chance to get on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MIN_LIMIT_S = 90.0
"""A step of milliseconds may once wait for a disk, for memory, for an update of its model, or behind everything else
on a busy host."""
_SLOWER = 30.0
"""A step that takes so many times as long as measured does not come back: sharing the cores costs a tenth of that."""
_UNMEASURED_LIMIT_S = 900.0
"""Work that was never measured may compile a model for its shape, or read one from a slow disk."""
_MAX_GAP_S = 15.0
"""The max time that counts between two checks, which come every few seconds."""


class Stuck(RuntimeError):
    """A thread makes no progress; its process must be replaced."""


def limit_s(expected_s: float | None) -> float:
    """Return how long work may take that was measured to take `expected_s`; None: it never was."""
    return _UNMEASURED_LIMIT_S if expected_s is None else max(_MIN_LIMIT_S, _SLOWER * expected_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A piece of work. Each is an object of its own: that it was replaced by another is the progress."""

    what: str
    expected_s: float | None


class ThreadHeartbeat:
    """One thread begins and rests, another checks. Beginning costs a microsecond."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._task: _Task | None = None
        self._watched: _Task | None = None
        self._watched_s = 0.0
        self._checked_s = clock()

    def begin(self, what: str, expected_s: float | None = None) -> None:
        """Record that the thread begins something, and with it has ended what it did before."""
        self._task = _Task(what, expected_s)

    def rest(self) -> None:
        """Record that the thread waits for work, which may take for ever."""
        self._task = None

    @contextmanager
    def unhurried(self, what: str) -> Iterator[None]:
        """Allow what runs inside, a part of other work, as much time as work that was never measured."""
        before, self._task = self._task, _Task(what, None)
        try:
            yield
        finally:
            self._task = before

    def check(self) -> None:
        """Raise `Stuck` if the thread is at the same piece of work for longer than it may take."""
        now_s, task = self._clock(), self._task
        gap_s, self._checked_s = now_s - self._checked_s, now_s
        if task is None or task is not self._watched:
            self._watched, self._watched_s = task, 0.0
            return
        self._watched_s += min(gap_s, _MAX_GAP_S)
        if self._watched_s > limit_s(task.expected_s):
            usual = "its like was never measured" if task.expected_s is None else f"usual are {task.expected_s:.3g} s"
            raise Stuck(f"{task.what} has not ended within {self._watched_s:.0f} s; {usual}")
