"""The folder of a job, which is all there is of it: what was asked for, every measurement, and who works on it.

```
job.yaml        as it was given, for people
resolved.json   with every default, for the machine
study.journal   the measurements: an Optuna study (or in the database of `JobSpec.storage`); opens in optuna-dashboard
trials/0007/    artefacts of measurement 7
workers/        one file per worker that is at it (`presence`)
logs/           what measuring processes printed
```

A claim is one line of the journal, the end of a measurement another, each written and synced at once. What is in our
attributes counts; Optuna's own state of a trial is a copy of it for Optuna's tools.
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
from plait_autoconfig.jobs.measurer import MeasurementKind, TuningSubject, subject_from_json, subject_to_json
from plait_autoconfig.jobs.records import Claim, Record, claim_from_json, claim_to_json, end_to_json, with_end
from plait_autoconfig.jobs.spec import JobSpec, changed_settings
from plait_autoconfig.logs import quiet

_CLAIM, _END = "plait:claim", "plait:end"
_SUBJECT, _WARNINGS, _EXHAUSTED = "plait:subject", "plait:warnings", "plait:exhausted"
_RESOLVED = "resolved.json"


class JobStore:
    """A job's folder, opened. All methods may be called from several processes at once."""

    def __init__(self, folder: Path, spec: JobSpec, storage: BaseStorage, study_id: int) -> None:
        self.folder, self.spec = folder, spec
        self._storage, self._study_id = storage, study_id
        self._final: dict[int, Record] = {}
        self._ids: dict[int, int] = {}

    @classmethod
    def open_or_create(cls, folder: Path, spec: JobSpec, text: str = "") -> Self:
        """Resumes the job in the folder, or makes it. ``text``: the job file, kept for people.

        Budget, confirmation and limits of time may have changed since (`changed_settings`); then the new ones count;
        and anything may while nothing was measured, as in a job that was refused for a typing error.
        Raises `JobRefused` if anything else did, `JobBroken` if the folder can not be used.
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
        """The job in a folder. Raises `JobRefused` if there is none, `JobBroken` if it can not be read."""
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
        """Makes room for another job, if nothing was measured and nobody measures; whether it did."""
        if any(record.status != "lost" for record in self.records()):
            return False
        self._storage.delete_study(self._study_id)
        return True

    # ---- measurements ------------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While nobody else decides what to measure. Held for milliseconds, not while measuring."""
        with _locked(self.folder):
            yield

    def records(self) -> tuple[Record, ...]:
        """All measurements, in the order in which they were claimed. Raises `JobBroken`."""
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
        """Takes a measurement on; the caller holds `exclusive`."""
        with _translated(self.folder):
            trial_id = self._storage.create_new_trial(self._study_id, self._template(claim))
            record = Record(number=self._storage.get_trial_number_from_id(trial_id), claim=claim)
            self._ids[record.number] = trial_id
            return record

    def end(self, record: Record) -> bool:
        """Stores how a measurement ended. False, and nothing is stored, if somebody else declared it lost before."""
        with self.exclusive(), _translated(self.folder):
            return self.end_held(record)

    def end_held(self, record: Record) -> bool:
        """`end` for a caller that holds `exclusive`."""
        known = {each.number: each for each in self.records()}[record.number]
        if known.status != "running":
            return False
        self._storage.set_trial_user_attr(self._ids[record.number], _END, end_to_json(record))
        self._mirror(record)
        return True

    def mend(self) -> None:
        """Completes the copies for Optuna's tools that a killed worker did not; the caller holds `exclusive`."""
        with _translated(self.folder):
            records = {record.number: record for record in self.records()}
            for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
                record = records.get(trial.number)
                if record is not None and record.status != "running" and not trial.state.is_finished():
                    self._mirror(record)

    def artefacts(self, number: int) -> Path:
        """The folder of a measurement, made."""
        folder = self.folder / "trials" / f"{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ---- the job -----------------------------------------------------------------------------------------------------

    @property
    def workers_folder(self) -> Path:
        """Where workers leave their sign (`presence`)."""
        return self.folder / "workers"

    def workers(self, *, now_s: float) -> tuple[str, ...]:
        """Those that are at it."""
        return present_workers(self.workers_folder, now_s=now_s)

    def subject(self) -> TuningSubject | None:
        """What is tuned; None before a measurer has said it."""
        raw = self._attributes().get(_SUBJECT)
        return None if raw is None else subject_from_json(raw)

    def set_subject(self, subject: TuningSubject) -> None:
        """Remembers what is tuned."""
        with _translated(self.folder):
            self._storage.set_study_user_attr(self._study_id, _SUBJECT, subject_to_json(subject))

    def warnings(self) -> tuple[str, ...]:
        """Sentences that concern the whole job."""
        return tuple(self._attributes().get(_WARNINGS, ()))

    def warn(self, sentences: tuple[str, ...]) -> None:
        """Adds sentences, each once."""
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
        """Remembers it, or that it is no longer so."""
        with _translated(self.folder):
            self._storage.set_study_user_attr(self._study_id, _EXHAUSTED, why)

    def cancel(self) -> None:
        """Asks all workers to end; what they are measuring is given up, a live service is put back."""
        _write_whole(self.folder / "cancelled", "")

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for that since the job was last started."""
        return (self.folder / "cancelled").exists()

    @property
    def failure(self) -> str:
        """Why the last worker gave up; empty if none did since the job was last started."""
        try:
            return (self.folder / "failure").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def set_failure(self, text: str) -> None:
        """Remembers why a worker gave up."""
        _write_whole(self.folder / "failure", text)

    def clear_signs(self) -> None:
        """Forgets cancellation and failure: somebody starts the job again."""
        (self.folder / "cancelled").unlink(missing_ok=True)
        (self.folder / "failure").unlink(missing_ok=True)

    def _attributes(self) -> dict[str, Any]:
        with _translated(self.folder):
            attributes: dict[str, Any] = self._storage.get_study_user_attrs(self._study_id)
            return attributes

    # ---- for Optuna's tools ------------------------------------------------------------------------------------------

    def _template(self, claim: Claim) -> FrozenTrial:
        """A running trial. Configurations that are not of the space have no parameters there."""
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
        if outcome is None or losses is None or record.kind is MeasurementKind.WARM_UP:
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            return
        excesses = create_trial(state=TrialState.FAIL, constraints=self.spec.goal.excesses(outcome)).system_attrs
        for key, value in excesses.items():
            self._storage.set_trial_system_attr(trial_id, key, value)
        values = [outcome.metrics[goal.metric] for goal in self.spec.goal.goals]
        self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, values)


def _record(trial: FrozenTrial) -> Record | None:
    """None for a trial that is not ours."""
    if _CLAIM not in trial.user_attrs:
        return None
    record = Record(number=trial.number, claim=claim_from_json(trial.user_attrs[_CLAIM]))
    return with_end(record, trial.user_attrs[_END]) if _END in trial.user_attrs else record


def _read_spec(folder: Path) -> JobSpec:
    """Raises `JobBroken` for a file that is not what we wrote."""
    try:
        return JobSpec.model_validate_json((folder / _RESOLVED).read_text(encoding="utf-8"))
    except ValueError as error:  # pydantic's, and of bytes that are no text
        where = f": {'.'.join(map(str, error.errors()[0]['loc']))}" if isinstance(error, ValidationError) else ""
        msg = f"{folder / _RESOLVED} is damaged{where}; the job can not be resumed"
        raise JobBroken(msg) from error


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
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
    """Errors of Optuna, its database (or that there is none) and the file system as `JobBroken`; also of a journal that
    is not what we wrote."""
    try:
        yield
    except (OptunaError, OSError, ImportError, ValueError, LookupError, TypeError) as error:
        raise _broken(folder, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":  # whose import takes long, and few need it
            raise
        raise _broken(folder, error) from error


def _broken(folder: Path, error: Exception) -> JobBroken:
    told = (str(error).splitlines() or [""])[0]
    kind = "" if isinstance(error, OSError | OptunaError) else f"{type(error).__name__}: "
    return JobBroken(f"the job in {folder} can not be read or written: {kind}{told}")
