"""Arrival times from a CSV file."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from plait_loadtest.errors import ScenarioError


def read_times(path: Path, column: str) -> npt.NDArray[np.float64]:
    """Return seconds since the earliest entry of `column`, ascending, float64 (N,), N > 0.

    The file is CSV with a header line, optionally compressed (.gz). Entries are all numbers of seconds, or all dates
    in ISO 8601 (no zone: UTC). Raises `ScenarioError` naming file and line.
    """
    try:
        with _open(path) as file:
            values = np.array(list(_values(path, column, file)), dtype=np.float64)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError(f"arrivals.file: {path} cannot be read: {reason}") from error
    except (UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ScenarioError(f"arrivals.file: {path} is not a CSV file: {error}") from error
    if values.size == 0:
        raise ScenarioError(f"arrivals.file: {path} has no row below its header")
    values.sort()
    return np.asarray(values - values[0])


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _values(path: Path, column: str, file: TextIO) -> Iterator[float]:
    rows = csv.reader(file)
    header = next(rows, [])
    if column not in header:
        raise ScenarioError(f"arrivals.column: {path} has no column {column!r}; its columns are {', '.join(header)}")
    position = header.index(column)
    forms: dict[str, Callable[[str], float]] = {"a number of seconds": _number, "a date": _date}
    for row in rows:
        if not row:
            continue
        text = row[position].strip() if position < len(row) else ""
        for what, read in forms.items():
            with suppress(ValueError):
                value = read(text)
                forms = {what: read}  # of the first entry, which all must have
                break
        else:
            what = " or ".join(forms)
            raise ScenarioError(f"arrivals.file: {path}, line {rows.line_num}: {text!r} is not {what}")
        yield value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _date(text: str) -> float:
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
