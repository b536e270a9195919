"""Several hosts' parts of one run: each a file with every record (`--save`; no header values are in it), and all of
them the run that one generator would have made: record by record, so exactly.

Every host draws the same plan and sends every n-th request of it, so the parts have no request in common.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
from pydantic import ValidationError

from plait_loadtest.compare import differences
from plait_loadtest.errors import ReportError
from plait_loadtest.failures import joined
from plait_loadtest.load import path_settings
from plait_loadtest.report.document import shown
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import FinishedRun, finished
from plait_loadtest.thresholds import parse_all
from plait_loadtest.values import RECORD, Echo, HostPart, RunResult

FORMAT = "plait-loadtest-part/1"
_TEXTS = ("limits", "problems", "whys")
_ABOUT = ("started_unix_s", "wall_s", "cpu_s", "interrupted", "reconnects", "abandoned", *_TEXTS)

MAX_GAP_S = 1.0
"""Between the hosts' starts; beyond it the load was not the one that the scenario describes."""

_OWN = ("name", "processes", "thresholds")
"""Settings in which hosts may differ, beside where the target is and whom to trust, headers, where files lie, and how
much each has open at once."""


def write(path: Path, session: FinishedRun) -> None:
    """Write the part. Raises OSError."""
    result = session.result
    about: dict[str, Any] = {
        "format": FORMAT,
        "part": asdict(session.part),
        "scenario": shown(session.scenario),
        "result": {name: getattr(result, name) for name in _ABOUT},
    }
    arrays: dict[str, Any] = {
        "records": result.records,
        "echo": np.stack([result.echo.scheduled_ns, result.echo.latency_ns]),
    }
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def read(path: Path) -> FinishedRun:
    """Return a part that `write` wrote. Raises `ReportError`."""
    try:
        with path.open("rb") as opened:
            if not is_zipfile(opened):  # which numpy takes for a pickle, and advises to load
                raise ValueError("it is no .npz file")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise ReportError(f"{path} is of another version")
                records, echo = file["records"], file["echo"]
        result = about["result"]
        shapes = records.ndim, echo.shape[:1]
        if records.dtype != RECORD or shapes != (1, (2,)) or records["why"].max(initial=0) >= len(result["whys"]):
            raise ReportError(f"{path} is damaged")
        return finished(
            RunResult(
                records=records,
                echo=Echo(scheduled_ns=echo[0], latency_ns=echo[1]),
                **{**result, **{name: tuple(result[name]) for name in _TEXTS}},
            ),
            Scenario.model_validate(about["scenario"]),
            (),
            part=HostPart(**about["part"]),
        )
    except (OSError, ValueError, LookupError, TypeError, ValidationError, EOFError, BadZipFile, zlib.error) as error:
        raise ReportError(f"{path} is no part of a run (plait loadtest run --save): {error}") from error


def merged(parts: Sequence[FinishedRun], *, thresholds: Sequence[str] = ()) -> FinishedRun:
    """Return the whole run, judged anew; `thresholds` come beside those of the first part's scenario. Raises
    `ReportError` unless these are all the parts of one scenario, each once."""
    _check(parts)
    scenario = parts[0].scenario.model_copy(update={"thresholds": (*parts[0].scenario.thresholds, *thresholds)})
    asked = parse_all(scenario.thresholds, kinds=[item.name for item in scenario.mix])
    return finished(_result(parts), scenario, asked)


def _check(parts: Sequence[FinishedRun]) -> None:
    if not parts:
        raise ReportError("there is nothing to merge")
    hosts = parts[0].part.hosts
    for each in parts[1:]:
        if each.part.hosts != hosts:
            raise ReportError(f"part {each.part} is none of {hosts} parts")
        if differing := differences(_load(parts[0].scenario), _load(each.scenario)):
            raise ReportError(f"part {each.part} is of another scenario: {', '.join(differing)}")
    ranks = [each.part.rank for each in parts]
    twice = sorted({rank + 1 for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ReportError(f"part {twice[0]}/{hosts} is there twice (--part tells generators apart)")
    missing = [str(rank + 1) for rank in range(hosts) if rank not in ranks]
    if missing:
        raise ReportError(f"of {hosts} parts {', '.join(missing)} are missing")


def _load(scenario: Scenario) -> dict[str, Any]:
    """Return what all hosts must have in common."""
    settings = scenario.model_dump(mode="json", exclude=set(_OWN))
    for name in ("url", "ca", "verify_tls"):
        del settings["target"][name]
    del settings["limits"]["connections"], settings["limits"]["in_flight"]
    for holder, key in path_settings(settings):
        given = holder[key] if isinstance(holder[key], list) else [holder[key] or ""]
        holder[key] = [Path(each).name for each in given]
    for holder in (settings["target"], *settings["mix"]):
        holder["headers"] = sorted(holder["headers"])
    return settings


def _result(parts: Sequence[FinishedRun]) -> RunResult:
    results = [each.result for each in parts]
    records, whys = joined([(result.records, result.whys) for result in results])
    started = [result.started_unix_s for result in results]
    # Once a host was interrupted the load is not whole any more.
    ends = [result.wall_s for result in results if result.interrupted]
    problems = [
        f"part {each.part}: {problem}" if len(parts) > 1 else problem
        for each in parts
        for problem in each.result.problems
    ]
    if (gap_s := max(started) - min(started)) > MAX_GAP_S:
        problems.append(f"the hosts started {gap_s:.1f} s apart (--start-at agrees on a time)")
    return RunResult(
        records=records,
        echo=Echo(
            scheduled_ns=np.concatenate([result.echo.scheduled_ns for result in results]),
            latency_ns=np.concatenate([result.echo.latency_ns for result in results]),
        ),
        started_unix_s=min(started),
        wall_s=min(ends) if ends else max(result.wall_s for result in results),
        cpu_s=sum(result.cpu_s for result in results),
        interrupted=bool(ends),
        reconnects=sum(result.reconnects for result in results),
        limits=tuple(f"part {each.part}: {limit}" for each in parts for limit in each.result.limits),
        problems=tuple(problems),
        abandoned=next((result.abandoned for result in results if result.abandoned), ""),
        whys=whys,
    )
