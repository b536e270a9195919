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
from functools import cache
from importlib import resources
from typing import Any

from pydantic import TypeAdapter, ValidationError

from plait_autoconfig.errors import LibraryError, TunerError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.values import Trial

FORMAT = 2

_RUN, _TRIAL = TypeAdapter(LibraryRun), TypeAdapter(Trial)


class _NoJson(LibraryError):
    """A line whose writer died, or that none of us wrote."""


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
    for number, text in texts:
        where = f"line {number} of the library"
        try:
            run_id, row = _read(text, where)
        except _NoJson:
            if number == texts[-1][0]:
                break
            raise
        if isinstance(row, Trial):
            if run_id not in runs:
                raise LibraryError(f"{where} is a trial of {run_id}, a run that no line before it describes")
            trials[run_id].append(row)
        elif run_id in runs:
            raise LibraryError(f"{where} describes the run {run_id} again")
        else:
            runs[run_id], trials[run_id] = row, []
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


def _line(kind: str, fields: Mapping[str, Any], *, version: int = 1) -> str:
    return json.dumps({"plait_library": version, "kind": kind, **fields}, separators=(",", ":"), allow_nan=False)


def _read(text: str, where: str) -> tuple[str, LibraryRun | Trial]:
    """Return the id of a run, and the run without its trials or one of these. Raises `LibraryError` that says where."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise _NoJson(f"{where} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise LibraryError(f"{where} is no mapping")
    version, kind = fields.pop("plait_library", 1), fields.pop("kind", None)
    if isinstance(version, int) and version > FORMAT:
        raise LibraryError(f"{where} has format {version}, and this version of plait reads {FORMAT}; update plait")
    if version not in (1, FORMAT) or kind not in ("run", "trial"):
        raise LibraryError(f"{where}: plait_library: {version!r} of kind {kind!r} is not what should be there")
    parts: dict[str, Any] = {"trials": ()}
    if kind == "trial":
        run_id = str(fields.pop("run_id", ""))
        parts = {"outcome": {name: fields.pop(name) for name in ("metrics", "failure", "detail") if name in fields}}
    try:
        row = json.dumps(fields | parts, allow_nan=False)
        if kind == "trial":
            return run_id, _TRIAL.validate_json(row, strict=True, extra="forbid")
        run = _RUN.validate_json(row, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "outcome")
        raise LibraryError(f"{where}: {f'{place}: ' if place else ''}{first['msg']}") from error
    except (TunerError, ValueError) as error:  # an outcome that is none; a number that is none
        raise LibraryError(f"{where}: {error}") from error
    return run.run_id, run


@cache
def starter_runs() -> tuple[LibraryRun, ...]:
    """Return the runs that ship with plait: its image engine and its ranker under eight loads, on a small machine.

    Each was measured by `python -m plait_bench.autoconfig.cells WORKLOAD --out FILE`.
    """
    stored = resources.files("plait_autoconfig").joinpath("starter_library.jsonl.gz").read_bytes()
    return load_lines(gzip.decompress(stored).decode().splitlines())
