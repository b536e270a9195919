"""Goodput: the most requests per second that a server answers with its p99 within the limit; open loop, Poisson."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait_bench.errors import SystemFailed
from plait_loadtest.scenario import Limits, Poisson, RawClass, Scenario, Slo, Target
from plait_loadtest.session import run_scenario

__all__ = ["LIMIT_MS", "Trial", "around", "attempt", "highest"]

LIMIT_MS = 50.0
"""The p99 that a server must keep: production asks for tens of milliseconds (Prism), MLPerf's DLRM for 60."""

_STEP = 1.06  # the rate is found to 6 %
_SECONDS, _WARM_UP_S = 4.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run at one rate."""

    rate_per_s: float
    goodput_per_s: float
    p99_ms: float
    failed: int
    is_valid: bool

    @property
    def holds(self) -> bool:
        """Everything answered, the p99 within the limit, and the generator on time."""
        return self.is_valid and self.failed == 0 and self.p99_ms <= LIMIT_MS

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "not valid" if not self.is_valid else "misses"
        return f"{self.rate_per_s:.0f}/s: p99 {self.p99_ms:.1f} ms, {self.failed} failed: {verdict}"


def attempt(url: str, bodies: Sequence[Path], header_bytes: int, rate_per_s: float, *, seed: int) -> Trial:
    """One run; every body is as likely as every other. All have a JSON header of ``header_bytes``."""
    headers = {"inference-header-content-length": str(header_bytes)}
    mix = tuple(
        RawClass(
            name=path.stem, method="POST", body_file=path, content_type="application/octet-stream", headers=headers
        )
        for path in bodies
    )
    scenario = Scenario(
        name="bench",
        target=Target(url=url, api="raw", path="/v2/models/model/infer"),
        mix=mix,
        arrivals=Poisson(rate_per_s=rate_per_s),
        duration_s=_SECONDS,
        warm_up_s=_WARM_UP_S,
        seed=seed,
        slo=Slo(latency_ms=LIMIT_MS, percentile=99.0),
        limits=Limits(drain_s=3.0),
    )
    summary = run_scenario(scenario).summary
    total = summary.total
    return Trial(
        rate_per_s=rate_per_s,
        goodput_per_s=total.goodput_per_s,
        p99_ms=total.latency_ms.p99,
        failed=total.requests - total.succeeded,
        # Requests that the server left unfinished are its fault, not the generator's.
        is_valid=all(reason.code == "unfinished" for reason in summary.reasons),
    )


def highest(run: Callable[[float], Trial], first_per_s: float, *, say: Callable[[str], None]) -> Trial:
    """The trial with the highest rate that holds: doubling or halving, then bisection. Raises `SystemFailed`."""
    low, high, best = 0.0, 0.0, None
    rate_per_s = first_per_s
    while not (low and high) or high > _STEP * low:
        trial = _twice(run, rate_per_s, say)
        if trial.holds:
            low, best = rate_per_s, trial
        else:
            high = rate_per_s
        rate_per_s = (low * high) ** 0.5 if low and high else 2 * low or high / 2
        if rate_per_s < 1.0:
            raise SystemFailed("not even one request per second is answered in time")
    assert best is not None
    return best


def around(run: Callable[[float], Trial], known_per_s: float, *, say: Callable[[str], None]) -> Trial:
    """`highest`, begun next to a rate that is known to be about right: three to five trials."""
    low, high, best = 0.0, 0.0, None
    rate_per_s = known_per_s
    while not (low and high):
        trial = _twice(run, rate_per_s, say)
        if trial.holds:
            low, best, rate_per_s = rate_per_s, trial, rate_per_s * _STEP
        else:
            high, rate_per_s = rate_per_s, rate_per_s / _STEP
        if rate_per_s < known_per_s / 4:
            raise SystemFailed("the rate that held before is far from holding now")
    assert best is not None
    return best


def _twice(run: Callable[[float], Trial], rate_per_s: float, say: Callable[[str], None]) -> Trial:
    """Again if it did not hold: one disturbance must not decide."""
    trial = run(rate_per_s)
    if not trial.holds:
        say(f"  {trial}")
        trial = run(rate_per_s)
    say(f"  {trial}")
    return trial
