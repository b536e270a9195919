"""Measurements from a CSV file as a run of the library. A map says which column is what.

The map is YAML: `service` (who was measured), `knobs` (name: column), `metrics` (name: column, or `{column, times}`
to convert a unit), and optionally `units` (knob: unit), `sets` (knob: what it sets, `hn-picks.threads`), `failed` (a
column that is not empty where the measurement failed) and `goals`. Rows with equal knobs are repeats of one
configuration.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait_autoconfig.errors import LibraryError, TunerError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome, Value
from plait_loadtest import strict_yaml

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MetricColumn(BaseModel):
    """A column of numbers, and what to multiply them by."""

    model_config = _STRICT
    column: str
    times: float = 1.0


class CsvMap(BaseModel):
    """Which column is what; see the module docstring."""

    model_config = _STRICT
    service: Annotated[str, Field(min_length=1)]
    knobs: Annotated[dict[str, str], Field(min_length=1)]
    metrics: Annotated[dict[str, str | MetricColumn], Field(min_length=1)]
    units: dict[str, str] = {}
    sets: dict[str, str] = {}
    failed: str = ""
    goals: list[str] = []

    @model_validator(mode="after")
    def _names_knobs(self) -> Self:
        unknown = [name for name in (*self.units, *self.sets) if name not in self.knobs]
        if unknown:
            raise ValueError(f"units and sets: {unknown[0]} is no knob; they are {', '.join(self.knobs)}")
        return self

    def columns(self) -> tuple[str, ...]:
        """Return every column that it names."""
        metrics = (each if isinstance(each, str) else each.column for each in self.metrics.values())
        return (*self.knobs.values(), *metrics, *([self.failed] if self.failed else []))


def read_map(path: Path) -> CsvMap:
    """Read a map. Raises `LibraryError` naming the file and what is wrong in it."""
    try:
        return CsvMap.model_validate(strict_yaml.parse(path.read_text(encoding="utf-8"), "the map")[1])
    except ValidationError as error:
        first = error.errors()[0]
        said = strict_yaml.sentence(dict(first), ".".join(map(str, first["loc"])) or "the map")
        raise LibraryError(f"{path}: {said}") from error
    except (OSError, ValueError) as error:
        raise LibraryError(f"{path}: {error}") from error


def read_csv(path: Path, mapped: CsvMap) -> LibraryRun:
    """Read a CSV file with a header as one run; its id follows from the service and the content, so that the same file
    is not added twice. Raises `LibraryError` naming the file and the column or line."""
    try:
        content = path.read_bytes()
        table = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        rows = [(table.line_num, row) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LibraryError(f"{path}: {error}") from error
    header = list(table.fieldnames or ()) if rows else []
    for name in mapped.columns():
        if name not in header:
            has = f"it has {', '.join(header)}" if rows else "it has no rows"
            raise LibraryError(f"{path} has no column {name!r}; {has}")
        if header.count(name) > 1:
            raise LibraryError(f"{path} has {header.count(name)} columns {name!r}")
    trials, repeats = [], Counter[tuple[Value, ...]]()
    for number, (line, row) in enumerate(rows):
        try:
            if None in row:  # such as the half of a number with an unquoted comma: which is which?
                raise ValueError(f"it has more fields than the header, at its end {row[None][-1]!r}")
            config = _config(row, mapped.knobs)
            outcome = _outcome(row, mapped)
        except (TunerError, ValueError) as error:
            raise LibraryError(f"{path}, line {line}: {error}") from error
        key = tuple(config.values())
        trials.append(Trial(number=number, config=config, outcome=outcome, repeat=repeats[key]))
        repeats[key] += 1
    return LibraryRun(
        run_id=f"{mapped.service}-{hashlib.sha256(content).hexdigest()[:8]}",
        service=mapped.service,
        trials=tuple(trials),
        units={name: mapped.units.get(name, "") for name in mapped.knobs},
        sets=mapped.sets,
        goals=tuple(mapped.goals),
    )


def _config(row: Mapping[str, str | None], knobs: Mapping[str, str]) -> dict[str, Value]:
    """Return the knobs of a row; an empty field is a knob that was inactive."""
    return {name: _value(text) for name, column in knobs.items() if (text := (row[column] or "").strip())}


def _outcome(row: Mapping[str, str | None], mapped: CsvMap) -> TrialOutcome:
    if mapped.failed and (row[mapped.failed] or "").strip().lower() not in ("", "0", "false", "no", "ok"):
        return TrialOutcome.failed(FailureKind.CRASH, str(row[mapped.failed]))
    metrics = {}
    for name, where in mapped.metrics.items():
        column, times = (where, 1.0) if isinstance(where, str) else (where.column, where.times)
        text = (row[column] or "").strip()
        try:
            metrics[name] = times * float(text)
        except ValueError as error:
            raise ValueError(f"{column} is {text!r}, which is no number") from error
        if not math.isfinite(metrics[name]):
            raise ValueError(f"{column} is {text}, which is no measurement")
    return TrialOutcome(metrics=metrics)


def _value(text: str) -> Value:
    """Return the text as what a job file would read it as: true, 4, 0.5 or a word. Raises `ValueError` for NaN and
    what no float holds."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no value of a knob")
    try:
        return int(text)
    except ValueError:
        return number
