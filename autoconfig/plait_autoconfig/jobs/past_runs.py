"""What a job takes from the library of past runs, what it adds to it, and a job that is drafted from one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from plait_autoconfig.errors import JobRefused, LibraryError, OutsideSpace
from plait_autoconfig.jobs.records import Record, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.library import LibraryRun, usable_for, usable_runs
from plait_autoconfig.rows import starter_runs
from plait_autoconfig.values import Config, TuningSubject, Value, cells_of

_GOALS = {"goodput_per_cost": "max", "goodput_per_s": "max", "p99_ms": "min"}
"""What a drafted job is for where nobody said so: the first of these that was measured."""


def past_runs(spec: JobSpec, records: Sequence[Record]) -> tuple[tuple[LibraryRun, ...], tuple[str, ...]]:
    """Return the library's runs except this job's own, followed by the usable runs of the starter library, all in terms
    of this job's knobs; and a sentence about each run that cannot be used, or only in part.

    Raises `JobRefused` for a library that cannot be read: learning nothing silently would waste trials.
    """
    shipped = starter_runs() if spec.starter_library else ()
    starter = usable_runs([_in_terms_of(run, spec) for run in shipped], spec.space, spec.goal)
    if spec.library is None:
        return starter, ()
    own = run_id_of(spec, records)
    others = tuple(_in_terms_of(run, spec) for run in _library(spec.library) if run.run_id != own)
    usable = [usable_for(run, spec.space, spec.goal) for run in others]
    return (*others, *starter), tuple(f"library: {each}" for each in usable if each.unusable)


def measured_candidates(spec: JobSpec) -> tuple[dict[str, Value], ...]:
    """Return the configurations of the job's space that its library has measurements of. Raises `JobRefused`."""
    assert spec.library is not None
    found: dict[Hashable, dict[str, Value]] = {}
    reasons: Counter[str] = Counter()
    for run in _library(spec.library):
        for trial in _in_terms_of(run, spec).trials:
            try:
                config = spec.space.check(trial.config)
            except OutsideSpace as error:
                reasons[str(error)] += 1
            else:
                found.setdefault(spec.space.key(config), dict(config))
    if not found:
        why = f": {reasons.most_common(1)[0][0]}" if reasons else " at all"
        raise JobRefused(f"candidates: {spec.library} has no measurement of a configuration of this space{why}")
    return tuple(found.values())


def _library(location: str) -> tuple[LibraryRun, ...]:
    """Return the runs. Raises `JobRefused`."""
    from plait_autoconfig.store import LibraryStore

    try:
        return LibraryStore.open(location).runs()
    except LibraryError as error:
        raise JobRefused(str(error)) from error


def _in_terms_of(run: LibraryRun, spec: JobSpec) -> LibraryRun:
    sets = {name: knob.sets or name for name, knob in spec.knobs.items()}
    return in_terms_of(run, sets, spec.default)


def remember(spec: JobSpec, subject: TuningSubject, records: Sequence[Record]) -> str:
    """Add the trials of this job to its library, skipping stored ones. Return the error text, or an empty string."""
    trials = trials_of(records)
    if spec.library is None or not trials:
        return ""
    from plait_autoconfig.store import LibraryStore

    run = LibraryRun(
        run_id=run_id_of(spec, records),
        service=subject.service or spec.name,
        trials=trials,
        units={name: knob.unit for name, knob in spec.space.by_name.items()},
        sets={name: knob.sets for name, knob in spec.knobs.items() if knob.sets},
        workload=subject.workload,
        hardware=subject.hardware,
        versions=subject.versions,
        goals=tuple(map(str, spec.goal.goals)),
        started_at=began_at(records),
    )
    try:
        LibraryStore.open(spec.library).add(run)
    except LibraryError as error:
        return f"this run was not added to the library: {error}"
    return ""


def run_id_of(spec: JobSpec, records: Sequence[Record]) -> str:
    """Return an id that is the same when the job is resumed, and different for another job of the same name."""
    return f"{spec.name}-{records[0].claim.nonce}" if records else ""


def began_at(records: Sequence[Record]) -> str:
    """Return when the first measurement began, ISO 8601; empty before that."""
    return datetime.fromtimestamp(records[0].claim.at_s, UTC).isoformat(timespec="seconds") if records else ""


def in_terms_of(run: LibraryRun, sets: Mapping[str, str], reference: Config) -> LibraryRun:
    """Return a past run in terms of a job's knobs: knobs meet by what they set, not by what they are called.

    What a knob sets is `DEPLOYMENT.setting`. Deployments of one role differ by a name after the first hyphen
    (`hn-picks`, `hn-films`), so `hn.threads` is what two of them have in common.

    `sets`: what each of these sets; `reference`: the job's.

    A knob of the job that the run did not vary is taken to have been as in the reference. A knob of the run that the
    job does not have is left out: configurations that differed in nothing else become repeats of one. A run that has no
    knob in common with the job is returned as it is.
    """
    theirs = dict.fromkeys(name for trial in run.trials for name in trial.config)
    source = {name: found for name, what in sets.items() if (found := _same(run, list(theirs), name, what)) is not None}
    if not source or (list(source) == list(source.values()) and set(theirs) == set(source) == set(sets)):
        return run
    absent = {name: reference[name] for name in sets if name not in source and name in reference}
    trials = tuple(replace(trial, config=_config(trial.config, source) | absent) for trial in run.trials)
    units = {name: run.units[found] for name, found in source.items() if found in run.units}
    return replace(run, trials=trials, units=units, sets={name: sets[name] for name in source})


def _same(run: LibraryRun, theirs: list[str], name: str, what: str) -> str | None:
    """Return the knob of the run that sets the same: exactly, or of a deployment of the same role; or, if nobody said
    what it sets, the one with the same name."""
    said = {their: run.sets.get(their, their) for their in theirs}
    for alike in (lambda other: other == what, lambda other: _by_role(other) == _by_role(what)):
        found = next((their for their, other in said.items() if alike(other)), None)
        if found is not None:
            return found
    return name if name in theirs and name not in run.sets else None


def _by_role(setting: str) -> str:
    deployment, dot, rest = setting.rpartition(".")
    return f"{deployment.partition('-')[0]}{dot}{rest}"


def _config(config: Config, source: Mapping[str, str]) -> dict[str, Value]:
    return {name: config[theirs] for name, theirs in source.items() if theirs in config}


# ---- a draft ---------------------------------------------------------------------------------------------------------


def draft_job(run: LibraryRun, *, target: Any, scenario: str, library: str, only_measured: bool) -> dict[str, Any]:
    """Return the settings of a job on the service of a past run, which learns from the library that holds it.

    The reference is the configuration that was measured most often, or the first. `target`: the job's, unchecked;
    `only_measured`: it proposes nothing that was not measured before. A knob that was measured only with some values of
    another one is active only with these; one that always had the same value keeps it. Raises `LibraryError` for a run
    without a measurement or without a knob that varied.
    """
    ran = [trial for trial in run.trials if trial.outcome.failure is None]
    if not ran:
        raise LibraryError(f"{run.run_id} has no measurement that a job could start from")
    configs = [trial.config for trial in run.trials]
    seen = _values(configs)
    values = {name: those for name, those in seen.items() if len(those) > 1 or all(name in each for each in configs)}
    if all(len(those) == 1 for those in values.values()):
        raise LibraryError(f"{run.run_id} measured one configuration only: there is nothing to choose between")
    conditions = _conditions(configs, list(values))
    measured = set(ran[0].outcome.metrics)
    goal = next((f"{direction} {metric}" for metric, direction in _GOALS.items() if metric in measured), "")
    usual = max(cells_of(ran), key=lambda cell: len(cell.trials))
    settings: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", run.service).lstrip("._-")[:64] or "job",
        "target": target,
        "knobs": {
            name: _knob(run, name, values[name]) | conditions.get(name, {})
            for name in sorted(values, key=conditions.__contains__)  # after the knobs that they depend on
        },
        "scenarios": [scenario],
        "objective": run.goals[0] if run.goals else goal or "max goodput_per_cost",
        "library": library,
        "reference": {
            "config": {name: value for name, value in usual.config.items() if name in values},
            "why": f"measured {len(usual.trials)} times before" if len(usual.trials) > 1 else "measured before",
        },
    }
    return settings | ({"candidates": "measured"} if only_measured else {})


def _values(configs: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
    """Return the values that each knob was seen with, the numbers in order."""
    counted: dict[str, Counter[Value]] = {}
    for config in configs:
        for name, value in config.items():
            counted.setdefault(name, Counter())[value] += 1
    return {name: _ordered(list(seen)) for name, seen in counted.items()}


def _conditions(configs: Sequence[Mapping[str, Value]], names: Sequence[str]) -> dict[str, Any]:
    """Return `when` of each knob that is absent exactly with some values of one that never is."""
    always = [name for name in names if all(name in config for config in configs)]
    found: dict[str, Any] = {}
    for name in names:
        for parent in () if name in always else always:
            there = {config[parent] for config in configs if name in config}
            if not any(config[parent] in there for config in configs if name not in config):
                found[name] = {"when": {parent: _ordered(list(there))}}
                break
    return found


def _ordered(values: list[Value]) -> list[Value]:
    return sorted(values) if _are_numbers(values) else values


def _are_numbers(values: Sequence[Value]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _knob(run: LibraryRun, name: str, values: list[Value]) -> dict[str, Any]:
    knob: dict[str, Any] = {"kind": "choice", "values": values}
    if _are_numbers(values):
        knob["ordered"] = True
    if run.units.get(name):
        knob["unit"] = run.units[name]
    return knob | ({"sets": run.sets[name]} if name in run.sets else {})
