"""Goodput: the highest rate at which a server keeps its p99 within the limit; open loop, Poisson.

The search and the rule are the load generator's own (`plait_loadtest.capacity`): a rate holds when its run shows
with 99 % confidence that 99 % of the answers are in time, which takes at least 459 requests (like MLPerf's early
stopping); a rate that misses is not retried; the rate that the search ends with is run once more, twice as long, and
only that run's number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait_bench.errors import SystemFailed
from plait_loadtest.capacity import RETRIED, CapacitySearch, ClassCount, ClassTarget, Measure, Observed, find_capacity
from plait_loadtest.measure import RunSummary
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    GeneratorLimits,
    LoadTarget,
    PoissonArrivals,
    RawClass,
    Scenario,
    Slo,
)
from plait_loadtest.session import at_rate, run_scenario

__all__ = ["CALLERS", "LIMIT_MS", "MAX_LOAD_S", "HeldRate", "load_on", "search_goodput", "throughput_per_s"]

LIMIT_MS = 50.0
"""The default limit on a server's p99: production asks for tens of milliseconds (Prism), MLPerf's DLRM for 60."""

MAX_LOAD_S = 120.0
"""The max duration of a judged load, so a rate below 4 per second (459 requests in that time) cannot be shown to
hold."""

CALLERS = 16

_PERCENTILE = 99.0
_MAX_SEARCH_FACTOR = 50.0
_CLOSED_S, _WARM_UP_S = 3.0, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRate:
    """The highest rate that held, and the answers in time per second at it. `confirmed`: by a second, longer run."""

    rate_per_s: float
    goodput_per_s: float
    confirmed: bool


def search_goodput(
    load: Measure, *, first_per_s: float, limit_ms: float, trial: bool, say: Callable[[str], None]
) -> HeldRate:
    """Search from a rate that should be about right. A trial of a layout is coarser, by the same rule.

    Raises `SystemFailed` if next to no rate holds.
    """
    search = CapacitySearch(
        needs=(ClassTarget(percentile=_PERCENTILE, latency_ms=limit_ms, share=1.0),),
        first_per_s=first_per_s,
        min_per_s=first_per_s / _MAX_SEARCH_FACTOR,
        min_trial_s=2.0 if trial else 5.0,
        tolerance=0.2 if trial else 0.05,
        max_trials=10 if trial else 24,
    )
    found = find_capacity(load, search, say=lambda line: say(f"  {line}"))
    if found.rate_per_s is None:
        raise SystemFailed(f"{found.statement}: p99 within {limit_ms:g} ms, from {first_per_s:.4g}/s down")
    held = [each for each in found.trials if each.rate_per_s == found.rate_per_s and each.verdict == "held"]
    return HeldRate(
        rate_per_s=found.rate_per_s, goodput_per_s=held[-1].observed.goodput_per_s, confirmed=found.confirmed
    )


def load_on(
    url: str, bodies: Sequence[Path], header_bytes: int, *, limit_ms: float, seed: int, settle: Callable[[], object]
) -> Measure:
    """Return what runs the load at a rate; every body is as likely as every other, each run's arrivals differ.

    ``settle``: returns when the server has worked off what the last load left, which is not the next one's fault.

    Latency counts from the scheduled time, so what the generator does late, on cores that it shares with the server,
    counts too: alike for all systems.
    """
    scenario = _scenario(url, bodies, header_bytes, PoissonArrivals(rate_per_s=1.0), limit_ms=limit_ms)
    runs = 0

    def load(rate_per_s: float, duration_s: float) -> Observed:
        nonlocal runs
        runs += 1
        settle()
        at = at_rate(scenario, rate_per_s, min(duration_s, MAX_LOAD_S)).model_copy(update={"seed": seed + runs})
        return observed(run_scenario(at).summary, limit_ms)

    return load


def observed(summary: RunSummary, limit_ms: float) -> Observed:
    """Judge all requests together: the bodies are separate classes only because each is a file of its own."""
    total = summary.total
    everything = ClassCount(
        name="all",
        percentile=_PERCENTILE,
        latency_ms=limit_ms,
        judged=total.judged,
        good=total.good,
        blamed=total.blamed,
    )
    return Observed(
        classes=(everything,),
        achieved_per_s=total.achieved_per_s,
        goodput_per_s=total.goodput_per_s,
        invalid=tuple(
            (reason.code, reason.text) for reason in summary.reasons if reason.code not in {"too_few", *RETRIED}
        ),
    )


def throughput_per_s(url: str, bodies: Sequence[Path], header_bytes: int) -> float:
    """Measure a closed loop of `CALLERS` callers: warms the server up, and gives a rate to start the search from."""
    scenario = _scenario(url, bodies, header_bytes, ClosedLoopCallers(concurrency=CALLERS), limit_ms=LIMIT_MS)
    return run_scenario(scenario).summary.total.achieved_per_s


def _scenario(
    url: str,
    bodies: Sequence[Path],
    header_bytes: int,
    arrivals: PoissonArrivals | ClosedLoopCallers,
    *,
    limit_ms: float,
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
        duration_s=_CLOSED_S,
        warm_up_s=_WARM_UP_S,
        seed=0,
        slo=Slo(latency_ms=limit_ms, percentile=_PERCENTILE),
        limits=GeneratorLimits(drain_s=3.0),
    )
