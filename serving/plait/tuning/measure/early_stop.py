"""When to end a load test early: it can no longer meet its SLO, or the users of a live service suffer. Pure policy.

Both policies are called a few times a second with the progress of the load (`plait_loadtest.values.StopWhen`) and
return a reason to stop, or None.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from plait_loadtest.judging import percentile_of, slos_of
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import RunProgress

_WINDOW_S = 2.0
_WINDOW_ANSWERS = 10
"""The pace of answers is measured over at least `_WINDOW_S` seconds and this many answers: fewer would be noise, and
all of them would be history."""

_FEWEST = 20
"""The number of answers below which a share of errors means nothing."""


class EarlyStop:
    """A policy that ends a run which can no longer meet its SLO: a `share` (0 to 1) of its requests within `slo_s`. The
    run measures from `warm_up_s` on, for `duration_s`.

    It decides from a quarter of the measured time on, once there was time for an answer and an estimate of the pace.
    It stops if the waiting requests could not be answered at the present pace before the run ends and its last
    request is late, so that all later ones are late too; or if most answers are errors. Near the end, when too few
    requests are left to decide the outcome, it does not stop the run.
    """

    def __init__(self, *, slo_s: float, share: float, warm_up_s: float, duration_s: float) -> None:
        self._slo_s, self._share, self._warm_up_s, self._duration_s = slo_s, share, warm_up_s, duration_s
        self._seen: deque[tuple[float, int]] = deque([(0.0, 0)])

    @classmethod
    def of(cls, scenario: Scenario) -> Self | None:
        """Return the policy for the loosest latency and the smallest share of the scenario's SLOs; None unless every
        class has an SLO."""
        slos = slos_of(scenario)
        if len(slos) < len(scenario.mix):
            return None
        return cls(
            slo_s=max(slo.latency_ms for _, slo in slos) / 1e3,
            share=min(percentile_of(slo, item.api) for item, slo in slos) / 100.0,
            warm_up_s=scenario.warm_up_s,
            duration_s=scenario.duration_s,
        )

    def __call__(self, progress: RunProgress) -> str | None:
        """Return why the run cannot meet its SLO, or None."""
        pace_per_s = self._pace_per_s(progress)
        left_s = self._warm_up_s + self._duration_s - progress.elapsed_s
        early_s = max(self._warm_up_s + self._duration_s / 4, self._slo_s + _WINDOW_S)
        if progress.planned is None or progress.elapsed_s < early_s:
            return None
        if progress.done >= _FEWEST and 2 * progress.errors > progress.done:
            return f"{progress.errors} of {progress.done} requests failed"
        waiting = progress.handed - progress.done
        decides = left_s / self._duration_s > 2.0 * (1.0 - self._share)
        if not decides or waiting <= pace_per_s * (left_s + self._slo_s):
            return None
        seen = f"after {progress.elapsed_s:.1f} s {waiting} requests wait, {pace_per_s:.3g} are answered in a second"
        return f"{seen}: the {left_s:.1f} s that are left and an SLO of {self._slo_s:g} s are not enough"

    def _pace_per_s(self, progress: RunProgress) -> float:
        now_s, done = progress.elapsed_s, progress.done
        self._seen.append((now_s, done))
        while len(self._seen) > 2:
            since_s, before = self._seen[1]
            if now_s - since_s < _WINDOW_S or done - before < _WINDOW_ANSWERS:
                break
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (done - before) / max(now_s - since_s, 1e-3)


@dataclass(kw_only=True)
class Guard:
    """A policy that ends a trial on a live service which breaches limits: what its users must not suffer, even during a
    trial. None: not watched. `every_s`: the check interval.

    One slow check may be chance; two in a row are a breach, and so is no answer at all for as long as two slow ones may
    take. Each run has one of its own.
    """

    p95_ms: float | None = None
    error_rate: float | None = None
    every_s: float = 0.0
    _slow_looks: int = field(default=0, init=False)
    _looked_s: float = field(default=-math.inf, init=False)
    _answered_s: float = field(default=0.0, init=False)
    _done: int = field(default=0, init=False)
    _errors: int = field(default=0, init=False)

    def __call__(self, progress: RunProgress) -> str | None:
        """Return why the trial must end now, or None."""
        if progress.elapsed_s - self._looked_s < self.every_s:
            return None
        self._looked_s = progress.elapsed_s
        return self._latency(progress) or self._failures(progress)

    def _latency(self, progress: RunProgress) -> str | None:
        limit_ms = self.p95_ms
        if limit_ms is None:
            return None
        if progress.recent_p95_ms is not None:
            self._answered_s = progress.elapsed_s
            self._slow_looks = self._slow_looks + 1 if progress.recent_p95_ms > limit_ms else 0
            if self._slow_looks >= 2:
                return f"guard: p95 is {progress.recent_p95_ms:.0f} ms, the guard allows {limit_ms:g} ms"
        silent_s = progress.elapsed_s - self._answered_s
        if progress.handed > progress.done and silent_s > max(2.0 * limit_ms / 1e3, 1.0):
            return f"guard: no answer for {silent_s:.1f} s, the guard allows {limit_ms:g} ms"
        return None

    def _failures(self, progress: RunProgress) -> str | None:
        limit = self.error_rate
        done, errors = progress.done - self._done, progress.errors - self._errors
        if limit is None or done < 5:
            return None
        self._done, self._errors = progress.done, progress.errors
        if errors / done > limit:
            return f"guard: {errors} of the last {done} requests failed, the guard allows {limit:.1%}"
        return None
