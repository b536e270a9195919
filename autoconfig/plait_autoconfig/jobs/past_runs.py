"""What a job takes from the library of past runs, and what it adds to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from plait_autoconfig.errors import JobRefused, LibraryError, OutsideSpace
from plait_autoconfig.jobs.records import Record, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.library import LibraryRun, usable_for, usable_runs
from plait_autoconfig.rows import starter_runs
from plait_autoconfig.values import Config, TuningSubject, Value


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
