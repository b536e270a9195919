"""When to end a load test early: it can not meet its SLO any more, or the users of a live service suffer. Pure policy.

Both policies are asked a few times a second how the load goes (`plait_loadtest.values.StopWhen`) and answer
with a reason, or None.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from plait_loadtest.judging import percentile_of, slo_of
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import RunProgress

__all__ = ["EarlyStop", "Guard", "GuardLimits", "SloTarget", "needs_of"]

_WINDOW_S = 2.0
_WINDOW_ANSWERS = 10
"""The pace of answers is taken over at least so long and so many of them: less is chance, all of them is history."""

_FEWEST = 20
"""Answers below which a share of errors says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """What a run is asked for: a ``share`` (0 to 1) of its requests within ``slo_s``. It measures from ``warm_up_s``
    on, for ``duration_s``."""

    slo_s: float
    share: float
    warm_up_s: float
    duration_s: float


def needs_of(scenario: Scenario) -> SloTarget | None:
    """The needs of its most patient class; None without an SLO for every class."""
    slos = [(item, slo_of(scenario, item.name)) for item in scenario.mix]
    if any(slo is None for _, slo in slos):
        return None
    return SloTarget(
        slo_s=max(slo.latency_ms for _, slo in slos if slo is not None) / 1e3,
        share=min(percentile_of(slo, item.api) for item, slo in slos if slo is not None) / 100.0,
        warm_up_s=scenario.warm_up_s,
        duration_s=scenario.duration_s,
    )


class EarlyStop:
    """Says why a run can not meet its SLO any more.

    From a quarter of the measured time on, and when there was time for an answer and a look at the pace: what waits
    could not be answered at the present pace before the run is over and its last request late, so all that still come
    are late; or most answers are errors. Near the end, when too few requests are left to decide, it says nothing.
    """

    def __init__(self, needs: SloTarget) -> None:
        self._needs = needs
        self._seen: deque[tuple[float, int]] = deque([(0.0, 0)])

    def __call__(self, told: RunProgress) -> str | None:
        """See the class."""
        needs = self._needs
        pace_per_s = self._pace_per_s(told)
        left_s = needs.warm_up_s + needs.duration_s - told.elapsed_s
        early_s = max(needs.warm_up_s + needs.duration_s / 4, needs.slo_s + _WINDOW_S)
        if told.planned is None or told.elapsed_s < early_s:
            return None
        if told.done >= _FEWEST and 2 * told.errors > told.done:
            return f"{told.errors} of {told.done} requests failed"
        waiting = told.handed - told.done
        decides = left_s / needs.duration_s > 2.0 * (1.0 - needs.share)
        if decides and waiting > pace_per_s * (left_s + needs.slo_s):
            return (
                f"after {told.elapsed_s:.1f} s {waiting} requests wait, {pace_per_s:.3g} are answered in a second: the "
                f"{left_s:.1f} s that are left and an SLO of {needs.slo_s:g} s are not enough"
            )
        return None

    def _pace_per_s(self, told: RunProgress) -> float:
        self._seen.append((told.elapsed_s, told.done))
        while len(self._seen) > 2 and self._is_enough(told, *self._seen[1]):
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (told.done - before) / max(told.elapsed_s - since_s, 1e-3)

    @staticmethod
    def _is_enough(told: RunProgress, since_s: float, done: int) -> bool:
        return told.elapsed_s - since_s >= _WINDOW_S and told.done - done >= _WINDOW_ANSWERS


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """What users of a live service must not suffer, even for a trial. None: not watched. ``every_s``: how often."""

    p95_ms: float | None = None
    error_rate: float | None = None
    every_s: float = 0.0


class Guard:
    """Says why a trial on a live service must end now. One slow look may be chance; two in a row are a breach, and so
    is no answer at all for as long as two slow ones may take."""

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._slow_looks = 0
        self._looked_s = -limits.every_s
        self._answered_s = 0.0
        self._done = self._errors = 0

    def __call__(self, told: RunProgress) -> str | None:
        """See the class."""
        if told.elapsed_s - self._looked_s < self._limits.every_s:
            return None
        self._looked_s = told.elapsed_s
        return self._latency(told) or self._failures(told)

    def _latency(self, told: RunProgress) -> str | None:
        limit_ms = self._limits.p95_ms
        if limit_ms is None:
            return None
        if told.recent_p95_ms is not None:
            self._answered_s = told.elapsed_s
            self._slow_looks = self._slow_looks + 1 if told.recent_p95_ms > limit_ms else 0
            if self._slow_looks >= 2:
                return f"guard: p95 is {told.recent_p95_ms:.0f} ms, the guard allows {limit_ms:g} ms"
        silent_s = told.elapsed_s - self._answered_s
        if told.handed > told.done and silent_s > max(2.0 * limit_ms / 1e3, 1.0):
            return f"guard: no answer for {silent_s:.1f} s, the guard allows {limit_ms:g} ms"
        return None

    def _failures(self, told: RunProgress) -> str | None:
        limit = self._limits.error_rate
        done, errors = told.done - self._done, told.errors - self._errors
        if limit is None or done < 5:
            return None
        self._done, self._errors = told.done, told.errors
        if errors / done > limit:
            return f"guard: {errors} of the last {done} requests failed, the guard allows {limit:.1%}"
        return None
