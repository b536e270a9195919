"""Storage of the library: an SQLite file, or a database by URL; and JSON-lines files for transfer.

Each run is an Optuna study and each trial one of its trials, so that Optuna's own tools can display them; the
authoritative data is in their user attributes, as lines of `rows`. A trial is added in one transaction: a process that
dies loses at most the one that it was adding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from plait_autoconfig.errors import LibraryError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.optuna_forms import quiet
from plait_autoconfig.rows import dump_lines, load_lines, run_line, trial_line
from plait_autoconfig.values import Trial

_PREFIX = "plait:"
_DATA = "plait"


def read_library(path: str | Path) -> tuple[LibraryRun, ...]:
    """Read a JSON-lines file (`rows`). Raises `LibraryError` naming the file and the line."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return load_lines(file)
    except (OSError, LibraryError) as error:
        raise LibraryError(f"{path}: {error}") from error


def write_library(path: str | Path, runs: Iterable[LibraryRun]) -> None:
    """Write a JSON-lines file atomically. Raises `LibraryError`."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        partial.write_text("".join(f"{line}\n" for line in dump_lines(runs)), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LibraryError(f"{path}: {error}") from error


class LibraryStore:
    """Past runs in an Optuna storage. All calls to Optuna's storages are made here."""

    def __init__(self, storage: BaseStorage, location: str) -> None:
        self._storage, self._location = storage, location

    @classmethod
    def open(cls, location: str | Path) -> LibraryStore:
        """Open the store. `location`: a database URL (`postgresql://...`, `sqlite:///...`), or the path of an SQLite
        file, into which an Optuna journal of an earlier version is changed first.

        Raises `LibraryError` if the store cannot be opened.
        """
        with _translated(str(location)):
            if "://" in str(location):
                return cls(RDBStorage(str(location)), str(location))
            path = Path(location).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            if _is_journal(path):
                _convert(path)
            return cls(_sqlite(path), str(location))

    def add(self, run: LibraryRun) -> int:
        """Store a run, or those of its trials (by number) that are not stored yet; return how many these were."""
        with _translated(self._location), quiet():
            study = self._study(run)
            known = {trial.number for stored in _stored(study) for trial in stored.trials}
            new = [trial for trial in run.trials if trial.number not in known]
            for trial in new:
                study.add_trial(_template(run, trial))
            return len(new)

    def runs(self) -> tuple[LibraryRun, ...]:
        """Return all runs in the order in which they were started."""
        with _translated(self._location), quiet():
            names = [name for name in optuna.get_all_study_names(self._storage) if name.startswith(_PREFIX)]
            studies = [optuna.load_study(study_name=name, storage=self._storage) for name in names]
            return tuple(run for study in studies for run in _stored(study))

    def _study(self, run: LibraryRun) -> optuna.Study:
        name = _PREFIX + run.run_id
        if name in optuna.get_all_study_names(self._storage):
            study = optuna.load_study(study_name=name, storage=self._storage)
        else:
            directions = ["maximize" if goal.startswith("max ") else "minimize" for goal in run.goals]
            study = optuna.create_study(storage=self._storage, study_name=name, directions=directions or None)
        if _DATA not in study.user_attrs:
            study.set_user_attr(_DATA, run_line(run))
        return study


def _sqlite(path: Path) -> RDBStorage:
    return RDBStorage(str(URL.create("sqlite", database=str(path))))  # quoted: `?` ends a path in a URL


def _is_journal(path: Path) -> bool:
    """Return whether there is a file with something in it that is no SQLite database."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(15)
    return bool(start) and start != b"SQLite format 3"


def _convert(path: Path) -> None:
    """Replace a journal by an SQLite file with the same studies, or leave it as it is."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        journal = JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # Optuna's, of a file that is no journal
        raise LibraryError(f"it is neither a database nor a journal: {error}") from error
    try:
        converted = _sqlite(partial)
        with quiet():
            for name in optuna.get_all_study_names(journal):
                optuna.copy_study(from_study_name=name, from_storage=journal, to_storage=converted)
        if _is_journal(path):  # else another process was quicker
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _template(run: LibraryRun, trial: Trial) -> optuna.trial.FrozenTrial:
    """Return the trial for Optuna to display: with the values of the run's goals (none without goals), or as a FAIL."""
    metrics = [goal.partition(" ")[2] for goal in run.goals]
    values = [trial.outcome.metrics[name] for name in metrics if name in trial.outcome.metrics]
    state = TrialState.COMPLETE if values and len(values) == len(metrics) else TrialState.PRUNED
    if trial.outcome.failure is not None:
        state = TrialState.FAIL
    return optuna.trial.create_trial(
        state=state,
        values=values if state == TrialState.COMPLETE else None,
        user_attrs={_DATA: trial_line(run.run_id, trial)},
    )


def _stored(study: optuna.Study) -> tuple[LibraryRun, ...]:
    """Return the run of a study; none if its writer died before it said what the run is."""
    run = [study.user_attrs[_DATA]] if _DATA in study.user_attrs else []
    trials = [each.user_attrs[_DATA] for each in study.get_trials(deepcopy=False) if run and _DATA in each.user_attrs]
    return load_lines([*run, *trials])


@contextmanager
def _translated(location: str) -> Iterator[None]:
    """Translate errors of Optuna, the database and the file system into a `LibraryError` that names the store."""
    try:
        yield
    except (LibraryError, OptunaError, SQLAlchemyError, OSError, ImportError) as error:
        shown = re.sub(r"//[^/@]*@", "//...@", location)  # without user and password
        raise LibraryError(f"the library {shown} cannot be used: {error}") from error
