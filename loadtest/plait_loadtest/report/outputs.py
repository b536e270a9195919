"""Where a run is written: stdout and the files that the user requested."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plait_loadtest import parts
from plait_loadtest.errors import ScenarioError
from plait_loadtest.report.document import report
from plait_loadtest.values import RECORD, Records, RequestOutcome

if TYPE_CHECKING:
    from plait_loadtest.capacity import Capacity
    from plait_loadtest.session import FinishedRun

_FORMATS = {"raw": (".csv", ".jsonl", ".npz"), "save": (".npz",)}
COLUMNS = tuple({"kind": "class"}.get(name, name) for name in RECORD.names or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The requested outputs. `json`: a path, `-` for stdout instead of the table, None: no JSON."""

    json: str | None = None
    raw: Path | None = None
    html: Path | None = None
    locust: Path | None = None
    save: Path | None = None

    def check(self) -> None:
        """Raise `ScenarioError` if a file cannot be written, or would be twice: before the load, not after it."""
        written: dict[Path, str] = {}
        for kind, path in self._paths().items():
            if path.suffix not in (formats := _FORMATS.get(kind, (path.suffix,))):
                raise ScenarioError(f"--{kind} {path}: the name must end in {', '.join(formats)}")
            if (other := written.setdefault(path.resolve(), kind)) != kind:
                raise ScenarioError(f"--{other} and --{kind} are both {path}")
            if not (folder := path.absolute().parent).exists():
                raise ScenarioError(f"--{kind}: the folder {path.parent} does not exist")
            if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
                raise ScenarioError(f"{path} cannot be written: it or its folder is read-only or of another kind")

    def write(self, session: FinishedRun, *, capacity: Capacity | None = None) -> list[str]:
        """Write the table, or the JSON document, to stdout, then the files. Return a sentence for each that could not
        be written; it costs none of the others."""
        found = report(session, capacity)
        failed = []
        for kind, path in {"stdout": Path("stdout"), **self._paths()}.items():
            try:
                self._write(kind, path, session, found, capacity)
            except Exception as error:  # a long run must not be lost for what is wrong with one of them
                failed.append(f"{path} could not be written: {error}")
        return failed

    def write_files(self, session: FinishedRun) -> None:
        """Write only the files. Raises OSError."""
        found = report(session)
        for kind, path in self._paths().items():
            self._write(kind, path, session, found, None)

    def _paths(self) -> dict[str, Path]:
        json_path = None if self.json is None or self.json == "-" else Path(self.json)
        given = {"json": json_path, "raw": self.raw, "save": self.save, "html": self.html, "locust": self.locust}
        return {kind: path for kind, path in given.items() if path is not None}

    def _write(
        self, kind: str, path: Path, session: FinishedRun, found: dict[str, Any], capacity: Capacity | None
    ) -> None:
        match kind:
            case "stdout":
                _to_stdout(_text(found) if self.json == "-" else _table(session, capacity))
            case "json":
                path.write_text(_text(found), encoding="utf-8")
            case "raw":
                write_rows(path, session)
            case "save":
                parts.write(path, session)
            case "html":
                from plait_loadtest.report.html import page

                path.write_text(page(session, found), encoding="utf-8")
            case "locust":
                from plait_loadtest.report.locustfile import locustfile

                path.write_text(locustfile(session.scenario, file=path.name), encoding="utf-8")


def _text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _table(session: FinishedRun, capacity: Capacity | None) -> str:
    from rich.console import Console

    from plait_loadtest.report.table import print_capacity, print_table

    console = Console(soft_wrap=True)
    with console.capture() as captured:
        if capacity is not None:
            print_capacity(capacity, console)
        print_table(session, console)
    return captured.get()


def _to_stdout(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - else Python fails again at its end
        raise


def write_rows(path: Path, session: FinishedRun) -> None:
    """Write one row per request, as CSV, JSON lines or NPZ by the file's suffix. Warm-up included, flagged by a column.

    Columns are those of `values.RECORD` with class, outcome and why in words; times stay integer nanoseconds since the
    start of the run, -1 for an instant that never came, so that nothing is lost: latency is `done_ns - scheduled_ns`.
    """
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
        row["server_ms"] = round(row["server_ms"], 3) if math.isfinite(row["server_ms"]) else None
        yield row
