"""The results files: one JSON line for each row of each recorded run, append-only.

A row's key is (bench, commit, cpu, cores, system, workload, metric); a ratio is a row whose system is ``ours/theirs``
and whose unit is ``ratio``. A key that is there already is refused unless the caller asks to replace it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait_bench.errors import RecordError

Record = Mapping[str, Any]


def records_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a document: its rows, then its ratios; each carries the run's bench, commit and host."""
    run = {"bench": document["bench"], "commit": document["commit"]}
    ratios = [
        {
            "system": key.rpartition(":")[2],
            "workload": key.split(":")[0],
            "metric": key.split(":")[1],
            "unit": "ratio",
            "value": value,
            **document["ratio_spreads"][key],
            "layout": "",
            "kind": "measured",
        }
        for key, value in document["ratios"].items()
    ]
    return [{**run, **row, "host": document["host"]} for row in (*document["rows"], *ratios)]


def read(path: Path) -> list[dict[str, Any]]:
    """All lines, oldest first; none if there is no file. Raises `RecordError`."""
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not a row of results ({error!r})") from error
        records.append(record)
    return records


def key_of(record: Record) -> tuple[Any, ...]:
    """See the module docstring."""
    host = record["host"]
    return (
        record["bench"], record["commit"], host["cpu"], host["cores"],
        record["system"], record["workload"], record["metric"],
    )  # fmt: skip


def check_new(
    records: Iterable[Record], *, bench: str, commit: str, host: Mapping[str, Any], workloads: Sequence[str]
) -> None:
    """Raises `RecordError` if a run of these workloads was recorded: ask before measuring, not after."""
    run = (bench, commit, host["cpu"], host["cores"])
    there = sorted({r["workload"] for r in records if key_of(r)[:4] == run and r["workload"] in workloads})
    if there:
        what = f"{bench} {', '.join(there)} of commit {commit}"
        raise RecordError(f"{what} is recorded for this kind of machine; --overwrite replaces it")


def append(path: Path, new: Sequence[Record], *, overwrite: bool) -> None:
    """Adds the lines. Equal keys are refused with `RecordError`, or replaced if ``overwrite``; then nothing is lost."""
    old = read(path)
    keys = {key_of(record) for record in new}
    clash = [record for record in old if key_of(record) in keys]
    if clash and not overwrite:
        raise RecordError(f"{path}: {len(clash)} of these rows are recorded already; --overwrite replaces them")
    kept = [record for record in old if key_of(record) not in keys]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in (*kept, *new)), encoding="utf-8")
    draft.replace(path)
