"""Optuna's storages: the copy of a job for Optuna's own tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic_core import to_jsonable_python
from sqlalchemy.exc import SQLAlchemyError

from plait_autoconfig.errors import JobBroken, OutsideSpace
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.optuna_forms import quiet

_CLAIM = "plait:claim"


def copy_study(storage: str, spec: JobSpec, folder: Path, records: Sequence[Record]) -> None:
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


def forget_study(storage: str, spec: JobSpec, folder: Path) -> None:
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


def _name(spec: JobSpec, folder: Path) -> str:
    return f"{spec.name}:{folder.absolute()}"


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Translate what Optuna, SQLAlchemy and drivers raise, also for a study that nobody of us wrote."""
    try:
        yield
    except (OptunaError, SQLAlchemyError, ImportError, OSError, ValueError, LookupError, TypeError) as error:
        kind = "" if isinstance(error, OSError | OptunaError) else f"{type(error).__name__}: "
        detail = (str(error).splitlines() or [""])[0]
        raise JobBroken(f"the job in {folder} cannot be read or written: {kind}{detail}") from error
