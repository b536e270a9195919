"""`--save`: a host's part of a run as a file with every record, to be merged. No header values are in it."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
from pydantic import ValidationError

from plait_loadtest.errors import ReportError
from plait_loadtest.report.document import shown
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import FinishedRun, finished
from plait_loadtest.values import RECORD, Echo, HostPart, RunResult

FORMAT = "plait-loadtest-part/1"
_TEXTS = ("limits", "problems", "whys")
_ABOUT = ("started_unix_s", "wall_s", "cpu_s", "interrupted", "reconnects", "abandoned", *_TEXTS)


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
