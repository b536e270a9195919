"""The library as JSON lines: one line per run, then one per trial. Parsing is strict, and lines are self-contained.

A line has `plait_library` (the version of this format that it needs: 1, or 2 if it says what knobs set), `kind` (`run`
or `trial`) and the fields of `LibraryRun` or `Trial`; a trial names its run. A truncated last line is dropped: its
writer died. Any other error is a `LibraryError` with the line number, also that of a line of a later version.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
)
from pydantic import ValidationError as PydanticError

from plait_autoconfig.errors import LibraryError, TunerError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.values import FailureKind, Hardware, Trial, TrialOutcome

FORMAT = 2

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
_Value = StrictBool | StrictInt | StrictFloat | StrictStr
_Count = Annotated[int, Field(ge=0)]


def _date(text: str) -> str:
    if text:
        datetime.fromisoformat(text)
    return text


class _Row(BaseModel):
    model_config = _STRICT
    plait_library: Literal[1, 2] = 1


class HardwareRow(BaseModel):
    """The stored form of `Hardware`."""

    model_config = _STRICT
    name: str = ""
    cpus: _Count = 0
    memory_bytes: _Count = 0
    accelerator: str = ""
    accelerators: _Count = 0
    accelerator_memory_bytes: _Count = 0
    price_per_hour: float = 0.0


class RunRow(_Row):
    """The line of a run."""

    kind: Literal["run"] = "run"
    run_id: Annotated[str, Field(min_length=1)]
    service: str
    units: dict[str, str] = {}
    sets: dict[str, str] = {}
    workload: dict[str, float] = {}
    hardware: HardwareRow = HardwareRow()
    versions: dict[str, str] = {}
    goals: tuple[str, ...] = ()
    started_at: Annotated[str, AfterValidator(_date)] = ""


class TrialRow(_Row):
    """The line of a trial: either `metrics`, or `failure` and `detail`."""

    kind: Literal["trial"] = "trial"
    run_id: Annotated[str, Field(min_length=1)]
    number: _Count
    config: dict[str, _Value]
    metrics: dict[str, float] = {}
    failure: FailureKind | None = None
    detail: str = ""
    duration_s: Annotated[float, Field(ge=0)] = 0.0
    seed: int = 0
    repeat: _Count = 0


_LINE: TypeAdapter[RunRow | TrialRow] = TypeAdapter(Annotated[RunRow | TrialRow, Field(discriminator="kind")])


def dump_lines(runs: Iterable[LibraryRun]) -> Iterator[str]:
    """Yield the lines of runs, without line ends."""
    for run in runs:
        yield run_line(run)
        for trial in run.trials:
            yield trial_line(run.run_id, trial)


def load_lines(lines: Iterable[str]) -> tuple[LibraryRun, ...]:
    """Parse lines, in any order of runs; see the module docstring. Raises `LibraryError` naming the line."""
    runs: dict[str, LibraryRun] = {}
    trials: dict[str, list[Trial]] = {}
    texts = [(number, text.strip()) for number, text in enumerate(lines, 1) if text.strip()]
    for position, (number, text) in enumerate(texts):
        try:
            fields = json.loads(text)
        except ValueError as error:
            if position == len(texts) - 1:
                break
            raise LibraryError(f"line {number} of the library is no JSON: {error}") from error
        if _is_later(fields):
            later = f"has format {fields['plait_library']}, and this version of plait reads {FORMAT}"
            raise LibraryError(f"line {number} of the library {later}; update plait")
        row = _row(text, number)
        if isinstance(row, TrialRow):
            if row.run_id not in runs:
                msg = f"line {number} of the library is a trial of {row.run_id}, a run that no line before it describes"
                raise LibraryError(msg)
            trials[row.run_id].append(_trial(row, number))
        elif row.run_id in runs:
            raise LibraryError(f"line {number} of the library describes the run {row.run_id} again")
        else:
            runs[row.run_id], trials[row.run_id] = _run(row), []
    return tuple(replace(run, trials=tuple(trials[run_id])) for run_id, run in runs.items())


def run_line(run: LibraryRun) -> str:
    """Return the line that stores a run, without its trials."""
    fields = {name: value for name, value in asdict(run).items() if name != "trials"}
    if not fields["sets"]:
        del fields["sets"]
    return _line("run", fields, version=2 if run.sets else 1)


def trial_line(run_id: str, trial: Trial) -> str:
    """Return the line that stores a trial."""
    fields = asdict(trial)
    said = {name: value for name, value in fields.pop("outcome").items() if value}
    return _line("trial", {"run_id": run_id, **fields, **said})


def run_from(line: str) -> LibraryRun:
    """Parse a stored run, without its trials. Raises `LibraryError`."""
    row = _row(line, 0)
    if not isinstance(row, RunRow):
        raise LibraryError("a trial is stored where a run should be")
    return _run(row)


def trial_from(line: str) -> Trial:
    """Parse a stored trial. Raises `LibraryError`."""
    row = _row(line, 0)
    if not isinstance(row, TrialRow):
        raise LibraryError("a run is stored where a trial should be")
    return _trial(row, 0)


def _line(kind: str, fields: Mapping[str, Any], *, version: int = 1) -> str:
    return json.dumps({"plait_library": version, "kind": kind, **fields}, separators=(",", ":"), allow_nan=False)


def _is_later(fields: object) -> bool:
    version = fields.get("plait_library") if isinstance(fields, dict) else None
    return isinstance(version, int) and version > FORMAT


def _row(text: str, number: int) -> RunRow | TrialRow:
    try:
        return _LINE.validate_json(text)
    except PydanticError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        raise LibraryError(f"{_where(number)}{': ' + place if place else ''}: {first['msg']}") from error


def _where(number: int) -> str:
    return f"line {number} of the library" if number else "the store"


def _run(row: RunRow) -> LibraryRun:
    fields = row.model_dump(exclude={"plait_library", "kind", "hardware"})
    return LibraryRun(**fields, hardware=Hardware(**row.hardware.model_dump()), trials=())


def _trial(row: TrialRow, number: int) -> Trial:
    try:
        outcome = TrialOutcome(metrics=row.metrics, failure=row.failure, detail=row.detail)
    except TunerError as error:
        raise LibraryError(f"{_where(number)}: {error}") from error
    fields = row.model_dump(include={"number", "config", "duration_s", "seed", "repeat"})
    return Trial(outcome=outcome, **fields)


@cache
def starter_runs() -> tuple[LibraryRun, ...]:
    """Return the runs that ship with plait: its image engine and its ranker under eight loads, on a small machine.

    Each was measured by `python -m plait_bench.autoconfig.cells WORKLOAD --out FILE`.
    """
    stored = resources.files("plait_autoconfig").joinpath("starter_library.jsonl.gz").read_bytes()
    return load_lines(gzip.decompress(stored).decode().splitlines())
