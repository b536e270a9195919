"""The results files, and the document that `plait bench NAME --json` prints.

A file has, for each workload, system and metric, the newest row that counts: one that was recorded on a clean commit
and, where it is a time, on an idle host. Older ones are in git's history. Lines are JSON: what the rows of a run have
in common (bench, commit, date, and the host with its instruction set), followed by its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.errors import BenchError
from plait_bench.host import UNKNOWN, changes, commit
from plait_bench.runner import BenchResult

Record = Mapping[str, Any]

# Rates and ratios are good to three figures at best; six keep rounding out of the way of whoever computes with them.
_DIGITS = 6
_RUN = ("bench", "commit", "date", "host")


def require_clean(root: Path) -> None:
    """Raise `BenchError` unless the checkout is exactly its commit, so that recorded runs can be repeated."""
    at = commit(root)
    if at == UNKNOWN:
        raise BenchError(f"--record needs a git checkout, and {root} is none: a recorded row names its commit")
    if found := changes(root):
        raise BenchError(f"--record needs a clean checkout; commit, stash or remove first: {', '.join(found)}")


def document(bench: str, commit: str, host: Mapping[str, Any], result: BenchResult) -> dict[str, Any]:
    """Make the document of a result.

    `ratios` are medians of pairwise ratios; their 20th and 80th percentiles are in `ratio_spreads`.
    """
    ratios = result.ratios
    written = {
        "bench": bench,
        "commit": commit,
        "host": host,
        "rows": [asdict(row) for row in result.rows if row.unit != RATIO],
        "ratios": {key: row.value for key, row in ratios.items()},
        "ratio_spreads": {key: {"p20": row.p20, "p80": row.p80, "n": row.n} for key, row in ratios.items()},
        "left_out": result.left_out,
        "missed": result.missed,
    }
    return _rounded(written)


def _rounded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value as JSON has it, with all its floats rounded."""
    rounded: dict[str, Any] = json.loads(json.dumps(value), parse_float=lambda digits: round(float(digits), _DIGITS))
    return rounded


def read(path: Path) -> list[dict[str, Any]]:
    """Read all rows, each with what is its run's; none if there is no file. Raises `BenchError`."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    run: dict[str, Any] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = json.loads(line)
            if "run" in found:
                run = found["run"]
            else:
                float(found["value"])  # what is no row has none
                rows.append({**run, **found})
        except (ValueError, KeyError) as error:
            raise BenchError(f"{path}, line {number}: not a row of results ({error!r})") from error
    return rows


def put(path: Path, bench: str, commit: str, host: Mapping[str, Any], rows: Sequence[ResultRow]) -> int:
    """Write the rows that count in the place of older ones of the same workload, system and metric; return how many
    did not count. Raises `BenchError` if the file cannot be read."""
    counted = [row for row in rows if not row.busy]
    run = {"bench": bench, "commit": commit, "date": host.get("date", ""), "host": dict(host)}
    new = [{**run, **_rounded(asdict(row))} for row in counted]
    keys = {row.key for row in counted}
    kept = [row for row in read(path) if (row["workload"], row["system"], row["metric"]) not in keys]
    write(path, [*kept, *new])
    return len(rows) - len(counted)


def write(path: Path, rows: Sequence[Record]) -> None:
    """Write rows, each run once before its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for run, of in groupby(rows, key=lambda row: {name: row[name] for name in _RUN}):
            file.write(_line({"run": run}))
            file.writelines(_line({name: row[name] for name in row if name not in _RUN}) for row in of)


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"
