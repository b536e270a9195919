"""How many CNs and how many HNs a model needs, each from its own signals. Pure.

A worker's *pressure* is how much of its capacity is used: 0 idle, 1 all of it, more when work piles up. Each kind
counts what it runs out of (`cn_pressure`, `hn_pressure`), from two readings of its counters. `decide` turns
pressures into a number of replicas, with hysteresis: nothing happens between `Scaling.low` and `Scaling.high`, and
outside of them only after some time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

_QUEUE_S: Final = 0.02
"""The wait at a CN that counts as pressure 1: most of what a request of some tens of milliseconds may take (Prism)."""

_MAX: Final = 2.0
"""The max pressure that an HN reports: a backlog shows how long the overload has lasted, not how many workers are
missing."""

Counters = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Bounds and thresholds.

    The number is chosen so that pressure becomes `target`; after a change, pressure must stay beyond a threshold for
    `up_after_s` or `down_after_s` before the next one.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target: float = 0.6
    high: float = 0.8
    low: float = 0.35
    up_after_s: float = 2.0
    down_after_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """What `decide` remembers: since when pressure has been beyond a threshold, and beyond which (+1 high, -1 low)."""

    side: int = 0
    since_s: float = 0.0


def cn_pressure(before: Counters, after: Counters, seconds: float) -> float:
    """Return the pressure of a CN or whole worker: its compute thread's share of time, and how long requests wait for
    it.

    A CN whose HNs are slow has a long queue and computes little: more CNs would not help. So a queue can at most
    double the compute share.
    """
    busy = _rate(before, after, "busy_seconds_total", seconds)
    requests = after.get("requests_total", 0.0) - before.get("requests_total", 0.0)
    waited_s = after.get("queued_seconds_total", 0.0) - before.get("queued_seconds_total", 0.0)
    queue = waited_s / requests / _QUEUE_S if requests > 0 else 0.0
    return busy * min(2.0, max(1.0, queue))


def hn_pressure(before: Counters, after: Counters, seconds: float, *, largest_batch_rows: int) -> float:
    """Return the pressure of an HN: how full the windows of its CNs are, or how full its batches are while it computes.

    Occupancy is the mean number of batches present (Little's law: the time they spend here, per second) per batch
    that the windows allow. Windows shrink where batches wait, so an overloaded HN has full ones however small they
    are.
    """
    window = after.get("window", 0.0)
    occupancy = _rate(before, after, "stay_seconds_total", seconds) / window if window else 0.0
    batches = after.get("batches_total", 0.0) - before.get("batches_total", 0.0)
    rows = after.get("rows_total", 0.0) - before.get("rows_total", 0.0)
    fill = rows / batches / largest_batch_rows if batches > 0 else 0.0
    busy = _rate(before, after, "busy_seconds_total", seconds)
    return min(_MAX, max(occupancy, fill * min(1.0, busy)))


class Gauge:
    """The pressure since the last reading."""

    def __init__(
        self,
        metrics: Callable[[], Counters],
        pressure: Callable[[Counters, Counters, float], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a gauge; `pressure` compares two readings of the metrics taken that many seconds apart."""
        self._metrics = metrics
        self._pressure = pressure
        self._clock = clock
        self._before, self._before_s = dict(metrics()), clock()
        self._last = 0.0

    def read(self) -> float:
        """Return the pressure since the last call, or the previous value if no time has passed."""
        after, now_s = dict(self._metrics()), self._clock()
        if now_s > self._before_s:
            self._last = self._pressure(self._before, after, now_s - self._before_s)
            self._before, self._before_s = after, now_s
        return self._last


def decide(
    pressures: Sequence[float], *, replicas: int, scaling: Scaling, state: ScaleState, now_s: float
) -> tuple[int, ScaleState]:
    """Return how many replicas there should be, and what to remember.

    There are (or soon will be) `replicas`. `pressures`: one for each replica that reported one; with none, nothing
    changes.
    """
    wanted = min(max(replicas, scaling.min_replicas), scaling.max_replicas)
    if not pressures:
        return wanted, ScaleState()
    pressure = sum(pressures) / len(pressures)
    side = (pressure > scaling.high) - (pressure < scaling.low)
    if side != state.side:
        state = ScaleState(side=side, since_s=now_s)
    lasts_s = scaling.up_after_s if side > 0 else scaling.down_after_s
    if not side or now_s - state.since_s < lasts_s:
        return wanted, state
    right = math.ceil(sum(pressures) / scaling.target)  # not of those that still start: they have no share yet
    wanted = min(max(right, scaling.min_replicas), scaling.max_replicas)
    return (wanted, replace(state, since_s=now_s)) if wanted != replicas else (wanted, state)


def _rate(before: Counters, after: Counters, name: str, seconds: float) -> float:
    return max(0.0, after.get(name, 0.0) - before.get(name, 0.0)) / seconds
