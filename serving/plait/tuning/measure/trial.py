"""One trial of a running application: the load, what it used, what it cost, what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from plait.tuning.measure.application import RunningApplication
from plait.tuning.measure.cost import cost_metrics
from plait.tuning.measure.failures import Evidence, of_load
from plait.tuning.measure.load import LoadResult, Watch, joined, look_s, rate_of, run_given, run_search
from plait.tuning.measure.service_subject import ServiceSubject
from plait_autoconfig.jobs.exit_status import count_oom_kills
from plait_autoconfig.jobs.measurer import Samples
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.spec import Prices
from plait_autoconfig.objective import COST_PER_HOUR, GOODPUT_PER_S, Goal, Limit
from plait_autoconfig.trial_load import surely_loses
from plait_autoconfig.values import TrialOutcome
from plait_loadtest.mix.images import DEFAULT_PATH
from plait_loadtest.report.outputs import Outputs
from plait_loadtest.scenario import ImageClass, MixClass, RawClass, Scenario
from plait_loadtest.session import FinishedRun, at_rate
from plait_loadtest.values import RunProgress, StopWhen

_GIB = 1 << 30
_HIGHER_IS_BETTER = frozenset({"offered_per_s", "goodput_per_s", "attainment", SLO_MET})


Running: TypeAlias = RunningApplication | ServiceSubject
"""What takes the load. Processes of `pids` whose name is in `may_end` may end; `reserved` is what it is priced by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load to run: scenarios without an address, each at its rate or, if `search`, in search of the highest one.

    `goal`: the only one of the job, if there is one; `to_beat`: its metric for the best configuration so far, None if
    this measurement is to be complete; `limits`: the job's; `expected_per_s`: the goodput that similar configurations
    reached, 0 if unknown; `rate_per_s`: the rate of all scenarios, in place of their own, if it is not 0.
    """

    scenarios: tuple[Scenario, ...]
    search: bool
    seed: int
    limit_s: float
    prices: Prices
    goal: Goal | None = None
    to_beat: float | None = None
    limits: tuple[Limit, ...] = ()
    expected_per_s: float = 0.0
    rate_per_s: float = 0.0
    guard: Callable[[], StopWhen] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMetrics:
    """The results of a trial. `load_s`: how long requests were sent and awaited."""

    outcome: TrialOutcome
    load_s: float
    samples: Samples
    notes: tuple[str, ...]
    artefacts: tuple[str, ...]
    guard_breached: bool = False


def run_loads(
    running: Running,
    plan: LoadPlan,
    *,
    folder: Path,
    log_path: Path | None,
    say: Callable[[str], None],
    known: Mapping[str, float],
) -> TrialMetrics:
    """Run the load and judge it. `log_path`: where the replicas write; `known`: metrics that are already known.

    Raises `ScenarioError`.
    """
    before, kills, said_bytes = running.pids(), count_oom_kills(), _size(log_path)
    loading = _TrialLoads(running, plan, say, tuple(before))
    loads = loading.searched() if plan.search else loading.offered() if plan.rate_per_s else loading.given()
    evidence = Evidence(
        died=_died(running, before), oom_kills=count_oom_kills() - kills, log=_read_from(log_path, said_bytes)
    )
    breached = bool(loading.breached)
    failed = next((bad for load in loads if (bad := of_load(load, evidence, guard=breached))), None)
    sessions = [session for load in loads for session in load.sessions]
    return TrialMetrics(
        outcome=failed or TrialOutcome(metrics={**known, **loading.metrics(loads)}),
        load_s=sum(session.result.wall_s for session in sessions),
        samples=_samples(loads),
        notes=(*loading.notes, *(note for load in loads for note in load.notes)),
        artefacts=_written(sessions, folder),
        guard_breached=breached,
    )


class _TrialLoads:
    """The loads of one trial. `breached`: why a guard broke in; `notes`: what was decided on the way."""

    def __init__(self, running: Running, plan: LoadPlan, say: Callable[[str], None], pids: tuple[int, ...]) -> None:
        self._running, self._plan, self._say, self._pids = running, plan, say, pids
        self._reserved = running.reserved
        self._started_s = time.monotonic()
        self.breached: list[str] = []
        self.notes: list[str] = []

    def searched(self) -> list[LoadResult]:
        """Search for the highest rate of each scenario."""
        plan = self._plan
        search = partial(
            run_search, expected_per_s=plan.expected_per_s, needed=self._needed, limits=plan.limits,
            whole=plan.to_beat is None,
        )  # fmt: skip
        return self._each(search)

    def given(self) -> list[LoadResult]:
        """Run each scenario at its rate: first a short look, and the rest unless the look surely loses."""
        plan = self._plan
        if plan.to_beat is None or plan.goal is None or not all(map(_is_divisible, plan.scenarios)):
            return self._each(run_given)
        looks = self._each(lambda scenario, watch: run_given(_part(scenario, first=True), watch))
        seen = self.metrics(looks).get(plan.goal.metric)
        if self.breached or seen is None or any(look.ended_early for look in looks):
            return looks
        if surely_loses(plan.goal, seen, plan.to_beat):
            self.notes.append(f"short: {plan.goal.metric} {seen:.4g} will not beat the best's {plan.to_beat:.4g}")
            return looks
        rests = self._each(lambda scenario, watch: run_given(_part(scenario, first=False), watch))
        return [joined(look, rest) for look, rest in zip(looks, rests, strict=False)]

    def offered(self) -> list[LoadResult]:
        """Run each scenario at the rate of the plan, and say whether its SLO held."""
        loads = self._each(
            lambda scenario, watch: run_given(at_rate(scenario, self._plan.rate_per_s, scenario.duration_s), watch)
        )
        held = all(
            not load.ended_early and session.summary.total.slo_met for load in loads for session in load.sessions
        )
        return [
            replace(load, metrics={**load.metrics, SLO_MET: float(held)}) if load.metrics else load for load in loads
        ]

    def metrics(self, loads: Sequence[LoadResult]) -> dict[str, float]:
        """Return the metrics of all scenarios together, and what they cost."""
        samples = _samples(loads)
        found = worst_metrics([load.metrics for load in loads]) | cost_metrics(
            self._plan.prices,
            self._reserved,
            used_cores=samples.cpu_cores,
            memory_gib=samples.memory_bytes / _GIB,
        )
        return _with_ratio(found)

    def _needed(self, load: LoadResult) -> float:
        """Return the goodput with which this configuration would tie with the best one; 0 if that is unknown."""
        plan = self._plan
        if plan.to_beat is None or plan.goal is None or plan.goal.direction != "max":
            return 0.0
        if plan.goal.metric == GOODPUT_PER_S:
            return plan.to_beat
        return plan.to_beat * self.metrics([load])[COST_PER_HOUR] / 3600.0 if plan.goal.has_cost else 0.0

    def _each(self, run: Callable[[Scenario, Watch], LoadResult]) -> list[LoadResult]:
        plan, loads = self._plan, list[LoadResult]()
        for scenario in plan.scenarios:
            there = with_address(scenario, self._running.url, self._running.prefix)
            watch = Watch(
                show=_ProgressTicker(there, self._say),
                stop=() if plan.guard is None else (_noted(plan.guard(), self.breached),),
                limit_s=plan.limit_s - (time.monotonic() - self._started_s),
                pids=self._pids,
            )
            loads.append(run(there.model_copy(update={"seed": plan.seed}), watch))
            if self.breached:
                break
        return loads


def _is_divisible(scenario: Scenario) -> bool:
    """Return whether a look at the scenario's rate spares anything."""
    rate_per_s = rate_of(scenario)
    return rate_per_s is not None and not scenario.count and look_s(scenario, rate_per_s) < scenario.duration_s / 2


def _part(scenario: Scenario, *, first: bool) -> Scenario:
    """Return a short look at the scenario's rate, or the rest of its duration, with other arrivals."""
    rate_per_s = rate_of(scenario)
    assert rate_per_s is not None
    short_s = look_s(scenario, rate_per_s)
    if first:
        return at_rate(scenario, rate_per_s, short_s)
    rest = at_rate(scenario, rate_per_s, max(scenario.duration_s - short_s, 1.0))
    return rest.model_copy(update={"seed": scenario.seed + 1, "warm_up_s": min(scenario.warm_up_s, 0.5)})


def _samples(loads: Sequence[LoadResult]) -> Samples:
    """Return what the replicas used while those runs lasted that count."""
    seconds = sum(load.counted_s for load in loads)
    return Samples(
        cpu_cores=sum(load.used.cpu_s for load in loads) / max(seconds, 1e-3),
        memory_bytes=max((load.used.memory_bytes for load in loads), default=0),
        gpu_memory_bytes=max((load.used.gpu_memory_bytes for load in loads), default=0),
    )


def with_address(scenario: Scenario, url: str, prefix: str) -> Scenario:
    """Return the scenario aimed at this address. `prefix`: the path below which the application is served, or empty."""

    def below(item: MixClass) -> MixClass:
        match item:
            case ImageClass(edits=edits):
                own: dict[str, object] = {"edits": edits.model_copy(update={"path": prefix + edits.path})}
            case RawClass(path=str(path)):
                own = {"path": prefix + path}
            case _:
                own = {}
        return item.model_copy(update=own)

    target = scenario.target
    default = {"images": DEFAULT_PATH, "infer": f"/v2/models/{target.model}/infer", "raw": "/"}[target.api]
    path = prefix + (target.path or default) if prefix else target.path
    target = target.model_copy(update={"url": url, "path": path})
    return scenario.model_copy(update={"target": target, "mix": tuple(map(below, scenario.mix))})


def worst_metrics(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the worst value of each metric over the scenarios, for metrics that all of them have."""
    names = [name for name in of[0] if all(name in each for each in of)] if of else []
    return {name: (min if name in _HIGHER_IS_BETTER else max)(each[name] for each in of) for name in names}


def _with_ratio(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add how many responses in time one unit of money buys."""
    cost = metrics["cost_per_hour"]
    if cost <= 0 or "goodput_per_s" not in metrics:
        return dict(metrics)
    return {**metrics, "goodput_per_cost": metrics["goodput_per_s"] * 3600.0 / cost}


def _died(running: Running, before: Mapping[int, str]) -> tuple[str, ...]:
    """Return the deployments of processes that have ended."""
    there, may_end = running.pids(), running.may_end
    return tuple(name for pid, name in before.items() if pid not in there and name not in may_end)


def _written(sessions: Sequence[FinishedRun], folder: Path) -> tuple[str, ...]:
    names: list[str] = []
    for session in sessions:
        names.append(f"load-{len(names)}.json")
        Outputs(json=str(folder / names[-1])).write_files(session)
    return tuple(names)


def _noted(guard: StopWhen, breached: list[str]) -> StopWhen:
    def watched(progress: RunProgress) -> str | None:
        why = guard(progress)
        if why is not None:
            breached.append(why)
        return why

    return watched


class _ProgressTicker:
    """Reports the progress of the load once a second."""

    def __init__(self, scenario: Scenario, say: Callable[[str], None]) -> None:
        self._total_s = scenario.warm_up_s + scenario.duration_s
        self._say = say
        self._reported_s = -1.0

    def __call__(self, progress: RunProgress) -> None:
        """Report the progress if a second has passed since the last report."""
        if progress.elapsed_s - self._reported_s >= 1.0:
            self._reported_s = progress.elapsed_s
            p95 = "" if progress.recent_p95_ms is None else f", p95 now {progress.recent_p95_ms:.0f} ms"
            self._say(f"load, {max(progress.elapsed_s, 0.0):.0f} of {self._total_s:.0f} s{p95}")


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _read_from(path: Path | None, offset: int) -> str:
    if path is None or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(1 << 20).decode(errors="replace")
