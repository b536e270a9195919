"""The folder of a job, which holds all of its state: the job itself, every measurement, and the active workers.

```
job.yaml        as the user wrote it, for people
resolved.json   with every default, for the machine
study.journal   the measurements: an Optuna study (or in the database of `JobSpec.storage`), for optuna-dashboard
trials/0007/    artefacts of measurement 7
workers/        one file per active worker (`heartbeat`)
logs/           output of the measuring processes
```

A claim is one line of the journal, the end of a measurement another, each written and synced at once. Our attributes
are authoritative; Optuna's own state of a trial is a copy for Optuna's tools.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from optuna.exceptions import DuplicatedStudyError, OptunaError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import ValidationError

from plait_autoconfig.errors import OutsideSpace
from plait_autoconfig.jobs.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.heartbeat import present_workers
from plait_autoconfig.jobs.journal import KernelLock, open_storage
from plait_autoconfig.jobs.measurer import TuningSubject, subject_from_json, subject_to_json
from plait_autoconfig.jobs.records import Claim, Record, claim_from_json, claim_to_json, end_to_json, with_end
from plait_autoconfig.jobs.spec import JobSpec, changed_settings
from plait_autoconfig.logs import quiet

_CLAIM, _END = "plait:claim", "plait:end"
_SUBJECT, _WARNINGS, _EXHAUSTED = "plait:subject", "plait:warnings", "plait:exhausted"
_RESOLVED = "resolved.json"


class JobStore:
    """An open job folder. All methods may be called from several processes at once."""

    def __init__(self, folder: Path, spec: JobSpec, storage: BaseStorage, study_id: int) -> None:
        self.folder, self.spec = folder, spec
        self._storage, self._study_id = storage, study_id
        self._final: dict[int, Record] = {}
        self._ids: dict[int, int] = {}

    @classmethod
    def open_or_create(cls, folder: Path, spec: JobSpec, text: str = "") -> Self:
        """Resume the job in the folder, or create it. `text`: the job file, kept for people.

        Budget, confirmation and time limits may have changed since (`changed_settings`); then the new ones apply.
        Everything may change while nothing was measured, as in a job that was rejected for a typo. Raises
        `JobRefused` if anything else changed, `JobBroken` if the folder cannot be used.
        """
        with _translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                if (folder / _RESOLVED).exists():
                    before = _read_spec(folder)
                    changed = changed_settings(before, spec)
                    if changed and not cls._opened(folder, before)._forget():
                        msg = f"{folder} holds a job with other {', '.join(changed)}; choose another folder or name"
                        raise JobRefused(msg)
                _write_whole(folder / "job.yaml", text or spec.model_dump_json(indent=2))
                _write_whole(folder / _RESOLVED, spec.model_dump_json(indent=2))
                return cls._opened(folder, spec)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the job in a folder. Raises `JobRefused` if there is none, `JobBroken` if it cannot be read."""
        with _translated(folder):
            if not (folder / _RESOLVED).is_file():
                msg = f"there is no job in {folder}"
                raise JobRefused(msg)
            with _locked(folder):
                return cls._opened(folder, _read_spec(folder))

    @classmethod
    def _opened(cls, folder: Path, spec: JobSpec) -> Self:
        storage = open_storage(spec.storage or folder / "study.journal")
        name = spec.name if spec.storage is None else f"{spec.name}:{folder.absolute()}"
        directions = [
            StudyDirection.MAXIMIZE if goal.direction == "max" else StudyDirection.MINIMIZE for goal in spec.goal.goals
        ]
        with quiet():
            try:
                study_id = storage.create_new_study(directions, name)
            except DuplicatedStudyError:
                study_id = storage.get_study_id_from_name(name)
        return cls(folder, spec, storage, study_id)

    def _forget(self) -> bool:
        """Delete the study to make room for another job, unless it has measurements; return whether it did."""
        if any(record.status != "lost" for record in self.records()):
            return False
        self._storage.delete_study(self._study_id)
        return True

    # ---- measurements ------------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock on deciding what to measure. Held for milliseconds, never while measuring."""
        with _locked(self.folder):
            yield

    def records(self) -> tuple[Record, ...]:
        """Return all measurements in the order in which they were claimed. Raises `JobBroken`."""
        found = []
        with _translated(self.folder):
            for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
                record = self._final.get(trial.number) or _record(trial)
                if record is not None:
                    self._ids[record.number] = trial._trial_id
                    if record.status != "running":
                        self._final[record.number] = record
                    found.append(record)
        return tuple(sorted(found, key=lambda record: record.number))

    def claim(self, claim: Claim) -> Record:
        """Claim a measurement; the caller holds `exclusive`."""
        with _translated(self.folder):
            trial_id = self._storage.create_new_trial(self._study_id, self._template(claim))
            record = Record(number=self._storage.get_trial_number_from_id(trial_id), claim=claim)
            self._ids[record.number] = trial_id
            return record

    def end(self, record: Record) -> bool:
        """Store how a measurement ended. Return False, storing nothing, if it was already declared lost."""
        with self.exclusive(), _translated(self.folder):
            return self.end_held(record)

    def end_held(self, record: Record) -> bool:
        """Do the same as `end` for a caller that holds `exclusive`."""
        known = {each.number: each for each in self.records()}[record.number]
        if known.status != "running":
            return False
        self._storage.set_trial_user_attr(self._ids[record.number], _END, end_to_json(record))
        self._mirror(record)
        return True

    def mend(self) -> None:
        """Complete the copies for Optuna's tools that a killed worker left unfinished; the caller holds `exclusive`."""
        with _translated(self.folder):
            records = {record.number: record for record in self.records()}
            for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
                record = records.get(trial.number)
                if record is not None and record.status != "running" and not trial.state.is_finished():
                    self._mirror(record)

    def artefacts(self, number: int) -> Path:
        """Create and return the folder of a measurement."""
        folder = self.folder / "trials" / f"{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ---- the job -----------------------------------------------------------------------------------------------------

    @property
    def workers_folder(self) -> Path:
        """The folder of the workers' heartbeat files (`heartbeat`)."""
        return self.folder / "workers"

    def workers(self, *, now_s: float) -> tuple[str, ...]:
        """Return the active workers."""
        return present_workers(self.workers_folder, now_s=now_s)

    def subject(self) -> TuningSubject | None:
        """Return what is tuned; None before a measurer has reported it."""
        raw = self._attributes().get(_SUBJECT)
        return None if raw is None else subject_from_json(raw)

    def set_subject(self, subject: TuningSubject) -> None:
        """Store what is tuned."""
        with _translated(self.folder):
            self._storage.set_study_user_attr(self._study_id, _SUBJECT, subject_to_json(subject))

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the whole job, as sentences."""
        return tuple(self._attributes().get(_WARNINGS, ()))

    def warn(self, sentences: tuple[str, ...]) -> None:
        """Add warnings, each only once."""
        known = self.warnings()
        new = [each for each in dict.fromkeys(sentences) if each not in known]
        if new:
            with _translated(self.folder):
                self._storage.set_study_user_attr(self._study_id, _WARNINGS, [*known, *new])

    @property
    def exhausted(self) -> str:
        """Why the designer ends the search; empty if it does not, or was not asked yet."""
        return str(self._attributes().get(_EXHAUSTED, ""))

    def set_exhausted(self, why: str) -> None:
        """Store why the designer ends the search; an empty text clears it."""
        with _translated(self.folder):
            self._storage.set_study_user_attr(self._study_id, _EXHAUSTED, why)

    def cancel(self) -> None:
        """Ask all workers to end; running measurements are abandoned, and a live service is restored."""
        _write_whole(self.folder / "cancelled", "")

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled since it was last started."""
        return (self.folder / "cancelled").exists()

    @property
    def failure(self) -> str:
        """Why the last worker failed; empty if none did since the job was last started."""
        return _text_of(self.folder / "failure")

    def set_failure(self, text: str) -> None:
        """Store why a worker failed."""
        _write_whole(self.folder / "failure", text)

    @property
    def done(self) -> str:
        """Why a worker found nothing left to do; empty if none did since the job was last started."""
        return _text_of(self.folder / "done")

    def set_done(self, why: str) -> None:
        """Store why nothing is left to do: a budget of minutes counts more time than the measurements took."""
        _write_whole(self.folder / "done", why)

    def clear_signs(self) -> None:
        """Clear how the job ended, because it is being started again."""
        for sign in ("cancelled", "failure", "done"):
            (self.folder / sign).unlink(missing_ok=True)

    def _attributes(self) -> dict[str, Any]:
        with _translated(self.folder):
            attributes: dict[str, Any] = self._storage.get_study_user_attrs(self._study_id)
            return attributes

    # ---- for Optuna's tools ------------------------------------------------------------------------------------------

    def _template(self, claim: Claim) -> FrozenTrial:
        """Return a running trial. Configurations outside the space have no parameters there."""
        distributions, params = self.spec.space.distributions(), {}
        try:
            params = dict(self.spec.space.check(claim.config))
        except OutsideSpace:
            distributions = {}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions={name: distributions[name] for name in params},
            user_attrs={_CLAIM: claim_to_json(claim), "kind": claim.kind.value},
        )
        trial.datetime_start = datetime.fromtimestamp(claim.at_s, UTC).astimezone().replace(tzinfo=None)
        return trial

    def _mirror(self, record: Record) -> None:
        trial_id, outcome = self._ids[record.number], record.outcome
        losses = None if outcome is None else self.spec.goal.losses(outcome)
        if outcome is None or losses is None or not record.kind.compares:
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            return
        excesses = create_trial(state=TrialState.FAIL, constraints=self.spec.goal.excesses(outcome)).system_attrs
        for key, value in excesses.items():
            self._storage.set_trial_system_attr(trial_id, key, value)
        values = [outcome.metrics[goal.metric] for goal in self.spec.goal.goals]
        self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, values)


def _record(trial: FrozenTrial) -> Record | None:
    """Return the measurement of a trial; None for a trial that is not ours."""
    if _CLAIM not in trial.user_attrs:
        return None
    record = Record(number=trial.number, claim=claim_from_json(trial.user_attrs[_CLAIM]))
    return with_end(record, trial.user_attrs[_END]) if _END in trial.user_attrs else record


def _read_spec(folder: Path) -> JobSpec:
    """Read the resolved job. Raises `JobBroken` for a file that we did not write."""
    try:
        return JobSpec.model_validate_json((folder / _RESOLVED).read_text(encoding="utf-8"))
    except ValueError as error:  # pydantic's, and of bytes that are no text
        where = f": {'.'.join(map(str, error.errors()[0]['loc']))}" if isinstance(error, ValidationError) else ""
        msg = f"{folder / _RESOLVED} is damaged{where}; the job cannot be resumed"
        raise JobBroken(msg) from error


def _text_of(path: Path) -> str:
    """Return what the file says; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _write_whole(path: Path, text: str) -> None:
    """Write the file atomically: whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = KernelLock(folder / "lock")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Translate errors of Optuna, its database (or a missing one) and the file system into `JobBroken`; also those of a
    journal that we did not write."""
    try:
        yield
    except (OptunaError, OSError, ImportError, ValueError, LookupError, TypeError) as error:
        raise _broken(folder, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":  # whose import takes long, and few need it
            raise
        raise _broken(folder, error) from error


def _broken(folder: Path, error: Exception) -> JobBroken:
    detail = (str(error).splitlines() or [""])[0]
    kind = "" if isinstance(error, OSError | OptunaError) else f"{type(error).__name__}: "
    return JobBroken(f"the job in {folder} cannot be read or written: {kind}{detail}")
