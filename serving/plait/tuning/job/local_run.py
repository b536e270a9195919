"""Runs a job from the command line or the demo: the folder, the worker, and the report at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from plait.errors import PlaitError, read, told, write
from plait.server.state import state_root
from plait.tuning.job.progress import shown, time_breakdown
from plait.tuning.measure.live import recover_all
from plait_autoconfig.errors import TunerError
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.loop import run_job
from plait_autoconfig.jobs.measurer import MeasurerSource
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.report.page import report_page
from plait_loadtest.host import tool_version
from plait_loadtest.run.processes import ended_by_signal
from plait_serving.spelling import hint

DEFAULT_OUT = Path("out/tune")
EXAMPLES = Path(__file__).parents[1] / "examples"
"""The jobs that ship with plait."""
FACTORY = "plait.tuning.measure.measurer:PlaitMeasurer"


def run(
    job: Path,
    *,
    folder: Path | None = None,
    live: bool = False,
    measurer: str | None = None,
    stream: TextIO = sys.stderr,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[JobState, Path]:
    """Work on the job in a file, or resume it, until it is done or stopped by the user; then write its report.

    Return the state and the job's folder. `measurer`: `module:function`, in place of plait's own; `arguments`:
    extra arguments for plait's. Raises `PlaitError`.
    """
    with told(TunerError):
        job = job_file(job)
        text = read(job)
        spec = parse_job(text, folder=job.absolute().parent, source=str(job))
        store = JobStore.open_or_create(folder or DEFAULT_OUT / spec.name, spec, text)
        recover_all(state_root(os.environ), say=lambda line: print(line, file=stream, flush=True))
        began_s, before, stopping = time.monotonic(), read_state(store), threading.Event()
        state = before
        with reported(store):
            if before.phase != "finished" or store.facts().failure:  # else there is nothing to start a clone for
                own = {"live": live, "commands": True, **(arguments or {})}
                source = MeasurerSource(factory=measurer or FACTORY, arguments={} if measurer else own)
                # The running measurement is given up, clones are removed, services are rolled back.
                with shown(stream, lambda: read_state(store)) as show, ended_by_signal(stopping.set):
                    state = run_job(store, source, on_event=show, stop=stopping.is_set)
                taken = time_breakdown(before.remaining, state.remaining, time.monotonic() - began_s)
                print(taken, file=stream, flush=True)
        return state, store.folder


def open_state(job: Path) -> tuple[JobState, JobStore]:
    """Open a job by its folder, or by its file if it was run in the default folder. Raises `PlaitError` or
    `TunerError`."""
    store = JobStore.open(_folder_of(job))
    return read_state(store), store


@contextmanager
def reported(store: JobStore) -> Iterator[None]:
    """Write `report.html` into the job's folder once the block has worked on the job, also where that failed after
    something was measured. Raises `PlaitError`, or what the block raises."""
    path = store.folder / "report.html"
    try:
        yield
    except TunerError:
        with suppress(PlaitError, TunerError):  # what failed first is told
            if store.records():
                write_report(store, path)
        raise
    write_report(store, path)


def write_report(store: JobStore, path: Path) -> None:
    """Write the report of the job's current state. Raises `PlaitError` or `TunerError`."""
    write(path, report_of(store))


def report_of(store: JobStore) -> str:
    """Return the report of the job's current state as HTML. Raises `TunerError`."""
    job = store.folder / "job.yaml"
    return report_page(
        read_state(store),
        command=f"plait tune run {job}",
        made_by=f"plait {tool_version()}",
        job_text=job.read_text(encoding="utf-8") if job.is_file() else "",
    )


def job_file(job: Path) -> Path:
    """Return the file of a job; one that ships with plait has a name. Raises `PlaitError` where there is none."""
    names = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
    if job.exists():
        return job
    if str(job) in names:
        return EXAMPLES / f"{job}.yaml"
    raise PlaitError(f"{job}: there is no such file, nor a job of plait ({', '.join(names)}){hint(str(job), names)}")


def _folder_of(job: Path) -> Path:
    if job.is_dir():
        return job
    job = job_file(job)
    spec = parse_job(read(job), folder=job.absolute().parent, source=str(job))
    return DEFAULT_OUT / spec.name
