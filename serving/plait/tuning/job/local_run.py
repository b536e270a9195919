"""Runs a job from the command line or the demo: the folder, the worker, what is shown meanwhile (a bar with the best so
far and what is left of the budget), and the report at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from plait.errors import PlaitError, read, told, write
from plait.server.state import state_root
from plait.tuning.measure.live import recover_all
from plait_autoconfig.errors import TunerError
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.loop import JobEvent, run_job
from plait_autoconfig.jobs.measurer import MeasurerSource
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.state import JobState, MeasurementRow, Remaining
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.report.page import report_page
from plait_loadtest.host import tool_version
from plait_loadtest.run.processes import ended_by_signal
from plait_report.page import number
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


@contextmanager
def shown(stream: TextIO, state: Callable[[], JobState]) -> Iterator[Callable[[JobEvent], None]]:
    """Yield a function that displays events for the duration of the block: a bar on a terminal, otherwise one line per
    measurement. `state`: returns the job's current state; cheap."""
    if not stream.isatty():
        yield lambda event: _print_lines(stream, event, state)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[headline]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting", total=None, headline="")

        def show(event: JobEvent) -> None:
            bar.update(task, description=_short(event))
            if event.kind == "trial_progress":
                return
            now = state()
            used, left = now.remaining.used_trials, now.remaining.trials
            bar.update(task, total=left + used, completed=used, headline=headline(now))
            if line := _line(event, now):
                bar.console.print(line, markup=False, highlight=False)

        yield show


def headline(state: JobState) -> str:
    """Return a line such as `best 812 (1.3 times the default), 5 of 12 trials, 3:20 left`."""
    left = state.remaining
    parts = [_best(state), f"{left.used_trials} of {left.trials + left.used_trials} trials"]
    if left.seconds is not None:
        parts.append(f"{int(left.seconds) // 60}:{int(left.seconds) % 60:02d} left")
    return ", ".join(parts)


def time_breakdown(before: Remaining, after: Remaining, wall_s: float) -> str:
    """Describe how the `wall_s` seconds between two moments of a job were spent; only the total if a second worker
    helped."""
    load_s, measured_s = after.load_s - before.load_s, after.used_s - before.used_s
    if not load_s or measured_s > wall_s:
        return f"took {wall_s:.1f} s"
    return (
        f"took {wall_s:.1f} s: load tests {load_s:.1f} s, the rest of the measurements {measured_s - load_s:.1f} s, "
        f"start, end and in between {wall_s - measured_s:.1f} s ({1.0 - load_s / wall_s:.1%} was not load)"
    )


def row_line(row: MeasurementRow, goals: tuple[str, ...]) -> str:
    """Describe one measurement in a line: what it was, its results, why it is not the best."""
    config = " ".join(f"{name}={value}" for name, value in row.config.items())
    metrics = {} if row.outcome is None else row.outcome.metrics
    shown = [f"{name} {number(metrics[name])}" for name in goals if name in metrics]
    kind = str(row.kind).replace("_", " ")
    parts = [f"{row.number:>3} {kind:<9}", f"{row.duration_s:5.1f} s", *shown, config, row.reason]
    return "  ".join(filter(None, parts))


def _best(state: JobState) -> str:
    if state.front:
        return f"{len(state.front)} on the front"
    if state.best is None:
        return "nothing feasible yet"
    goal = state.spec.goal.goals[0].metric
    gain = state.best.gain.get(goal)
    times = "" if gain is None else f" ({gain:.2f} times the default)"
    return f"best {number(state.best.goals[goal].value)}{times}"


def _short(event: JobEvent) -> str:
    return event.text.splitlines()[0][:60] if event.text else event.kind.replace("_", " ")


def _line(event: JobEvent, state: JobState) -> str:
    """Return the line that stays on the screen for an event; empty for none."""
    if event.kind == "trial_finished":
        row = next((each for each in state.rows if each.number == event.number), None)
        return "" if row is None else row_line(row, tuple(goal.metric for goal in state.spec.goal.goals))
    if event.kind == "trial_lost":
        return f"{event.number:>3} lost: {event.text}"
    return event.text if event.kind == "note" else ""


def _print_lines(stream: TextIO, event: JobEvent, state: Callable[[], JobState]) -> None:
    if event.kind == "trial_progress":
        return
    now = state()
    if line := _line(event, now):
        stream.write(f"{line}\n")
        if event.kind == "trial_finished":
            stream.write(f"    {headline(now)}\n")
        stream.flush()
