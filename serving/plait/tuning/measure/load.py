"""The load tests of a trial, and their metrics. Open loop, ended early when they cannot meet the SLO.

Metrics, with units in their names: `offered_per_s` (the scenario's nominal rate, not the sampled one),
`attainment` (the share answered in time; in a run that was ended early, all requests that did not come count as
late), `goodput_per_s` (the product of the two), `p50_ms`, `p99_ms`, `error_rate`. Latencies count every answered
request, and for those unanswered when the run was ended, how long they had waited by then: for a run that was ended
early they are lower bounds. A server that works on what it was asked for in such a run is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plait.tuning.measure.early_stop import EarlyStop, Guard
from plait.tuning.measure.usage import ResourceUsage, UsageSampler
from plait_autoconfig.jobs.runner import mentions_out_of_memory
from plait_autoconfig.objective import Limit
from plait_autoconfig.trial_load import Look, LookPlan, best_look, look_for_capacity
from plait_autoconfig.values import FailureKind, TrialOutcome
from plait_loadtest.capacity import judge, observe
from plait_loadtest.histogram import of_ns
from plait_loadtest.judging import judge_records
from plait_loadtest.measure import lag_limit, requests_to_judge
from plait_loadtest.run.echo import is_slow_alone
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import FinishedRun, at_rate, run_scenario, settles
from plait_loadtest.values import OnProgress, RunProgress, StopWhen
from plait_loadtest.values import RequestOutcome as Ended

_OWN_FAULT = frozenset({"send_lag", "echo", "generator", "interrupted", "limit"})
"""Reasons why the numbers describe the load generator rather than the configuration."""
_LOOK = 0.25
"""The length of a short look as a share of the scenario's."""
_AGAIN_S = 0.5
"""The warm-up of all runs of a trial but the first: only queues have to fill again."""
_MIN_LOOK_S = 1.0
_LOST = ("connect", "reset", "truncated")
"""Outcomes of requests whose server went away."""
_STILL_BUSY = "the server was still busy with a run that had ended: what follows may carry its backlog"
_NOTHING_USED = ResourceUsage(cpu_s=0.0, memory_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks during the load: `show` receives its progress, `stop` may end it. `pids`: whose use is measured."""

    show: OnProgress = lambda _: None
    stop: Sequence[StopWhen] = ()
    limit_s: float = float("inf")
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load: metrics; empty if no request finished. `invalid`: why the numbers reflect the load
    generator instead. `ended_early`: why it was; `guarded`: by a guard. `errors` by kind. `sessions`: all that ran;
    `used`: while those ran that count, for `counted_s`."""

    metrics: Mapping[str, float]
    invalid: str = ""
    ended_early: str = ""
    timed_out: bool = False
    guarded: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sessions: tuple[FinishedRun, ...] = field(default=(), repr=False)
    used: ResourceUsage = _NOTHING_USED
    counted_s: float = 0.0


def run_given(scenario: Scenario, watch: Watch) -> LoadResult:
    """Run the load at the scenario's own rate. Raises `ScenarioError`."""

    def limit(progress: RunProgress) -> str | None:
        over = progress.elapsed_s > watch.limit_s
        return f"the trial's time limit left the load {watch.limit_s:.0f} s" if over else None

    stops: list[StopWhen] = [limit, *watch.stop, *filter(None, [EarlyStop.of(scenario)])]
    ended_by: StopWhen | None = None

    def stop(progress: RunProgress) -> str | None:
        nonlocal ended_by
        for each in stops:
            if why := each(progress):
                ended_by = each
                return why
        return None

    with UsageSampler(watch.pids) as sampler:
        session = run_scenario(scenario, on_progress=watch.show, stop_when=stop)
        used = sampler.used()
    summary, early = session.summary, session.result.abandoned
    invalid = [reason.text for reason in summary.reasons if reason.code in _OWN_FAULT]
    notes = [f"ended early: {early}"] if early else []
    if isinstance(ended_by, EarlyStop):  # a guard's user, or the next trial, does not wait
        left_s = watch.limit_s - session.result.wall_s
        if not settles(scenario, limit_s=min(left_s, scenario.duration_s)):
            notes.append(_STILL_BUSY)
    return LoadResult(
        metrics=metrics_of((session,)),
        invalid="; ".join(invalid),
        ended_early=early,
        timed_out=ended_by is limit,
        guarded=isinstance(ended_by, Guard),
        errors=summary.total.errors,
        notes=tuple(notes),
        sessions=(session,),
        used=used,
        counted_s=session.result.wall_s,
    )


def joined(look: LoadResult, rest: LoadResult) -> LoadResult:
    """Return a look and the rest of its run as one load."""
    sessions = (*look.sessions, *rest.sessions)
    errors = {name: look.errors.get(name, 0) + rest.errors.get(name, 0) for name in (*look.errors, *rest.errors)}
    used = ResourceUsage(
        cpu_s=look.used.cpu_s + rest.used.cpu_s,
        memory_bytes=max(look.used.memory_bytes, rest.used.memory_bytes),
        gpu_memory_bytes=max(look.used.gpu_memory_bytes, rest.used.gpu_memory_bytes),
    )
    return replace(
        rest,
        metrics=metrics_of(sessions),
        invalid="; ".join(filter(None, (look.invalid, rest.invalid))),
        errors=errors,
        sessions=sessions,
        used=used,
        counted_s=look.counted_s + rest.counted_s,
    )


def rate_of(scenario: Scenario) -> float | None:
    """Return the scenario's single rate per second; None if it has none."""
    return getattr(scenario.arrivals, "rate_per_s", None) if scenario.arrivals.kind != "ramp" else None


def look_s(scenario: Scenario, rate_per_s: float) -> float:
    """Return how long a short look takes: long enough for its requests to judge the SLO, if the scenario is."""
    needed_s = requests_to_judge(scenario) / rate_per_s
    return min(scenario.duration_s, max(_LOOK * scenario.duration_s, needed_s, _MIN_LOOK_S))


def run_search(
    scenario: Scenario,
    watch: Watch,
    *,
    expected_per_s: float = 0.0,
    needed: Callable[[LoadResult], float] = lambda _: 0.0,
    limits: Sequence[Limit] = (),
    whole: bool = False,
) -> LoadResult:
    """Look for the highest rate at which the configuration holds the SLO and those `limits` that are on what a load
    shows, and return its load at that rate.

    `expected_per_s`: what similar configurations reached; without, it starts from the scenario's rate. `needed`: the
    goodput with which this one would tie with the best so far, by a look at it. `whole`: once it is known where to
    look, no run is a short one, for measurements that others are compared with. Raises `ScenarioError` if the arrivals
    have no single rate.
    """
    loads: list[LoadResult] = []
    started_s = time.monotonic()

    def run(rate_per_s: float, duration_s: float) -> Look:
        warm_up_s = min(scenario.warm_up_s, _AGAIN_S) if loads else scenario.warm_up_s
        own = {"seed": scenario.seed + len(loads), "warm_up_s": warm_up_s}
        trial = at_rate(scenario, rate_per_s, max(duration_s, look_s(scenario, rate_per_s))).model_copy(update=own)
        left_s = watch.limit_s - (time.monotonic() - started_s)
        loads.append(load := run_given(trial, replace(watch, limit_s=left_s)))
        result = load.sessions[0].result
        within = all(each.excess(load.metrics) <= 0.0 for each in limits if each.metric in load.metrics)
        return Look(
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            held=within and not load.ended_early and bool(load.sessions[0].summary.total.slo_met),
            answered_per_s=int((result.records["outcome"] == Ended.OK).sum()) / max(result.wall_s, 1e-3),
            needed_per_s=needed(load),
            valid=not load.invalid or _shows_a_miss(load.sessions[0]),
        )

    given_per_s = rate_of(scenario) or 1.0
    plan = LookPlan.of(
        given_per_s,
        expected_per_s=expected_per_s,
        short_s=look_s(scenario, expected_per_s or given_per_s),
        long_s=scenario.duration_s,
        whole=whole,
    )
    looks = look_for_capacity(run, plan)
    chosen = loads[best_look(looks)]
    said = [f"{each.rate_per_s:.3g}/s {_seen(each)} ({each.duration_s:.3g} s)" for each in looks]
    busy = (_STILL_BUSY,) if any(_STILL_BUSY in load.notes for load in loads) else ()
    sessions = tuple(session for load in loads for session in load.sessions)
    guarded = any(load.guarded for load in loads)
    return replace(chosen, notes=(f"rates: {', '.join(said)}", *busy), sessions=sessions, guarded=guarded)


def _shows_a_miss(session: FinishedRun) -> bool:
    """Return whether an invalid run missed the SLO all the same, by what the server did: an overloaded one on the same
    machine takes the generator's time as well. A host that is slow without the load might be the reason."""
    missed = judge(observe(session.summary))[0] == "missed"
    return missed and not is_slow_alone(lag_limit(session.scenario))


def _seen(look: Look) -> str:
    return ("held" if look.held else "missed") if look.valid else "invalid"


def metrics_of(sessions: Sequence[FinishedRun]) -> dict[str, float]:
    """Return the metrics of runs at one rate, taken together; empty if no request finished, since then there is nothing
    to report."""
    judged, good, expected, failed = 0, 0, 0, 0
    waited_ns: list[np.ndarray] = []
    for session in sessions:
        seen, total = judge_records(session.result, session.scenario), session.summary.total
        unanswered = seen.judged & (seen.records["outcome"] == Ended.INTERRUPTED)
        ended = (seen.answered | unanswered) & (seen.records["done_ns"] >= 0)
        waited_ns.append(np.asarray(seen.waited_ns[ended]))
        judged, good = judged + total.judged, good + total.good
        if session.result.abandoned:  # what we broke off is late, but no error of the server's
            expected += int((~seen.records["warm_up"]).sum())
            failed += int((seen.failed & ~unanswered).sum())
        else:
            expected += total.judged
            failed += round(total.error_rate * total.judged)
    waited = np.concatenate(waited_ns) if waited_ns else np.array([])
    if not judged or not waited.size:
        return {}
    p50_ms, p99_ms = (value / 1e6 for value in of_ns(waited).percentiles_ns((50.0, 99.0)))
    attainment, scenario = good / expected, sessions[0].scenario
    offered_per_s = getattr(scenario.arrivals, "rate_per_s", sessions[0].summary.total.offered_per_s)
    return {
        "offered_per_s": offered_per_s,
        "goodput_per_s": offered_per_s * attainment,
        "attainment": attainment,
        "p50_ms": float(p50_ms),
        "p99_ms": float(p99_ms),
        "error_rate": failed / judged,
    }


def failure_of(
    loaded: LoadResult, *, died: Collection[str] = (), oom_kills: int = 0, log: str = ""
) -> TrialOutcome | None:
    """Return why a completed load is not a valid measurement, as the kind that a designer learns from; None if it is.

    What happened to the replicas meanwhile: `died`, the deployments of processes that have ended; `oom_kills`, how many
    processes the kernel killed for lack of memory; `log`, what was logged.
    """
    errors = ", ".join(f"{count} {kind}" for kind, count in loaded.errors.items())
    if died:
        kind, fate = FailureKind.CRASH, "died"
        if oom_kills or mentions_out_of_memory(log):
            kind, fate = FailureKind.OUT_OF_MEMORY, "was killed for memory"
        who = ", ".join(sorted(set(died)))
        return TrialOutcome.failed(kind, f"a replica of {who} {fate} under load ({errors or 'no request failed'})")
    if loaded.guarded:
        kind = FailureKind.CRASH if "requests failed" in loaded.ended_early else FailureKind.TIME_OUT
        return TrialOutcome.failed(kind, loaded.ended_early)
    if loaded.timed_out:
        return TrialOutcome.failed(FailureKind.TIME_OUT, loaded.ended_early)
    if loaded.invalid:
        return TrialOutcome.failed(FailureKind.INVALID, loaded.invalid)
    if not loaded.metrics:
        kind = FailureKind.CRASH if any(name in loaded.errors for name in _LOST) else FailureKind.TIME_OUT
        return TrialOutcome.failed(kind, f"not one request was answered ({errors or 'nothing was sent'})")
    return None
