"""The measurer of `plait_autoconfig.jobs` for all that answers over HTTP: plait's own applications and any service.

Metrics of a trial: those of `load`, and `cpu_cores` (busy, mean), `memory_gib` (maximum), `cost_per_hour` (`cost`),
`goodput_per_cost` (responses in time per unit of money); if the job asks for it, `quality_drift` (`quality`).
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from plait.errors import PlaitError
from plait.server.state import state_root
from plait.tuning.measure.application import NotReady, RefusedStart, RunningApplication, compose_of
from plait.tuning.measure.cost import cost_metrics
from plait.tuning.measure.load import LoadResult, Watch, failure_of, joined, look_s, rate_of, run_given, run_search
from plait.tuning.measure.plait_subject import PlaitSubject
from plait.tuning.measure.quality import QUALITY_DRIFT, NoAnswer, quality_drift
from plait.tuning.measure.service_subject import ServiceSubject
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, Samples, Say
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.runner import count_oom_kills, mentions_out_of_memory, said_since, size_of
from plait_autoconfig.jobs.spec import JobSpec, ServiceTarget
from plait_autoconfig.objective import COST_PER_HOUR, GOODPUT_PER_S
from plait_autoconfig.trial_load import surely_loses
from plait_autoconfig.values import Config, FailureKind, Hardware, TrialOutcome, TuningSubject
from plait_kernels.cores import usable_cores
from plait_loadtest.mix.images import DEFAULT_PATH
from plait_loadtest.report.outputs import Outputs
from plait_loadtest.scenario import ImageClass, MixClass, RawClass, Scenario
from plait_loadtest.session import FinishedRun, at_rate
from plait_loadtest.values import OnProgress, RunProgress

_SPARE_S = 5.0
"""The part of a trial's time reserved for what follows the load, so that we end the trial before our parent does."""

_GIB = 1 << 30
_HIGHER_IS_BETTER = frozenset({"offered_per_s", "goodput_per_s", "attainment", SLO_MET})

Subject: TypeAlias = PlaitSubject | ServiceSubject
"""What is tuned: brings a configuration into force, says what runs, and gives back what it found."""


class PlaitMeasurer:
    """The `plait_autoconfig.jobs.measurer.Measurer` for all that answers over HTTP."""

    def __init__(self, *, folder: Path, live: bool = False, commands: bool = False, compose: str = "") -> None:
        """`live`: the command allowed it. `commands`: the job may name some, for it is its user's. `compose`:
        `module:function` that makes the Serve application of a configuration, in place of plait's own."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._folder, self._root, self._compose = folder, state_root(os.environ), compose_of(compose)
        self._may_be_live, self._may_run_commands = live, commands
        self._subject: Subject | None = None

    def check(self, spec: JobSpec) -> TuningSubject:
        """Refuse what cannot be measured; then start the clone's Ray, or attach to the live service."""
        if not isinstance(spec.target, ServiceTarget):
            if spec.target.live and not self._may_be_live:
                raise JobRefused("target.live: the service that users are on is only tuned with the flag --live")
            self._subject = PlaitSubject(spec, spec.target, compose=self._compose, root=self._root, folder=self._folder)
        elif self._may_run_commands:
            self._subject = ServiceSubject(spec, spec.target, root=self._root, folder=self._folder)
        else:
            raise JobRefused("target: commands are run for the jobs of `plait tune run` only")
        return _described(self._subject)

    def measure(self, task: MeasurementTask, say: Say) -> Measured:
        """Apply the configuration, run the load and judge it. A trial that a guard stops is rolled back at once."""
        started_s = time.monotonic()
        subject = self._checked()
        kills = count_oom_kills()
        say("applying the configuration")
        try:
            applied = subject.apply(task.config, limit_s=task.limit_s - _SPARE_S)
            done = f"{applied.done} in {time.monotonic() - started_s:.1f} s" if applied.done else "nothing to change"
            drifted = self._drifted(task, say)
        except (RefusedStart, NotReady, NoAnswer) as error:
            kind, note = FailureKind.TIME_OUT, "never ready"
            if isinstance(error, RefusedStart):
                kind = refused_start(str(error), oom_kills=count_oom_kills() - kills)
            elif isinstance(error, NoAnswer):
                kind, note = FailureKind.CRASH, "no answer to a probe"
            subject.after_failure()
            outcome = TrialOutcome.failed(kind, str(error))
            return Measured(outcome=outcome, note=note)
        left_s = task.limit_s - _SPARE_S - (time.monotonic() - started_s)
        shown = run_loads(subject, task, limit_s=left_s, say=say, known=drifted)
        if shown.outcome.failure is not None and not shown.outcome.invalid:  # also if a guard broke in
            subject.after_failure()
        seen = {name: value for name, value in shown.outcome.metrics.items() if name not in subject.unseen}
        return replace(
            shown,
            outcome=replace(shown.outcome, metrics=seen),
            restarted=applied.restarted,
            note="; ".join(filter(None, (done, *applied.notes, shown.note))),
        )

    def apply(self, config: Config) -> None:
        """Leave the live service with this configuration permanently."""
        self._checked().keep(config)

    def restore(self) -> None:
        """Give back a running service as it was."""
        if self._subject is not None:
            self._subject.restore()

    def close(self) -> None:
        """Remove what was started, or disconnect from the live service."""
        subject, self._subject = self._subject, None
        if subject is not None:
            subject.close()

    def _drifted(self, task: MeasurementTask, say: Say) -> dict[str, float]:
        """Return the metric of `quality`, if the job asks for it."""
        subject = self._checked()
        if QUALITY_DRIFT not in subject.spec.goal.metrics:
            return {}
        say("asking the probes")
        running = subject.running
        scenarios = [with_address(scenario, running.url, running.prefix) for scenario in subject.scenarios]
        return {QUALITY_DRIFT: quality_drift(scenarios, self._folder, is_default=task.config == subject.spec.default)}

    def _checked(self) -> Subject:
        if self._subject is None:
            raise PlaitError("check comes first")
        return self._subject


def refused_start(reason: str, *, oom_kills: int) -> FailureKind:
    """Return what kept a configuration from being brought up, by what Serve says and how many processes the kernel
    killed for memory meanwhile."""
    return FailureKind.OUT_OF_MEMORY if oom_kills or mentions_out_of_memory(reason) else FailureKind.REFUSED_START


def _described(subject: Subject) -> TuningSubject:
    """Return what the library remembers of the service, its load and this machine."""
    rates = [getattr(each.arrivals, "rate_per_s", 0.0) for each in subject.scenarios]
    slos = [slo.latency_ms for each in subject.scenarios for slo in (each.slo, *each.slos.values()) if slo is not None]
    workload = {"offered_per_s": max(rates), "slo_ms": min(slos, default=0.0), "scenarios": float(len(rates))}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, machine = usable_cores(), platform.machine()
    price = subject.spec.prices.core * cores
    versions = {name: version(name) for name in ("plait", "ray", "torch")}
    return TuningSubject(
        service=subject.name,
        workload={**workload, **subject.features},
        hardware=Hardware(name=machine, cpus=cores, memory_bytes=memory_bytes, price_per_hour=price),
        versions=versions | {"python": platform.python_version()},
        costs=subject.costs,
    )


# ---- the load --------------------------------------------------------------------------------------------------------


def run_loads(
    subject: Subject, task: MeasurementTask, *, limit_s: float, say: Say, known: Mapping[str, float]
) -> Measured:
    """Run the load of a task on what runs and judge it; its note says what was decided on the way. `known`: metrics
    that are already known.

    Raises `ScenarioError`.
    """
    log_from, before, kills = size_of(subject.log_path), subject.running.pids(), count_oom_kills()
    loading = _TrialLoads(subject, task, limit_s=limit_s, say=say, pids=tuple(before))
    searches = subject.spec.is_capacity_search and not task.rate_per_s
    loads = loading.searched() if searches else loading.offered() if task.rate_per_s else loading.given()
    died, oom_kills = _died(subject.running, before), count_oom_kills() - kills
    log = said_since(subject.log_path, log_from)
    failed = next((bad for load in loads if (bad := failure_of(load, died=died, oom_kills=oom_kills, log=log))), None)
    sessions = [session for load in loads for session in load.sessions]
    return Measured(
        outcome=failed or TrialOutcome(metrics={**known, **loading.metrics(loads)}),
        load_s=sum(session.result.wall_s for session in sessions),
        samples=_samples(loads),
        artefacts=_written(sessions, task.folder),
        note="; ".join((*loading.notes, *(note for load in loads for note in load.notes))),
    )


class _TrialLoads:
    """The loads of one trial: scenarios without an address, each at its rate, at the task's, or in search of the
    highest one. `notes`: what was decided on the way."""

    def __init__(
        self, subject: Subject, task: MeasurementTask, *, limit_s: float, say: Say, pids: tuple[int, ...]
    ) -> None:
        self._subject, self._spec, self._task, self._say, self._pids = subject, subject.spec, task, say, pids
        goals = subject.spec.goal.goals
        self._goal = goals[0] if len(goals) == 1 else None
        self._reserved = subject.running.reserved
        self._until_s = time.monotonic() + limit_s
        self.notes: list[str] = []

    def searched(self) -> list[LoadResult]:
        """Search for the highest rate of each scenario."""
        search = partial(
            run_search, expected_per_s=self._task.expected_per_s, needed=self._needed, limits=self._spec.goal.limits,
            whole=self._task.to_beat is None,
        )  # fmt: skip
        return self._each(search)

    def given(self) -> list[LoadResult]:
        """Run each scenario at its rate: first a short look, and the rest unless the look surely loses."""
        goal, to_beat = self._goal, self._task.to_beat
        if to_beat is None or goal is None or not all(map(_is_divisible, self._subject.scenarios)):
            return self._each(run_given)
        looks = self._each(lambda scenario, watch: run_given(_part(scenario, first=True), watch))
        seen = self.metrics(looks).get(goal.metric)
        if seen is None or any(look.ended_early for look in looks):
            return looks
        if surely_loses(goal, seen, to_beat):
            self.notes.append(f"short: {goal.metric} {seen:.4g} will not beat the best's {to_beat:.4g}")
            return looks
        rests = self._each(lambda scenario, watch: run_given(_part(scenario, first=False), watch))
        return [joined(look, rest) for look, rest in zip(looks, rests, strict=False)]

    def offered(self) -> list[LoadResult]:
        """Run each scenario at the rate of the task, and say whether its SLO held."""

        def run(scenario: Scenario, watch: Watch) -> LoadResult:
            load = run_given(at_rate(scenario, self._task.rate_per_s, scenario.duration_s), watch)
            held = not load.ended_early and bool(load.sessions[0].summary.total.slo_met)
            return replace(load, metrics={**load.metrics, SLO_MET: float(held)}) if load.metrics else load

        return self._each(run)

    def metrics(self, loads: Sequence[LoadResult]) -> dict[str, float]:
        """Return the metrics of all scenarios together, what they cost, and how many responses in time one unit of
        money buys."""
        samples, prices = _samples(loads), self._spec.prices
        memory_gib = samples.memory_bytes / _GIB
        found = worst_metrics([load.metrics for load in loads])
        found |= cost_metrics(prices, self._reserved, used_cores=samples.cpu_cores, memory_gib=memory_gib)
        if GOODPUT_PER_S in found and found[COST_PER_HOUR] > 0:
            found["goodput_per_cost"] = found[GOODPUT_PER_S] * 3600.0 / found[COST_PER_HOUR]
        return found

    def _needed(self, load: LoadResult) -> float:
        """Return the goodput with which this configuration would tie with the best one; 0 if that is unknown."""
        goal, to_beat = self._goal, self._task.to_beat
        if to_beat is None or goal is None or goal.direction != "max":
            return 0.0
        if goal.metric == GOODPUT_PER_S:
            return to_beat
        return to_beat * self.metrics([load])[COST_PER_HOUR] / 3600.0 if goal.has_cost else 0.0

    def _each(self, run: Callable[[Scenario, Watch], LoadResult]) -> list[LoadResult]:
        running, guard, loads = self._subject.running, self._subject.guard, list[LoadResult]()
        for scenario in self._subject.scenarios:
            there = with_address(scenario, running.url, running.prefix)
            watch = Watch(
                show=_ticker(there, self._say),
                stop=() if guard is None else (replace(guard),),
                limit_s=self._until_s - time.monotonic(),
                pids=self._pids,
            )
            loads.append(run(there.model_copy(update={"seed": self._task.seed}), watch))
            if loads[-1].guarded:
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


def _died(running: RunningApplication | ServiceSubject, before: Mapping[int, str]) -> tuple[str, ...]:
    """Return the deployments of processes that have ended."""
    there, may_end = running.pids(), running.may_end
    return tuple(name for pid, name in before.items() if pid not in there and name not in may_end)


def _written(sessions: Sequence[FinishedRun], folder: Path) -> tuple[str, ...]:
    names: list[str] = []
    for session in sessions:
        names.append(f"load-{len(names)}.json")
        Outputs(json=str(folder / names[-1])).write_files(session)
    return tuple(names)


def _ticker(scenario: Scenario, say: Say) -> OnProgress:
    """Return what reports the progress of the load once a second."""
    total_s, reported_s = scenario.warm_up_s + scenario.duration_s, -1.0

    def show(progress: RunProgress) -> None:
        nonlocal reported_s
        if progress.elapsed_s - reported_s >= 1.0:
            reported_s = progress.elapsed_s
            p95 = "" if progress.recent_p95_ms is None else f", p95 now {progress.recent_p95_ms:.0f} ms"
            say(f"load, {max(progress.elapsed_s, 0.0):.0f} of {total_s:.0f} s{p95}")

    return show
