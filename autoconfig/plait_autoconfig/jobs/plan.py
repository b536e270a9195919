"""What a job does next, as a pure function of the job and its measurements so far.

Every worker evaluates it before every measurement, and so does one that resumes after a crash: progress is kept
nowhere else. First comes the reference, then trials interleaved with the reference, then the confirmation, then
checks of the rate that is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from plait_autoconfig.confidence import Verdict, next_runs, verdict
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.promised_rate import is_wanted, next_check
from plait_autoconfig.jobs.records import Record, trials_of
from plait_autoconfig.jobs.spec import JobSpec, Stop
from plait_autoconfig.objective import Objective
from plait_autoconfig.values import Cell, Config, Trial, TrialOutcome, config_key

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


def next_step(spec: JobSpec, records: Sequence[Record], *, used_s: float = 0.0, exhausted: str = "") -> Step:
    """Return what to do next. `records`: all of the job, in order; `used_s`: of the budget; `exhausted`: why the
    designer ends the search, if it does."""
    active = [record for record in records if record.status != "lost"]
    first = _first_reference(spec, active)
    if first is not None:
        return first
    left_s = spec.budget.left_s(used_s)
    over = why_over(spec, active, left_s, exhausted)
    if not over:
        return _searching(spec, active)
    running = [record.kind for record in active if record.status == "running"]
    if MeasurementKind.TRIAL in running:
        return Wait()
    is_late = left_s <= 0.0
    step = None if is_late else _confirming(spec, active)
    if step is not None:
        return step
    if running:
        return Wait()
    return (None if is_late else _checking(spec, active)) or Done(over)


def why_over(spec: JobSpec, active: Sequence[Record], left_s: float, exhausted: str) -> str:
    """Return why no further configuration is to be proposed; empty if one is."""
    made = sum(record.kind is MeasurementKind.TRIAL for record in active)
    if made >= spec.budget.trials:
        return f"the {spec.budget.trials} trials of the budget were made"
    if left_s < needed_s(spec, active):
        return f"the {spec.budget.minutes:g} minutes of the budget are used up, but for the confirmation"
    trials = trials_of(record for record in active if record.kind is MeasurementKind.TRIAL)
    return exhausted or why_stalled(spec.goal, spec.stop, trials)


def why_stalled(objective: Objective, stop: Stop, trials: Sequence[Trial]) -> str:
    """Return a sentence if the last `stop.patience` trials made the best not better by `stop.least_gain`, or, with
    several goals, brought nothing to the front; empty to continue, as before a feasible configuration was found."""
    before = trials[: -stop.patience] if stop.patience else ()
    if len(objective.goals) > 1:
        old, new = ({config_key(cell.config) for cell in objective.front(each)} for each in (before, trials))
        stalled = bool(old) and new <= old
    else:
        best, now = (objective.best(each) for each in (before, trials))
        goal = objective.goals[0]
        loss = None if best is None else goal.loss(best.outcome.metrics)
        stalled = (
            loss is not None and now is not None and loss - goal.loss(now.outcome.metrics) < stop.least_gain * abs(loss)
        )
    return f"the last {stop.patience} trials brought no improvement of {100.0 * stop.least_gain:g} %" if stalled else ""


def needed_s(spec: JobSpec, active: Sequence[Record]) -> float:
    """Return the seconds for one more trial, the confirmation and the checks, from the means of past measurements: a
    trial may end early, what is compared with does not."""
    trial_s = _mean_s(active, {MeasurementKind.TRIAL, MeasurementKind.REFERENCE})
    whole_s = _mean_s(active, {MeasurementKind.REFERENCE, MeasurementKind.CONFIRM})
    # All checks count as one: each is one load, where a search has about four.
    return trial_s + (spec.confirm.runs + is_wanted(spec)) * whole_s


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
    since = itertools.takewhile(lambda each: each.kind is not MeasurementKind.REFERENCE, reversed(active))
    return 0 < spec.reference.every <= sum(each.kind is MeasurementKind.TRIAL for each in since)


# ---- search ----------------------------------------------------------------------------------------------------------


def _searching(spec: JobSpec, active: Sequence[Record]) -> Step:
    if _is_reference_due(spec, active):
        return RunMeasurement(MeasurementKind.REFERENCE, spec.default)
    for group in _grouped(record for record in active if record.kind is MeasurementKind.TRIAL).values():
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


def _grouped(records: Iterable[Record]) -> dict[Hashable, list[Record]]:
    """Return the records by configuration."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return groups


# ---- confirmation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration with its valid outcomes, drift divided out. `fresh`: how many measurements the confirmation made
    or is making of it; `is_running`: whether one is going on."""

    config: Config
    outcomes: tuple[TrialOutcome, ...]
    fresh: int
    is_running: bool


def candidates_of(records: Sequence[Record]) -> tuple[Candidate, ...]:
    """Return everything that was measured, the reference included, in the order of the first measurements."""
    groups = _grouped(each for each in records if each.kind.compares and (each.valid or each.status == "running"))
    return tuple(
        Candidate(
            config=group[0].config,
            outcomes=outcomes,
            fresh=sum(each.kind is MeasurementKind.CONFIRM for each in group),
            is_running=any(each.status == "running" for each in group),
        )
        for group in groups.values()
        if (outcomes := tuple(each.outcome for each in group if each.outcome is not None))
    )


def verdict_on(spec: JobSpec, candidates: Sequence[Candidate]) -> tuple[Verdict, int | None]:
    """Return which candidate leads, of a job with one goal, and which is the reference."""
    own = next((at for at, each in enumerate(candidates) if config_key(each.config) == config_key(spec.default)), None)
    return verdict(spec.goal, [each.outcomes for each in candidates], sure=spec.confirm.sure, reference=own), own


def _confirming(spec: JobSpec, active: Sequence[Record]) -> Step | None:
    """Return the next step of the confirmation; None when it is complete or pointless."""
    if not spec.confirm.best:
        return None
    made = [record for record in active if record.kind is MeasurementKind.CONFIRM]
    if sum(record.raw is not None and not record.valid for record in made) > _MAX_INVALID:
        return None
    if len(spec.goal.goals) > 1:
        return _confirming_front(spec, active)
    candidates = candidates_of(active)
    now, own = verdict_on(spec, candidates)
    fresh = [each.fresh for each in candidates]
    order = next_runs(now, fresh, own, most=spec.confirm.runs, times=spec.confirm.times)
    free = [candidates[at].config for at in order if not candidates[at].is_running]
    if not free or len(candidates) == 1:
        return Wait() if order and len(candidates) > 1 else None
    return RunMeasurement(MeasurementKind.CONFIRM, free[0])


def _confirming_front(spec: JobSpec, active: Sequence[Record]) -> Step | None:
    """Return the next step with several goals: the front and the reference in turn, `times` each."""
    trials = trials_of(record for record in active if record.kind is MeasurementKind.TRIAL)
    front = [cell for cell in spec.goal.front(trials) if config_key(cell.config) != config_key(spec.default)]
    chosen = ends_first(front, spec.goal.goals[0].metric)[: spec.confirm.best]
    if not chosen:
        return None
    done = _grouped(record for record in active if record.kind is MeasurementKind.CONFIRM)
    configs = [spec.default, *(cell.config for cell in chosen)]
    groups = [done.get(config_key(config), []) for config in configs]
    wanted = [at for at, group in enumerate(groups) if _wanted(group, spec.confirm.times)]
    if wanted:
        return RunMeasurement(MeasurementKind.CONFIRM, configs[min(wanted, key=lambda at: len(groups[at]))])
    return Wait() if any(record.status == "running" for group in groups for record in group) else None


def ends_first(front: Sequence[Cell], metric: str) -> tuple[Cell, ...]:
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


def _checking(spec: JobSpec, active: Sequence[Record]) -> Step | None:
    """Return the next check of the rate to promise; None when there is none."""
    if not is_wanted(spec):
        return None
    candidates = candidates_of(active)
    leader = verdict_on(spec, candidates)[0].leader
    if leader is None:
        return None
    due = next_check(spec, active, candidates[leader].config)
    checks = [record for record in active if record.kind is MeasurementKind.CHECK]
    spoiled = sum(not record.valid for record in checks)
    if due is None or spoiled > _MAX_INVALID:
        return None
    return RunMeasurement(MeasurementKind.CHECK, candidates[leader].config, due)
