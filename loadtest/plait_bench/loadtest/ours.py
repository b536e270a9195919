"""Our generator at one rate, and the highest rate at which its runs are valid.

`python -m plait_bench.loadtest.ours URL RATE SECONDS` is one run; it prints its own statistics as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plait_bench.errors import SystemFailed
from plait_bench.loadtest.window import NoopServer, ThroughputWindow, measure
from plait_loadtest.plan import make_plan
from plait_loadtest.run.coordinator import run
from plait_loadtest.scenario import GeneratorLimits, LoadTarget, PoissonArrivals, RawClass, Scenario
from plait_loadtest.values import RequestOutcome

PROCESSES = 2
LAG_LIMIT_MS = 5.0
"""The max p99 send lag of a valid run."""

_SETTLE_S = 1.0
_FIRST_PER_S = 4000.0
_STEP = 1.05  # the rate is found to 5 %


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorTrial:
    """One run: what the server counted, and whether the run is valid."""

    rate_per_s: float
    window: ThroughputWindow
    lag_p99_ms: float
    errors: int

    @property
    def is_valid(self) -> bool:
        """Whether the run was on time, without errors, and at the offered rate (Poisson counts scatter: within 2 %)."""
        return self.lag_p99_ms <= LAG_LIMIT_MS and self.errors == 0 and self.window.per_s >= 0.98 * self.rate_per_s


def try_rate(server: NoopServer, rate_per_s: float, *, seconds: float) -> GeneratorTrial:
    """Make one run with Poisson arrivals. Raises `SystemFailed`."""
    whole_s = seconds + _SETTLE_S + 0.5  # the window ends before the load does
    command = [sys.executable, "-m", __name__, server.url, str(rate_per_s), str(whole_s)]
    window, told = measure(command, server, settle_s=_SETTLE_S, seconds=seconds)
    facts = json.loads(told)
    return GeneratorTrial(rate_per_s=rate_per_s, window=window, lag_p99_ms=facts["lag_p99_ms"], errors=facts["errors"])


def highest_rate(attempt: Callable[[float], GeneratorTrial], *, say: Callable[[str], None]) -> float:
    """Find the highest rate whose run was valid: doubling, then bisection to 5 %. Raises `SystemFailed` if none is."""
    low, high = 0.0, _FIRST_PER_S
    while _passes(attempt, high, say):
        low, high = high, 2 * high
    if low == 0.0:
        raise SystemFailed(f"not even {high:.0f} requests/s could be sent on time")
    while high > _STEP * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _passes(attempt, middle, say) else (low, middle)
    return low


def hold(
    attempt: Callable[[float], GeneratorTrial], rate_per_s: float, *, say: Callable[[str], None]
) -> GeneratorTrial:
    """Return a valid run at that rate, or at the first lower one (5 % steps) that is valid. Raises `SystemFailed` if
    none is."""
    while not (trial := attempt(rate_per_s)).is_valid:
        say(_sentence(trial))
        rate_per_s /= _STEP
        if rate_per_s < _FIRST_PER_S / 2:
            raise SystemFailed("no rate held: this machine is too busy")
    return trial


def _passes(attempt: Callable[[float], GeneratorTrial], rate_per_s: float, say: Callable[[str], None]) -> bool:
    """Return whether a run is valid; it is retried once, so that one disturbance does not end the search."""
    for _ in range(2):
        trial = attempt(rate_per_s)
        say(_sentence(trial))
        if trial.is_valid:
            return True
    return False


def _sentence(trial: GeneratorTrial) -> str:
    return (
        f"plait: {trial.rate_per_s:.0f}/s offered, {trial.window.per_s:.0f}/s served, p99 send lag "
        f"{trial.lag_p99_ms:.2f} ms, {trial.errors} errors: {'valid' if trial.is_valid else 'not valid'}"
    )


def main(url: str, rate_per_s: float, seconds: float) -> None:
    """Send the load and print the measured window as JSON."""
    scenario = Scenario(
        name="bench",
        target=LoadTarget(url=url, api="raw"),
        mix=(RawClass(),),
        arrivals=PoissonArrivals(rate_per_s=rate_per_s),
        duration_s=seconds,
        processes=PROCESSES,
        limits=GeneratorLimits(drain_s=5.0),
    )
    records = run(make_plan(scenario), scenario).records
    sent = records[records["sent_ns"] >= 0]
    lag_ms = (sent["sent_ns"] - sent["scheduled_ns"]) / 1e6
    errors = int((records["outcome"] != RequestOutcome.OK).sum())
    print(json.dumps({"lag_p99_ms": float(np.percentile(lag_ms, 99)), "errors": errors}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
