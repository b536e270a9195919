"""Past runs of the tuner: what later runs learn from, which parts are usable, and how much they count.

Runs keep metrics, not losses: whatever today's objective is, a run is useful if it measured the metrics involved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from plait_autoconfig.errors import OutsideSpace
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Hardware, Trial, WorkloadFeatures


def _date(text: str) -> str:
    if text:
        datetime.fromisoformat(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRun:
    """One run of the tuner: a service on a machine, its trials, and the software versions.

    `units`: the knobs of its space and their units. `sets`: what knobs set (`hn-picks.threads`), for those that set
    something other than their name says: knobs of two services meet by that. `goals`: what it optimised, such as
    `max goodput_per_cost` (for people; nothing is computed from it). `started_at`: ISO 8601.
    """

    run_id: Annotated[str, Field(min_length=1)]
    service: str
    trials: tuple[Trial, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)
    workload: WorkloadFeatures = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)
    versions: Mapping[str, str] = field(default_factory=dict)
    goals: tuple[str, ...] = ()
    started_at: Annotated[str, AfterValidator(_date)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The usable part of a run in a space. `unusable`: why other trials are not, and how many each reason affects;
    `lost`: what is lost with them, a sentence."""

    run: LibraryRun
    trials: tuple[Trial, ...]
    unusable: Mapping[str, int]
    lost: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} not: {reason}" for reason, count in self.unusable.items())
        said = (
            f"{self.run.service} ({self.run.run_id}): {len(self.trials)} of {len(self.run.trials)} trials can be used"
        )
        return "; ".join(filter(None, (said, reasons, self.lost)))


def usable_for(run: LibraryRun, space: Space, objective: Objective | None = None) -> Usable:
    """Return the trials of a run that are configurations of this space, in its form, and measured what the objective
    needs. They need not satisfy its constraints: these say what may be proposed, not what can be learned from.

    Invalid trials are left out, as they are no evidence. Failures stay: they show what to avoid.
    """
    other_unit = _other_unit(run, space)
    trials, reasons = [], Counter[str]()
    for trial in run.trials:
        reason = other_unit or _missing_metric(trial, objective)
        if trial.outcome.invalid:
            reason = "the measurement was invalid"
        if not reason:
            try:
                config = space.check(trial.config, constrained=False)
            except OutsideSpace as error:
                reason = str(error)
            else:
                trials.append(replace(trial, config=config))
        if reason:
            reasons[reason] += 1
    lost = _lost(run.trials, trials, objective) if reasons and objective is not None else ""
    return Usable(run=run, trials=tuple(trials), unusable=dict(reasons.most_common()), lost=lost)


def _lost(before: Sequence[Trial], after: Sequence[Trial], objective: Objective) -> str:
    """Return how much better the best configuration that was dropped is than the best that is left."""
    if len(objective.goals) > 1:
        return ""
    kept, goal = {trial.number for trial in after}, objective.goals[0]
    dropped = [trial for trial in before if trial.number not in kept]
    best, left = (_best_value(trials, objective) for trials in (dropped, after))
    if best is None:
        return "none of them kept the limits"
    if left is None or min(best, left) <= 0.0:
        return f"the best of them had {goal.metric} {best:.4g}, and none is left that kept the limits"
    better = best / left if goal.direction == "max" else left / best
    if better <= 1.0:
        return "the best one is among those that are left"
    return f"the best of them was {100.0 * (better - 1.0):.0f} % better in {goal.metric} than the best that is left"


def _best_value(trials: Sequence[Trial], objective: Objective) -> float | None:
    measured = [t for t in trials if t.outcome.failure is not None or not _missing_metric(t, objective)]
    best = objective.best(measured)
    return None if best is None else best.outcome.metrics[objective.goals[0].metric]


def usable_runs(runs: Iterable[LibraryRun], space: Space, objective: Objective) -> tuple[LibraryRun, ...]:
    """Return the runs with at least one usable trial that ran, reduced to their usable trials."""
    found = []
    for run in runs:
        usable = usable_for(run, space, objective)
        if any(trial.outcome.failure is None for trial in usable.trials):
            found.append(replace(run, trials=usable.trials))
    return tuple(found)


_VERSION_FACTOR = 0.5  # for each version that differs in its first two numbers
_ACCELERATOR_FACTOR = 0.5  # for another accelerator, or one where there was none
_CPUS_FACTOR = 0.8  # for twice or half as many CPUs, and again for each further doubling
_HALF_LIFE_DAYS = 365.0
"""How much less a run counts: judgement, not measurement. Nothing is dropped: a designer that weights runs by how well
they predict the new trials soon corrects a wrong guess."""


def weight_of(run: LibraryRun, *, versions: Mapping[str, str], hardware: Hardware, at: str) -> float:
    """Return how much a run counts, in (0, 1]; 1 for the same versions and hardware today.

    Whatever is unknown on either side (a version, the hardware, `at`) is ignored.
    """
    shared = versions.keys() & run.versions.keys()
    changed = sum(_major_minor(versions[name]) != _major_minor(run.versions[name]) for name in shared)
    weight = _VERSION_FACTOR**changed * _hardware_weight(run.hardware, hardware)
    if at and run.started_at:
        days = (_instant(at) - _instant(run.started_at)).total_seconds() / 86_400.0
        weight *= 0.5 ** (max(0.0, days) / _HALF_LIFE_DAYS)
    return weight


def _hardware_weight(then: Hardware, now: Hardware) -> float:
    if Hardware() in (then, now):
        return 1.0
    weight = 1.0 if then.accelerator == now.accelerator else _ACCELERATOR_FACTOR
    low, high = sorted((then.cpus, now.cpus))
    doublings = math.floor(math.log2(high / low)) if low > 0 else 0
    return float(weight * _CPUS_FACTOR**doublings)


def _major_minor(version: str) -> tuple[str, ...]:
    return tuple(version.partition("+")[0].split(".")[:2])


def _instant(text: str) -> datetime:
    instant = datetime.fromisoformat(text)
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


def _other_unit(run: LibraryRun, space: Space) -> str:
    for name, unit in run.units.items():
        knob = space.by_name.get(name)
        if knob is not None and knob.unit != unit:
            return f"{name} is in {unit or 'no unit'} there and in {knob.unit or 'no unit'} here"
    return ""


def _missing_metric(trial: Trial, objective: Objective | None) -> str:
    if objective is None or trial.outcome.failure is not None:
        return ""
    missing = [name for name in objective.metrics if name not in trial.outcome.metrics]
    return f"{missing[0]} was not measured" if missing else ""
