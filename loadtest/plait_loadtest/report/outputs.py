"""Where a run is written: stdout and the files that the user requested."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait_loadtest.errors import ScenarioError
from plait_loadtest.report import parts, raw
from plait_loadtest.report.document import document, rounded

if TYPE_CHECKING:
    from plait_loadtest.capacity import Capacity
    from plait_loadtest.session import FinishedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The requested outputs. `json`: a path, `-` for stdout instead of the table, None: no JSON."""

    json: str | None = None
    raw: Path | None = None
    html: Path | None = None
    locust: Path | None = None
    save: Path | None = None

    def check(self) -> None:
        """Raise `ScenarioError` if a file cannot be written: before the load, not after it."""
        if self.raw is not None:
            raw.check_path(self.raw)
        if self.save is not None:
            parts.check_path(self.save)
        files = [self.raw, self.save, self.html, self.locust, Path(self.json) if self.json not in (None, "-") else None]
        for path in files:
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ScenarioError(f"{path} cannot be written: its folder does not exist, or it is a folder itself")

    def write(self, session: FinishedRun, *, capacity: Capacity | None = None) -> None:
        """Write everything; the table, or the JSON document, goes to stdout. Raises OSError."""
        text = self.write_files(session, capacity=capacity)
        _to_stdout(text if self.json == "-" else None, session, capacity)

    def write_files(self, session: FinishedRun, *, capacity: Capacity | None = None) -> str:
        """Write only the files; return the JSON document. Raises OSError."""
        found = report(session, capacity)
        text = json.dumps(found, indent=1, allow_nan=False)
        if self.json is not None and self.json != "-":
            Path(self.json).write_text(text + "\n", encoding="utf-8")
        if self.raw is not None:
            raw.write(self.raw, session.result.records, classes=[item.name for item in session.scenario.mix])
        if self.save is not None:
            parts.write(self.save, session)
        if self.html is not None:
            from plait_loadtest.report.html import page

            self.html.write_text(page(session, found), encoding="utf-8")
        if self.locust is not None:
            from plait_loadtest.report.locustfile import locustfile

            self.locust.write_text(locustfile(session.scenario, file=self.locust.name), encoding="utf-8")
        return text


def report(session: FinishedRun, capacity: Capacity | None = None) -> dict[str, Any]:
    """Return the JSON document of a session, and of the search that it confirmed."""
    found = document(session.summary, session.scenario, session.verdicts, started_unix_s=session.result.started_unix_s)
    found["reconnects"] = session.result.reconnects
    found["part"] = str(session.part)
    if capacity is not None:
        found["capacity"] = _numbers(asdict(capacity), rounded)
    return found


def _to_stdout(text: str | None, session: FinishedRun, capacity: Capacity | None) -> None:
    from rich.console import Console

    from plait_loadtest.report.table import print_capacity, print_table

    if text is not None:
        sys.stdout.write(text + "\n")
        return
    console = Console(soft_wrap=True)
    if capacity is not None:
        print_capacity(capacity, console)
    print_table(session.summary, session.verdicts, console)


def _numbers(value: Any, change: Callable[[float], Any]) -> Any:
    """Return `value` with `change` applied to every float in it."""
    if isinstance(value, dict):
        return {key: _numbers(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item, change) for item in value]
    return change(value) if isinstance(value, float) else value
