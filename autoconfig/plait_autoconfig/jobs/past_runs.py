"""What a job takes from the library of past runs, and what it adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from plait_autoconfig.errors import LibraryError
from plait_autoconfig.jobs.errors import JobRefused
from plait_autoconfig.jobs.measurer import TuningSubject
from plait_autoconfig.jobs.records import Record, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.library import LibraryRun, usable_for, usable_runs
from plait_autoconfig.starter_library import starter_runs


def past_runs(spec: JobSpec, records: Sequence[Record]) -> tuple[tuple[LibraryRun, ...], tuple[str, ...]]:
    """Return the library's runs except this job's own, followed by the usable runs of the starter library; and a
    sentence about each run that cannot be used, or only in part.

    Raises `JobRefused` for a library that cannot be read: learning nothing silently would waste trials.
    """
    starter = usable_runs(starter_runs(), spec.space, spec.goal) if spec.starter_library else ()
    if spec.library is None:
        return starter, ()
    from plait_autoconfig.store import LibraryStore

    try:
        store = LibraryStore.open(spec.library)
        runs, unreadable = store.runs(), store.unreadable()
    except LibraryError as error:
        raise JobRefused(str(error)) from error
    own = run_id_of(spec, records)
    others = tuple(run for run in runs if run.run_id != own)
    usable = [usable_for(run, spec.space, spec.goal) for run in others]
    said = [f"library: {each}" for each in usable if each.unusable]
    if unreadable:
        said.append(f"library: {len(unreadable)} entries are of a later version of plait and are not used")
    return (*others, *starter), tuple(said)


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
