"""Goodput: the most requests per second that a server answers with its p99 within the limit; open loop, Poisson."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait_bench.errors import SystemFailed
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    GeneratorLimits,
    LoadTarget,
    PoissonArrivals,
    RawClass,
    Scenario,
    Slo,
)
from plait_loadtest.session import run_scenario

__all__ = ["LIMIT_MS", "STEP", "RateAttempt", "around", "attempt", "throughput_per_s"]

LIMIT_MS = 50.0
"""The p99 that a server must keep, if nothing else is said: production asks for tens of milliseconds (Prism), MLPerf's
DLRM for 60."""

STEP = 1.06
"""A rate is found to 6 %."""

_FIRST_STEP, _GROWTH, _HOPELESS = STEP**4, 1.5, 50.0
_EXACT = 1.0 + 1e-9

CALLERS = 16

_SECONDS, _WARM_UP_S = 3.0, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class RateAttempt:
    """One run at one rate. Latency counts from the scheduled time, so what the generator does late, on cores that it
    shares with the server, counts too: alike for all systems."""

    rate_per_s: float
    goodput_per_s: float
    p99_ms: float
    failed: int
    limit_ms: float = LIMIT_MS

    @property
    def holds(self) -> bool:
        """Everything answered, and the p99 within the limit."""
        return self.failed == 0 and self.p99_ms <= self.limit_ms

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "misses"
        return f"{self.rate_per_s:.0f}/s: p99 {self.p99_ms:.1f} ms, {self.failed} failed: {verdict}"


def attempt(
    url: str, bodies: Sequence[Path], header_bytes: int, rate_per_s: float, *, seed: int, limit_ms: float = LIMIT_MS
) -> RateAttempt:
    """One run; every body is as likely as every other. All have a JSON header of ``header_bytes``."""
    scenario = _scenario(
        url, bodies, header_bytes, PoissonArrivals(rate_per_s=rate_per_s), seed=seed, limit_ms=limit_ms
    )
    total = run_scenario(scenario).summary.total
    return RateAttempt(
        rate_per_s=rate_per_s,
        goodput_per_s=total.goodput_per_s,
        p99_ms=total.latency_ms.p99,
        failed=total.requests - total.succeeded,
        limit_ms=limit_ms,
    )


def throughput_per_s(url: str, bodies: Sequence[Path], header_bytes: int) -> float:
    """What a closed loop of `CALLERS` callers reaches: to choose between thread layouts, and to know where to begin."""
    scenario = _scenario(url, bodies, header_bytes, ClosedLoopCallers(concurrency=CALLERS), seed=0)
    return run_scenario(scenario).summary.total.achieved_per_s


def _scenario(
    url: str,
    bodies: Sequence[Path],
    header_bytes: int,
    arrivals: PoissonArrivals | ClosedLoopCallers,
    *,
    seed: int,
    limit_ms: float = LIMIT_MS,
) -> Scenario:
    headers = {"inference-header-content-length": str(header_bytes)}
    mix = tuple(
        RawClass(
            name=path.stem, method="POST", body_file=path, content_type="application/octet-stream", headers=headers
        )
        for path in bodies
    )
    return Scenario(
        name="bench",
        target=LoadTarget(url=url, api="raw", path="/v2/models/model/infer"),
        mix=mix,
        arrivals=arrivals,
        duration_s=_SECONDS,
        warm_up_s=_WARM_UP_S,
        seed=seed,
        slo=Slo(latency_ms=limit_ms, percentile=99.0),
        limits=GeneratorLimits(drain_s=3.0),
    )


def around(
    run: Callable[[float], RateAttempt], known_per_s: float, *, guessed: bool, say: Callable[[str], None]
) -> RateAttempt:
    """The trial with the highest rate that holds, to `STEP`, looked for in growing steps from a rate that should be
    about right. ``guessed``: it may be far off, so the steps begin large.

    Raises `SystemFailed` if next to nothing holds.
    """
    low, high, best = 0.0, 0.0, None
    rate_per_s, step = known_per_s, _FIRST_STEP if guessed else STEP
    while not (low and high) or high / low > STEP * _EXACT:
        trial = _twice(run, rate_per_s, say)
        if trial.holds:
            low, best = rate_per_s, trial
        else:
            high = rate_per_s
        rate_per_s = math.sqrt(low * high) if low and high else low * step if low else high / step
        step **= _GROWTH
        if rate_per_s < known_per_s / _HOPELESS:
            raise SystemFailed(f"not even {1 / _HOPELESS:.0%} of the expected rate is answered in time")
    assert best is not None
    return best


def _twice(run: Callable[[float], RateAttempt], rate_per_s: float, say: Callable[[str], None]) -> RateAttempt:
    """Again if it did not hold: one disturbance must not decide."""
    trial = run(rate_per_s)
    if not trial.holds:
        say(f"  {trial}")
        trial = run(rate_per_s)
    say(f"  {trial}")
    return trial
