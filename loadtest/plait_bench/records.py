"""The results files: a JSON line for each recorded run, followed by one for each of its rows; append-only.

A ratio is a row whose system is `ours/theirs` and whose unit is `ratio`. Each row carries its commit, date, load,
rounds and spread, and whether the host was busy. A row recorded in several runs appears several times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from plait_bench.errors import RecordError
from plait_bench.host import UNKNOWN, changes, commit

Record = Mapping[str, Any]

_NAMED = 3
_RUN = ("bench", "commit", "date", "host")
"""What the rows of a run have in common: a file with the host's facts in every row is three times as long."""
_NEEDED = ("bench", "commit", "host", "system", "workload", "metric", "unit", "value", "p20", "p80", "n")
_MARKS = ("load", "wake_us", "busy")


def require_clean(root: Path) -> None:
    """Raise `RecordError` unless the checkout is exactly its commit, so that recorded runs can be repeated."""
    at = commit(root)
    if at == UNKNOWN:
        raise RecordError(f"--record needs a git checkout, and {root} is none: a recorded row names its commit")
    if found := changes(root):
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        names = ", ".join(found[:_NAMED]) + more
        raise RecordError(f"--record needs a clean checkout; commit, stash or remove first: {names}")


def records_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the lines of a document: its rows, then its ratios; each carries the run's bench, commit, date and host."""
    host = document["host"]
    run = {"bench": document["bench"], "commit": document["commit"], "date": host.get("date", "")}
    marks = {
        (row["workload"], row["metric"], row["system"]): {name: row[name] for name in _MARKS}
        for row in document["rows"]
    }
    ratios = []
    for key, value in document["ratios"].items():
        workload, metric, pair = key.split(":", 2)
        ratio = {"system": pair, "workload": workload, "metric": metric, "unit": "ratio", "value": value}
        ratio |= {**document["ratio_spreads"][key], "rounds": document["ratio_rounds"][key]}
        ratio |= {"layout": "", "kind": "measured", **marks.get((workload, metric, pair.partition("/")[0]), {})}
        ratios.append(ratio)
    return [{**run, **row, "host": host} for row in (*document["rows"], *ratios)]


def read(path: Path) -> list[dict[str, Any]]:
    """Read all rows, oldest first, each with what is its run's; none if there is no file. Raises `RecordError`."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    run: dict[str, Any] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = json.loads(line)
            if "run" in found:
                run = dict(found["run"])
                continue
            row = {**run, **found}
            missing = [name for name in _NEEDED if name not in row]
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not a row of results ({error!r})") from error
        if missing:
            raise RecordError(f"{path}, line {number}: not a row of results (no {missing[0]})")
        rows.append(row)
    return rows


def append(path: Path, new: Sequence[Record]) -> None:
    """Append the rows; existing lines stay unchanged. Raises `RecordError` if the existing ones cannot be read."""
    read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for run, rows in groupby(new, key=lambda row: {name: row[name] for name in _RUN if name in row}):
            file.write(_line({"run": run}))
            file.writelines(_line({name: row[name] for name in row if name not in run}) for row in rows)


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"
