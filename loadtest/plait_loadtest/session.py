"""One run from a scenario to its numbers: plan, run, measure, judge. The only module that combines these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait_loadtest.capacity import CapacitySearch, ClassTarget, Observed, observe
from plait_loadtest.errors import ScenarioError
from plait_loadtest.judging import percentile_of, slos_of
from plait_loadtest.measure import RunSummary, min_requests, summarise
from plait_loadtest.plan import expected_requests, make_plan
from plait_loadtest.scenario import ClosedLoopCallers, ConstantArrivals, GammaArrivals, PoissonArrivals, Scenario
from plait_loadtest.thresholds import Threshold, Verdict, check, parse_all
from plait_loadtest.values import WHOLE, HostPart, OnProgress, RunProgress, RunResult, StopWhen

_UNANSWERED = frozenset({"unfinished", "timeout"})
_STARTS_S = 10.0  # what the processes of a run, and of the next look at the server, take to start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun:
    """A finished run, or a host's part of one."""

    scenario: Scenario
    result: RunResult
    summary: RunSummary
    verdicts: tuple[Verdict, ...]
    part: HostPart = WHOLE


def run_scenario(
    scenario: Scenario,
    *,
    part: HostPart = WHOLE,
    start_unix_s: float | None = None,
    on_progress: OnProgress = lambda _: None,
    stop_when: StopWhen = lambda _: None,
) -> FinishedRun:
    """Run a scenario, or one host's part of it. Raises `ScenarioError` before anything is sent if it cannot be run.

    `stop_when` is called with the progress a few times a second; if it returns a text, the run ends early and is
    invalid for that reason.
    """
    from plait_loadtest.run.coordinator import run
    from plait_loadtest.run.processes import ended_by_signal

    thresholds = parse_all(scenario.thresholds, kinds=[item.name for item in scenario.mix])
    plan = make_plan(scenario)
    result = run(plan, scenario, host=part, start_unix_s=start_unix_s, on_progress=on_progress, stop_when=stop_when)
    with ended_by_signal(lambda: None):  # what was measured must not be lost
        return finished(result, scenario, thresholds, part=part)


def finished(
    result: RunResult, scenario: Scenario, thresholds: Iterable[Threshold], *, part: HostPart = WHOLE
) -> FinishedRun:
    """Return a run with its summary and what its thresholds say."""
    summary = summarise(result, scenario)
    return FinishedRun(
        scenario=scenario, result=result, summary=summary, verdicts=check(thresholds, summary), part=part
    )


def settles(scenario: Scenario, *, limit_s: float) -> bool:
    """Ask for one thing at a time until an answer comes in time, so that nothing of an earlier load is waited for any
    more; return whether one did within `limit_s`. What a server computes for nobody beside that stays unseen."""
    slos = [slo.latency_ms for _, slo in slos_of(scenario)]

    def is_quick(progress: RunProgress) -> str | None:
        quick = progress.recent_p95_ms is not None and progress.recent_p95_ms <= max(slos, default=float("inf"))
        return "it answers in time" if quick and progress.ok else None

    if limit_s <= 0.0:
        return False
    limits = scenario.limits.model_copy(update={"drain_s": 0.0, "cancel_rate": 0.0})
    alone: dict[str, object] = {"arrivals": ClosedLoopCallers(concurrency=1), "duration_s": limit_s, "limits": limits}
    alone |= {"warm_up_s": 0.0, "count": None, "thresholds": ()}
    return bool(run_scenario(scenario.model_copy(update=alone), stop_when=is_quick).result.abandoned)


def foreseen(scenario: Scenario) -> list[str]:
    """Return a sentence for each class whose SLO the run will have too few requests to judge. Raises `ScenarioError` if
    a threshold cannot be read."""
    parse_all(scenario.thresholds, kinds=[item.name for item in scenario.mix])
    expected = expected_requests(scenario)
    if expected is None:
        return []
    whole = sum(item.weight for item in scenario.mix)
    found = []
    for item, slo in slos_of(scenario):
        percentile, planned = percentile_of(slo, item.api), expected * item.weight / whole
        if planned < (needed := min_requests(percentile)):
            asked = f"{item.name}: {percentile:g} % within {slo.latency_ms:g} ms takes {needed} requests to judge"
            found.append(f"{asked}, and some {planned:.0f} are planned (--duration, --rate, --count)")
    return found


def at_rate(scenario: Scenario, rate_per_s: float, duration_s: float) -> Scenario:
    """Return the same scenario at another rate, for a trial of the capacity search.

    Raises `ScenarioError` if its arrivals have no single rate. Requests still in flight three SLOs after the last
    arrival have missed by any measure, so the run does not wait longer for them.
    """
    arrivals = scenario.arrivals
    if not isinstance(arrivals, ConstantArrivals | PoissonArrivals | GammaArrivals):
        raise ScenarioError(
            f"arrivals.kind: {arrivals.kind} has no single rate to search; use poisson, gamma or constant"
        )
    drain_s = max(5.0, 3.0 * max((slo.latency_ms for _, slo in slos_of(scenario)), default=0.0) / 1e3)
    limits = scenario.limits.model_copy(update={"drain_s": min(scenario.limits.drain_s, drain_s)})
    return scenario.model_copy(
        update={
            "arrivals": arrivals.model_copy(update={"rate_per_s": rate_per_s}),
            "duration_s": duration_s, "count": None, "limits": limits, "thresholds": (),
        }
    )  # fmt: skip


def search_of(scenario: Scenario, *, beyond: float | None = None, within_s: float | None = None) -> CapacitySearch:
    """Return the search that a scenario asks for: its rate is the first, its duration the minimum of a trial.

    Raises `ScenarioError` without an SLO.
    """
    first = at_rate(scenario, 1.0, 1.0)  # refuses arrivals without a rate
    weights = sum(item.weight for item in first.mix)
    needs = tuple(
        ClassTarget(percentile=percentile_of(slo, item.api), latency_ms=slo.latency_ms, share=item.weight / weights)
        for item, slo in slos_of(first)
    )
    if not needs:
        raise ScenarioError("slo: a capacity search needs one (--slo-ms)")
    rate = getattr(scenario.arrivals, "rate_per_s", 1.0)
    return CapacitySearch(
        needs=needs,
        first_per_s=rate,
        min_trial_s=scenario.duration_s,
        beyond=beyond,
        spare_s=scenario.warm_up_s + 2.0 * first.limits.drain_s + _STARTS_S,  # its last answers, then `settles`
        within_s=within_s,
    )


def measure_at(
    scenario: Scenario,
    *,
    on_progress: OnProgress = lambda _: None,
    keep: Callable[[FinishedRun], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Callable[[float, float], Observed]:
    """Return the `capacity.Measure` that actually runs the load; seeds differ by run, and `keep` receives each run.

    After a run that did not wait for all answers it waits until the server `settles`, or says that it did not."""
    runs = 0

    def measure(rate_per_s: float, duration_s: float) -> Observed:
        nonlocal runs
        runs += 1
        # The same arrivals again would repeat the same luck.
        trial = at_rate(scenario, rate_per_s, duration_s).model_copy(update={"seed": scenario.seed + runs})
        session = run_scenario(trial, on_progress=on_progress)
        keep(session)
        left = session.summary.total.errors.keys() & _UNANSWERED
        if left and not session.result.interrupted and not settles(trial, limit_s=trial.limits.drain_s):
            say("the server is still busy with this run: the next may meet its backlog")
        return observe(session.summary)

    return measure
