"""One load test of a trial, and its metrics. Open loop, ended early when it cannot meet the SLO.

Metrics, with units in their names: `offered_per_s` (the scenario's nominal rate, not the sampled one),
`attainment` (the share answered in time; in a run that was ended early, all requests that did not come count as
late), `goodput_per_s` (the product of the two), `p50_ms`, `p99_ms`, `error_rate`. Latencies count every answered
request, and for those unanswered when the run was ended, how long they had waited by then: for a run that was ended
early they are lower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plait.tuning.measure.early_stop import EarlyStop, needs_of
from plait.tuning.measure.rate_search import RateResult, search_rate
from plait_loadtest.histogram import of_ns
from plait_loadtest.judging import judge_records
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import FinishedRun, at_rate, run_scenario
from plait_loadtest.values import OnProgress, RunProgress, StopWhen
from plait_loadtest.values import RequestOutcome as Ended

__all__ = ["LoadResult", "Watch", "metrics_of", "run_given", "run_search"]

_OWN_FAULT = frozenset({"send_lag", "echo", "generator", "interrupted", "not_sent"})
"""Reasons why the numbers describe the load generator rather than the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks during the load: `show` receives its progress, `stop` may end it."""

    show: OnProgress = lambda _: None
    stop: Sequence[StopWhen] = ()
    limit_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load: metrics; empty if no request finished. `invalid`: why the numbers reflect the load
    generator instead. `ended_early`: why it was. `errors` by kind."""

    metrics: Mapping[str, float]
    invalid: str = ""
    ended_early: str = ""
    timed_out: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sessions: tuple[FinishedRun, ...] = field(default=(), repr=False)


def run_given(scenario: Scenario, watch: Watch) -> LoadResult:
    """Run the load at the scenario's own rate. Raises `ScenarioError`."""
    stops = [*watch.stop]
    if (needs := needs_of(scenario)) is not None:
        stops.append(EarlyStop(needs))
    hit_limit = False

    def stop(progress: RunProgress) -> str | None:
        nonlocal hit_limit
        if progress.elapsed_s > watch.limit_s:
            hit_limit = True
            return f"the trial's time limit left the load {watch.limit_s:.0f} s"
        return next((why for each in stops if (why := each(progress))), None)

    session = run_scenario(scenario, on_progress=watch.show, stop_when=stop)
    summary, early = session.summary, session.result.abandoned
    invalid = [reason.text for reason in summary.reasons if reason.code in _OWN_FAULT]
    return LoadResult(
        metrics=metrics_of(session),
        invalid="; ".join(invalid),
        ended_early=early,
        timed_out=hit_limit,
        errors=summary.total.errors,
        notes=(f"ended early: {early}",) if early else (),
        sessions=(session,),
    )


def run_search(scenario: Scenario, watch: Watch, *, runs: int = 5) -> LoadResult:
    """Search briefly, from the scenario's rate, for the highest goodput of the configuration while it holds the SLO.

    Raises `ScenarioError` if the arrivals have no single rate.
    """
    loads: list[LoadResult] = []

    def run(rate_per_s: float) -> RateResult:
        trial = at_rate(scenario, rate_per_s, scenario.duration_s).model_copy(
            update={"seed": scenario.seed + len(loads)}
        )
        loads.append(run_given(trial, watch))
        metrics = loads[-1].metrics
        good = metrics.get("goodput_per_s", 0.0)
        held = not loads[-1].ended_early and bool(loads[-1].sessions[0].summary.total.slo_met)
        return RateResult(rate_per_s=rate_per_s, held=held, goodput_per_s=good)

    tried = search_rate(run, getattr(scenario.arrivals, "rate_per_s", 1.0), runs=runs)
    held = [index for index, each in enumerate(tried) if each.held]
    best = max(held, key=lambda index: tried[index].goodput_per_s, default=len(tried) - 1)
    rates = ", ".join(f"{each.rate_per_s:.3g}/s {'held' if each.held else 'missed'}" for each in tried)
    chosen = loads[best]
    return LoadResult(
        metrics=chosen.metrics,
        invalid=chosen.invalid,
        ended_early=chosen.ended_early,
        timed_out=chosen.timed_out,
        errors=chosen.errors,
        notes=(f"rates: {rates}",),
        sessions=tuple(session for load in loads for session in load.sessions),
    )


def metrics_of(session: FinishedRun) -> dict[str, float]:
    """Return the metrics of a run; empty if no request finished, since then there is nothing to report."""
    total = session.summary.total
    judged = judge_records(session.result, session.scenario)
    unanswered = judged.judged & (judged.records["outcome"] == Ended.INTERRUPTED)
    waited_ns = judged.waited_ns[(judged.answered | unanswered) & (judged.records["done_ns"] >= 0)]
    if not total.judged or not waited_ns.size:
        return {}
    p50_ms, p99_ms = (value / 1e6 for value in of_ns(np.asarray(waited_ns)).percentiles_ns((50.0, 99.0)))
    attainment, error_rate = total.good / total.judged, total.error_rate
    if session.result.abandoned:  # what we broke off is late, but no error of the server's
        attainment = total.good / int((~judged.records["warm_up"]).sum())
        error_rate = int((judged.failed & ~unanswered).sum()) / total.judged
    offered_per_s = getattr(session.scenario.arrivals, "rate_per_s", total.offered_per_s)
    return {
        "offered_per_s": offered_per_s,
        "goodput_per_s": offered_per_s * attainment,
        "attainment": attainment,
        "p50_ms": float(p50_ms),
        "p99_ms": float(p99_ms),
        "error_rate": error_rate,
    }
