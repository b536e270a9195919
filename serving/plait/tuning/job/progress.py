"""The progress display of a running job: a bar with the best so far and what is left of the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from plait_autoconfig.jobs.loop import JobEvent
from plait_autoconfig.jobs.state import JobState, MeasurementRow, Remaining
from plait_report.page import number

Show = Callable[[JobEvent], None]


@contextmanager
def shown(stream: TextIO, state: Callable[[], JobState]) -> Iterator[Show]:
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
