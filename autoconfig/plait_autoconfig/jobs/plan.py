"""What a job does next, as a pure function of the job and its measurements so far.

Every worker evaluates it before every measurement, and so does one that resumes after a crash: progress is kept
nowhere else. First comes the reference, then trials interleaved with the reference, then the confirmation, then
checks of the rate that is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from plait_autoconfig.confidence import LeaderOdds, log_loss, standing
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.promised_rate import is_wanted, next_check
from plait_autoconfig.jobs.records import Record, config_key, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Cell, Config, cells_of, pooled

_MAX_INVALID = 2  # measurements more than wanted, for those whose load test was invalid


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """Take this measurement. `rate_per_s`: as in `MeasurementTask`."""

    kind: MeasurementKind
    config: Config
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunSearch:
    """Measure the designer's proposal."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for another worker's measurement, on which the decision depends."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to do. `why`: what ended the search."""

    why: str


@dataclass(frozen=True, slots=True)
class NoReference:
    """The reference cannot be measured, so nothing can be compared. `is_invalid`: for the host, not for what it is."""

    why: str
    is_invalid: bool = False


Step: TypeAlias = RunMeasurement | RunSearch | Wait | Done | NoReference


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Facts that the records do not contain. `left_s`: of the budget, None without a limit. `stop`: why the stop rule
    or the designer ends the search; empty if neither does."""

    left_s: float | None = None
    stop: str = ""


def next_step(spec: JobSpec, records: Sequence[Record], outlook: Outlook) -> Step:
    """Return what to do next. `records`: all of the job, in order."""
    active = [record for record in records if record.status != "lost"]
    first = _first_reference(spec, active)
    if first is not None:
        return first
    over = why_over(spec, active, outlook)
    if not over:
        return _searching(spec, active)
    running = [record.kind for record in active if record.status == "running"]
    if MeasurementKind.TRIAL in running:
        return Wait()
    step = _confirming(spec, active, outlook)
    if step is not None:
        return step
    if running:
        return Wait()
    return _checking(spec, active, outlook) or Done(over)


def why_over(spec: JobSpec, active: Sequence[Record], outlook: Outlook) -> str:
    """Return why no further configuration is to be proposed; empty if one is."""
    made = sum(record.kind is MeasurementKind.TRIAL for record in active)
    if made >= spec.budget.trials:
        return f"the {spec.budget.trials} trials of the budget were made"
    if outlook.left_s is not None and outlook.left_s < needed_s(spec, active):
        return f"the {spec.budget.minutes:g} minutes of the budget are used up, but for the confirmation"
    return outlook.stop


def needed_s(spec: JobSpec, active: Sequence[Record]) -> float:
    """Return the seconds for one more trial, the confirmation and the checks, from the means of past measurements: a
    trial may end early, what is compared with does not."""
    trial_s = _mean_s(active, {MeasurementKind.TRIAL, MeasurementKind.REFERENCE})
    whole_s = _mean_s(active, {MeasurementKind.REFERENCE, MeasurementKind.CONFIRM})
    wholes = (1 + spec.confirm.best) * spec.confirm.times if spec.confirm.best else 0
    return trial_s + (wholes + is_wanted(spec)) * whole_s  # all checks: each is one load, where a search has about four


def _mean_s(active: Sequence[Record], kinds: Collection[MeasurementKind]) -> float:
    durations = [each.measured.duration_s for each in active if each.measured is not None and each.kind in kinds]
    return sum(durations) / len(durations) if durations else 0.0


# ---- reference -------------------------------------------------------------------------------------------------------


def _first_reference(spec: JobSpec, active: Sequence[Record]) -> Step | None:
    """Return how to measure the first reference; None once it was measured."""
    own = [record for record in active if record.kind is MeasurementKind.REFERENCE]
    raw = [record.raw for record in own if record.raw is not None]
    if any(outcome.failure is None for outcome in raw):
        return None
    failed = [outcome for outcome in raw if not outcome.invalid]
    if failed or len(raw) > _MAX_INVALID:
        last = (failed or raw)[-1]
        kind = str(last.failure).replace("_", " ")
        why = f"the reference configuration could not be measured: {kind}: {last.detail}"
        return NoReference(why, is_invalid=not failed)
    warm_ups = [record for record in active if record.kind is MeasurementKind.WARM_UP]
    if any(record.status == "running" for record in [*own, *warm_ups]):
        return Wait()
    kind = MeasurementKind.WARM_UP if spec.reference.warm_up and not warm_ups else MeasurementKind.REFERENCE
    return RunMeasurement(kind, spec.default)


def _is_reference_due(spec: JobSpec, active: Sequence[Record]) -> bool:
    since = 0
    for record in active:
        if record.kind is MeasurementKind.REFERENCE:
            since = 0
        elif record.kind is MeasurementKind.TRIAL:
            since += 1
    return 0 < spec.reference.every <= since


# ---- search ----------------------------------------------------------------------------------------------------------


def _searching(spec: JobSpec, active: Sequence[Record]) -> Step:
    if _is_reference_due(spec, active):
        return RunMeasurement(MeasurementKind.REFERENCE, spec.default)
    for group in _by_key(active, MeasurementKind.TRIAL).values():
        wanted = _wanted(group, spec.repeats)
        if wanted and any(record.valid for record in group):
            return RunMeasurement(MeasurementKind.TRIAL, group[0].config)
    return RunSearch()


def _wanted(group: Sequence[Record], times: int) -> bool:
    """Return whether to measure a configuration once more: fewer than `times` are valid or running, none failed."""
    if any(record.valid and record.raw is not None and record.raw.failure is not None for record in group):
        return False
    counted = sum(record.valid or record.status == "running" for record in group)
    return counted < times and len(group) < times + _MAX_INVALID


def _by_key(records: Sequence[Record], kind: MeasurementKind) -> dict[Hashable, list[Record]]:
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        if record.kind is kind:
            groups.setdefault(record.key, []).append(record)
    return groups


# ---- confirmation ----------------------------------------------------------------------------------------------------


def ranked_candidates(spec: JobSpec, records: Sequence[Record]) -> tuple[Cell, ...]:
    """Return the feasible configurations of the search except the reference, best first; with several goals the front,
    its ends first. They depend on the trials alone, so the confirmation does not change them."""
    own = config_key(spec.default)
    trials = [
        trial
        for trial in trials_of(record for record in records if record.kind is MeasurementKind.TRIAL)
        if config_key(trial.config) != own
    ]
    goal = spec.goal
    if len(goal.goals) > 1:
        return _ends_first(goal.front(trials), goal.goals[0].metric)
    feasible = [cell for cell in cells_of(trials) if goal.feasible(cell.outcome)]
    return tuple(sorted(feasible, key=lambda cell: goal.losses(cell.outcome) or ()))


def _ends_first(front: Sequence[Cell], metric: str) -> tuple[Cell, ...]:
    """Return both ends of the front, then the middle of the largest remaining gap, and so on."""
    ordered = sorted(front, key=lambda cell: cell.outcome.metrics[metric])
    if len(ordered) <= 2:
        return tuple(ordered)
    chosen = [0, len(ordered) - 1]
    while len(chosen) < len(ordered):
        places = sorted(chosen)
        low, high = max(itertools.pairwise(places), key=lambda gap: gap[1] - gap[0])
        chosen.append((low + high) // 2)
    return tuple(ordered[place] for place in chosen)


def _confirming(spec: JobSpec, active: Sequence[Record], outlook: Outlook) -> Step | None:
    """Return the next step of the confirmation; None when it is complete, pointless, or out of time."""
    size = spec.confirm.best
    candidates = [cell.config for cell in ranked_candidates(spec, active)] if size else []
    done = _by_key(active, MeasurementKind.CONFIRM)
    for start in range(0, len(candidates), max(1, size)):
        batch = candidates[start : start + size]
        step = _next_of_batch([spec.default, *_contenders(spec, batch, done)], done, spec.confirm.times)
        if isinstance(step, RunMeasurement) and outlook.left_s is not None and outlook.left_s <= 0.0:
            return None
        if step is not None:
            return step
        if any(_is_confirmed(spec, done.get(config_key(config), [])) for config in batch):
            return None
    return None


def _checking(spec: JobSpec, active: Sequence[Record], outlook: Outlook) -> Step | None:
    """Return the next check of the rate to promise; None when there is none, or out of time."""
    due = next_check(spec, active)
    checks = [record for record in active if record.kind is MeasurementKind.CHECK]
    spoiled = sum(not record.valid for record in checks)
    if due is None or spoiled > _MAX_INVALID or (outlook.left_s is not None and outlook.left_s <= 0.0):
        return None
    return RunMeasurement(MeasurementKind.CHECK, *due)


def confirmation(spec: JobSpec, batch: Sequence[Config], done: Mapping[Hashable, Sequence[Record]]) -> LeaderOdds:
    """Return how the candidates compare by their confirmation measurements, by configuration, in `done`."""
    groups = [done.get(config_key(config), []) for config in batch]
    raw = [[record.raw for record in group if record.valid and record.raw is not None] for group in groups]
    losses = [[log_loss(spec.goal, outcome) for outcome in group] for group in raw]
    return standing(losses, sure=spec.confirm.sure, times=spec.confirm.times)


def _contenders(spec: JobSpec, batch: Sequence[Config], done: Mapping[Hashable, Sequence[Record]]) -> list[Config]:
    """Return the candidates that may still win; all of a front, where nobody does."""
    if len(spec.goal.goals) > 1:
        return list(batch)
    now = confirmation(spec, batch, done)
    return [config for at, config in enumerate(batch) if at == now.leader or now.chances[at] >= 1.0 - spec.confirm.sure]


def _next_of_batch(configs: Sequence[Config], done: dict[Hashable, list[Record]], times: int) -> Step | None:
    """Return the configuration with the fewest measurements so far, so that they alternate. None: all are done."""
    groups = [done.get(config_key(config), []) for config in configs]
    wanted = [index for index, group in enumerate(groups) if _wanted(group, times)]
    if wanted:
        return RunMeasurement(MeasurementKind.CONFIRM, configs[min(wanted, key=lambda index: len(groups[index]))])
    return Wait() if any(record.status == "running" for group in groups for record in group) else None


def _is_confirmed(spec: JobSpec, group: Sequence[Record]) -> bool:
    """Return whether the configuration again kept all limits, on average."""
    outcome = pooled(record.raw for record in group if record.raw is not None)
    return outcome is not None and spec.goal.feasible(outcome)
