"""`--raw`: one row per request, as CSV, JSON lines or NPZ by the file's suffix. Warm-up included, flagged by a column.

Columns are those of `values.RECORD` with class, outcome and why in words; times stay integer nanoseconds since the
start of the run, -1 for an instant that never came, so that nothing is lost: latency is `done_ns - scheduled_ns`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plait_loadtest.session import FinishedRun
from plait_loadtest.values import RECORD, Records, RequestOutcome

SUFFIXES = (".csv", ".jsonl", ".npz")
COLUMNS = tuple({"kind": "class"}.get(name, name) for name in RECORD.names or ())


def write(path: Path, session: FinishedRun) -> None:
    """Write the rows; see the module docstring."""
    records, whys = session.result.records, session.result.whys
    classes = [item.name for item in session.scenario.mix]
    if path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, records=records, classes=np.array(classes), whys=np.array(whys))
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(row.values() for row in _rows(records, classes, whys))
        else:
            file.writelines(json.dumps(row) + "\n" for row in _rows(records, classes, whys))


def _rows(records: Records, classes: Sequence[str], whys: Sequence[str]) -> Iterator[dict[str, Any]]:
    names = {outcome.value: outcome.name.lower() for outcome in RequestOutcome}
    for values in records.tolist():
        row = dict(zip(COLUMNS, values, strict=True))
        row["class"], row["outcome"], row["why"] = classes[row["class"]], names[row["outcome"]], whys[row["why"]]
        row["server_ms"] = None if math.isnan(row["server_ms"]) else round(row["server_ms"], 3)
        yield row
