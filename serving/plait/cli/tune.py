"""`plait tune`: find the most cost-effective configuration by measurement. Data goes to stdout, progress to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage, 99 no configuration keeps the limits, 130 interrupted (run it again to
continue).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.tuning.job import library_commands

if TYPE_CHECKING:
    from plait_autoconfig.jobs.state import JobState

EXIT_FAILED, EXIT_NONE, EXIT_INTERRUPTED = 1, 99, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)

app.add_typer(library_commands.app, name="library")

Job = Annotated[Path, typer.Argument(help="the job's folder, or its file if it ran into the usual folder")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def tune() -> None:
    """Find the most cost-effective configuration by measuring a clone of the service."""


@app.command("run")
def run_command(
    job: Annotated[Path, typer.Argument(help="the job: a YAML file, or picks, images or demo, which ship with plait")],
    out: Annotated[Path | None, typer.Option(help="folder of the job (default out/tune/NAME)")] = None,
    *,
    live: Annotated[
        bool, typer.Option("--live", help="yes, tune the service that users are on (the job must say so too)")
    ] = False,
    measurer: Annotated[
        str | None, typer.Option(help="module:function of yours that makes what measures, in place of plait's own")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a job, or resume one that was stopped or killed; a second run of the same job shares the work."""
    from plait.tuning.job.local_run import run

    state, folder = run(job, folder=out, live=live, measurer=measurer)
    print(_document(state) if as_json else _answer(state))
    print(f"report: {folder / 'report.html'}", file=sys.stderr)
    raise typer.Exit(_exit_code(state))


@app.command("status")
def status_command(job: Job, *, as_json: AsJson = False) -> None:
    """Show the progress of a job: every measurement, the best so far, and what is left."""
    from plait.tuning.job.local_run import headline, row_line

    state = _state(job)
    if as_json:
        print(_document(state))
        return
    goals = tuple(goal.metric for goal in state.spec.goal.goals)
    for row in state.rows:
        print(row_line(row, goals))
    print(f"{state.phase}{': ' + state.reason if state.reason else ''}; {headline(state)}")
    for warning in state.warnings:
        print(f"warning: {warning}")


@app.command("best")
def best_command(
    job: Job,
    *,
    as_json: AsJson = False,
    form: Annotated[
        Literal["file", "serve", "argv", "env"] | None,
        typer.Option("--as", help="print plait.yaml or the job's own file with them, Serve YAML, arguments, variables"),
    ] = None,
) -> None:
    """Print the recommended knobs, or the best so far; exit with code 99 if no configuration keeps the limits."""
    from plait.tuning.job.applying import exported

    if form is not None and as_json:
        raise typer.BadParameter("--as has a form of its own", param_hint="--json")
    state = _state(job)
    config = _best(state)
    if config is None:
        print(_choices(state) or state.binding or "nothing was measured yet", file=sys.stderr)
        raise typer.Exit(EXIT_NONE)
    knobs = state.spec.settings(config)
    answer = state.recommendation
    print(answer.sentence if answer is not None else "the best so far; not confirmed", file=sys.stderr)
    if form is not None:
        print(exported(state.spec.target, knobs, form), end="")
        return
    print(json.dumps(knobs, indent=1) if as_json else "\n".join(f"{name}: {value}" for name, value in knobs.items()))


@app.command("apply")
def apply_command(
    job: Job,
    config: Annotated[Path | None, typer.Argument(help="the plait.yaml to write into (default: the job's own)")] = None,
    *,
    port: Annotated[
        int | None, typer.Option(help="change the server that runs on this port instead", min=1, max=65535)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the difference and stop")] = False,
    unconfirmed: Annotated[bool, typer.Option("--unconfirmed", help="the best so far will do")] = False,
) -> None:
    """Write the recommended knobs into a plait.yaml, keeping its comments, or send them to a running server."""
    from plait.errors import PlaitError
    from plait.tuning.job.applying import apply_to_file, apply_to_server
    from plait_autoconfig.jobs.spec import TuningTarget

    if port is not None and config is not None:
        raise typer.BadParameter("either a plait.yaml or the server on a port, one at a time", param_hint="--port")
    state = _state(job)
    chosen = state.recommendation.config if state.recommendation is not None else None
    if chosen is None and unconfirmed:
        chosen = _best(state)
    if chosen is None:
        why = _choices(state) or state.binding or state.reason or state.phase
        raise PlaitError(f"the job recommends nothing (yet): {why}")
    knobs, target = state.spec.settings(chosen), state.spec.target
    if not isinstance(target, TuningTarget):
        raise PlaitError("the job tunes a service of yours: `plait tune best --as` prints what to give to it")
    if port is not None:
        print(apply_to_server(knobs, port=port, dry_run=dry_run), end="")
        return
    if config is None and target.config is None:
        raise PlaitError("the job tunes plait's default configuration: name the plait.yaml to write into")
    print(apply_to_file(knobs, config or Path(str(target.config)), dry_run=dry_run), end="")


@app.command("report")
def report_command(
    job: Job, out: Annotated[Path | None, typer.Option(help="file (default: report.html in the job's folder)")] = None
) -> None:
    """Write the report of a job, finished or not, as one HTML file that opens offline, and print its path."""
    from plait.tuning.job.local_run import open_state, write_report

    _, store = open_state(job)
    path = out or store.folder / "report.html"
    write_report(store, path)
    print(path)


@app.command("compare")
def compare_command(
    jobs: Annotated[list[Path], typer.Argument(help="two jobs or more: folders or files")], *, as_json: AsJson = False
) -> None:
    """Compare jobs side by side: what each found, how certain it is, and in how many trials."""
    from pydantic_core import to_jsonable_python

    from plait.cli.models import table
    from plait_autoconfig.report.compare import compare, comparison_rows

    if len(jobs) < 2:
        raise typer.BadParameter("name two jobs or more", param_hint="JOBS")
    found = compare([_state(job) for job in jobs])
    if as_json:
        print(json.dumps(to_jsonable_python(found), indent=1))
        return
    differ = [f"they also differ in {', '.join(found.differences)}"] if found.differences else []
    print(table(comparison_rows(found.jobs)), *differ, found.sentence, sep="\n")


def _state(job: Path) -> JobState:
    from plait.tuning.job.local_run import open_state

    return open_state(job)[0]


def _best(state: JobState) -> Any:
    if state.recommendation is not None:
        return state.recommendation.config
    return None if state.best is None else state.best.config


def _choices(state: JobState) -> str:
    """Return that a job with several goals leaves the choice to people; empty for others."""
    found = state.answers or state.front
    return f"of {len(found)} configurations each is best in some goal; plait tune report shows them" if found else ""


def _answer(state: JobState) -> str:
    """Return the outcome of a job in sentences."""
    if state.answers:
        return "\n".join(answer.sentence for answer in state.answers)
    return state.binding or f"{state.phase}: {state.reason}"


def _exit_code(state: JobState) -> int:
    if state.phase in ("searching", "confirming", "waiting", "cancelled"):
        return EXIT_INTERRUPTED
    if state.phase == "failed":
        return EXIT_NONE if state.binding else EXIT_FAILED
    return 0 if state.answers else EXIT_NONE


def _document(state: JobState) -> str:
    from plait_autoconfig.jobs.reporting import state_to_json

    return json.dumps(state_to_json(state), indent=1)
