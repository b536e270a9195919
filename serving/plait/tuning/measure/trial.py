"""One trial of a running application: the load, what it used, what it cost, what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.config import PlaitConfig
from plait.server.restarts import plans
from plait.tuning.measure.application import RunningApplication
from plait.tuning.measure.cost import cost_per_hour, reserved
from plait.tuning.measure.failures import Evidence, of_load
from plait.tuning.measure.load import LoadResult, Watch, run_given, run_search
from plait.tuning.measure.usage import ResourceUsage, UsageSampler
from plait_autoconfig.jobs.exit_status import count_oom_kills
from plait_autoconfig.jobs.measurer import Samples
from plait_autoconfig.jobs.spec import Prices
from plait_autoconfig.values import TrialOutcome
from plait_loadtest.mix.images import DEFAULT_PATH
from plait_loadtest.report.outputs import Outputs
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import RunProgress, StopWhen

__all__ = ["LoadPlan", "TrialMetrics", "run_loads", "with_address", "worst_metrics"]

_GIB = 1 << 30
_HIGHER_IS_BETTER = frozenset({"offered_per_s", "goodput_per_s", "attainment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load to run: scenarios without an address, each at its rate or, if `search`, in search of the highest one."""

    scenarios: tuple[Scenario, ...]
    search: bool
    seed: int
    limit_s: float
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
    running: RunningApplication,
    plan: LoadPlan,
    *,
    prices: Prices,
    machine_cores: int,
    folder: Path,
    log_path: Path | None,
    say: Callable[[str], None],
    known: Mapping[str, float],
) -> TrialMetrics:
    """Run the load and judge it. `log_path`: where the replicas write; `known`: metrics that are already known.

    Raises `ScenarioError`.
    """
    assert running.config is not None, "a trial needs an application that runs"
    before, kills, said_bytes = running.pids(), count_kills(), _size(log_path)
    started_s = time.monotonic()
    breached: list[str] = []
    loads: list[LoadResult] = []
    with UsageSampler(lambda: before) as sampler:
        for scenario in plan.scenarios:
            there = with_address(scenario, running.url, running.prefix).model_copy(update={"seed": plan.seed})
            watch = Watch(
                show=_ProgressTicker(there, say),
                stop=() if plan.guard is None else (_noted(plan.guard(), breached),),
                limit_s=plan.limit_s - (time.monotonic() - started_s),
            )
            loads.append((run_search if plan.search else run_given)(there, watch))
            if breached:
                break
        used, seconds = sampler.used(), time.monotonic() - started_s
    evidence = Evidence(
        died=_died(running, before), oom_kills=count_kills() - kills, log=_read_from(log_path, said_bytes)
    )
    samples = Samples(
        cpu_cores=used.cpu_s / seconds, memory_bytes=used.memory_bytes, gpu_memory_bytes=used.gpu_memory_bytes
    )
    failed = next((bad for load in loads if (bad := of_load(load, evidence, guard=bool(breached)))), None)
    metrics = {**known, **worst_metrics([load.metrics for load in loads])} | _costs(
        running.config, used, prices, machine_cores
    )
    return TrialMetrics(
        outcome=failed or TrialOutcome(metrics=_with_ratios(metrics, samples)),
        load_s=sum(session.result.wall_s for load in loads for session in load.sessions),
        samples=samples,
        notes=tuple(note for load in loads for note in load.notes),
        artefacts=_written(loads, folder),
        guard_breached=bool(breached),
    )


def with_address(scenario: Scenario, url: str, prefix: str) -> Scenario:
    """Return the scenario aimed at this address. `prefix`: the path below which the application is served, or empty."""
    target = scenario.target
    default = {"images": DEFAULT_PATH, "infer": f"/v2/models/{target.model}/infer", "raw": "/"}[target.api]
    path = prefix + (target.path or default) if prefix else target.path
    return scenario.model_copy(update={"target": target.model_copy(update={"url": url, "path": path})})


def worst_metrics(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the worst value of each metric over the scenarios, for metrics that all of them have."""
    names = [name for name in of[0] if all(name in each for each in of)] if of else []
    return {name: (min if name in _HIGHER_IS_BETTER else max)(each[name] for each in of) for name in names}


def count_kills() -> int:
    """Return `count_oom_kills` of this machine and of its cgroup."""
    return count_oom_kills(vmstat=Path("/proc/vmstat"), memory_events=Path("/sys/fs/cgroup/memory.events"))


def _costs(config: PlaitConfig, used: ResourceUsage, prices: Prices, machine_cores: int) -> dict[str, float]:
    memory_gib = used.memory_bytes / _GIB
    cost = cost_per_hour(
        reserved(config, machine_cores=machine_cores),
        memory_gib=memory_gib,
        core_hour=prices.core,
        gpu_hour=prices.gpu,
        gib_hour=prices.gib,
    )
    return {"memory_gib": memory_gib, "cost_per_hour": cost}


def _with_ratios(metrics: Mapping[str, float], samples: Samples) -> dict[str, float]:
    cost = metrics["cost_per_hour"]
    own = {"cpu_cores": samples.cpu_cores}
    if cost > 0 and "goodput_per_s" in metrics:
        own["goodput_per_cost"] = metrics["goodput_per_s"] * 3600.0 / cost
    return {**metrics, **own}


def _died(running: RunningApplication, before: Mapping[int, str]) -> tuple[str, ...]:
    """Return the deployments of processes that have ended. An autoscaling one stops some of its own."""
    assert running.config is not None
    scaling = {name for name, plan in plans(running.config).items() if isinstance(plan.replicas, Mapping)}
    there = running.pids()
    return tuple(name for pid, name in before.items() if pid not in there and name not in scaling)


def _written(loads: Sequence[LoadResult], folder: Path) -> tuple[str, ...]:
    names: list[str] = []
    for session in (session for load in loads for session in load.sessions):
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
