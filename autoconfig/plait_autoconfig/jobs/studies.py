"""Optuna's storages: the copy of a job for Optuna's own tools, and jobs that earlier versions kept in a study.

Until plait had `job.sqlite`, a job's measurements were an Optuna study (`study.journal`, or the database of
`JobSpec.storage`), the job itself `resolved.json`, and how it ended files of one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from sqlalchemy.exc import SQLAlchemyError

from plait_autoconfig.errors import JobBroken, OutsideSpace
from plait_autoconfig.jobs.records import JobFacts, Record
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.optuna_forms import quiet
from plait_autoconfig.values import TuningSubject

_CLAIM, _END = "plait:claim", "plait:end"
_SUBJECT, _WARNINGS, _EXHAUSTED = "plait:subject", "plait:warnings", "plait:exhausted"
_RECORD = TypeAdapter(Record)


def copy_study(storage: str | BaseStorage, spec: JobSpec, folder: Path, records: Sequence[Record]) -> None:
    """Add the measurements that are over and compare configurations to the job's study in a storage (or a database by
    URL), where Optuna's tools can show them; those that it has already are left as they are. Raises `JobBroken`."""
    with _translated(folder), quiet():
        directions = ["maximize" if goal.direction == "max" else "minimize" for goal in spec.goal.goals]
        study = optuna.create_study(
            storage=storage, study_name=_name(spec, folder), directions=directions, load_if_exists=True
        )
        finished = [each.user_attrs for each in study.trials if each.state.is_finished()]
        known = {attributes[_CLAIM]["nonce"] for attributes in finished if _CLAIM in attributes}
        for record in records:
            # What compares nothing has no value, and would be shown as a failure.
            if record.status != "running" and record.kind.compares and record.claim.nonce not in known:
                study.add_trial(_trial(spec, record))


def forget_study(storage: str | BaseStorage, spec: JobSpec, folder: Path) -> None:
    """Delete the job's study in a storage, if there is one. Raises `JobBroken`."""
    with _translated(folder), quiet(), suppress(KeyError):
        optuna.delete_study(study_name=_name(spec, folder), storage=storage)


def _trial(spec: JobSpec, record: Record) -> FrozenTrial:
    """Return the trial for Optuna to display. Configurations outside the space have no parameters there."""
    distributions, params = spec.space.distributions(), {}
    try:
        params = dict(spec.space.check(record.config))
    except OutsideSpace:
        distributions = {}
    losses = None if record.outcome is None else spec.goal.losses(record.outcome)
    ran: dict[str, Any] = {"state": TrialState.FAIL}
    if losses is not None and record.outcome is not None:
        values = [record.outcome.metrics[goal.metric] for goal in spec.goal.goals]
        ran = {"state": TrialState.COMPLETE, "values": values, "constraints": spec.goal.excesses(record.outcome)}
    return create_trial(
        **ran,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs={_CLAIM: to_jsonable_python(record.claim), "kind": record.kind.value},
    )


def earlier_job(folder: Path) -> tuple[JobSpec, JobFacts, tuple[Record, ...]]:
    """Read what an earlier version left in the folder of a job: the job, its facts and its measurements. Nothing there
    is changed. Raises `JobBroken`."""
    path = folder / "resolved.json"
    try:
        spec = JobSpec.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # pydantic's, and of bytes that are no text
        where = f": {'.'.join(map(str, error.errors()[0]['loc']))}" if isinstance(error, ValidationError) else ""
        raise JobBroken(f"{path} is damaged{where}; the job cannot be resumed") from error
    journal, records, attributes = folder / "study.journal", [], {}
    with _translated(folder), quiet():
        if spec.storage is not None or journal.is_file():
            storage = RDBStorage(spec.storage) if spec.storage else JournalStorage(JournalFileBackend(str(journal)))
            study_id = storage.get_study_id_from_name(_name(spec, folder))
            attributes = storage.get_study_user_attrs(study_id)
            trials = storage.get_all_trials(study_id, deepcopy=False)
            records = [_record(each) for each in trials if _CLAIM in each.user_attrs]
        signs = {name: _text_of(folder / name) for name in ("failure", "done")}
        subject = TypeAdapter(TuningSubject | None).validate_python(attributes.get(_SUBJECT))
        facts = JobFacts(
            subject=subject,
            warnings=tuple(attributes.get(_WARNINGS, ())),
            exhausted=str(attributes.get(_EXHAUSTED, "")),
            cancelled=(folder / "cancelled").exists(),
            **signs,
        )
        return spec, facts, tuple(records)


def _record(trial: FrozenTrial) -> Record:
    end = trial.user_attrs.get(_END, {})
    return _RECORD.validate_python({"number": trial.number, "claim": trial.user_attrs[_CLAIM], **end})


def _name(spec: JobSpec, folder: Path) -> str:
    return spec.name if spec.storage is None else f"{spec.name}:{folder.absolute()}"


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Translate what Optuna, SQLAlchemy and drivers raise, also for a journal that nobody of us wrote."""
    try:
        yield
    except (OptunaError, SQLAlchemyError, ImportError, OSError, ValueError, LookupError, TypeError) as error:
        kind = "" if isinstance(error, OSError | OptunaError) else f"{type(error).__name__}: "
        detail = (str(error).splitlines() or [""])[0]
        raise JobBroken(f"the job in {folder} cannot be read or written: {kind}{detail}") from error
