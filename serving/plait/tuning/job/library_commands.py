"""`plait tune library`: past runs that jobs learn from. A library is one file, which a job names as `library`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.errors import PlaitError, read, told, write
from plait_autoconfig.errors import LibraryError

if TYPE_CHECKING:
    from plait_autoconfig.library import LibraryRun
    from plait_autoconfig.store import LibraryStore

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)

Library = Annotated[Path, typer.Argument(help="the library: the file that a job names as `library`")]


@app.callback()
def library() -> None:
    """Look after the past runs that jobs learn from."""


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="a CSV file with a header, or JSON lines as `export` writes them")],
    into: Annotated[Path, typer.Option(help="the library, made if it does not exist")] = Path("library.log"),
    map_: Annotated[
        Path | None, typer.Option("--map", help="YAML that says which column of a CSV file is what")
    ] = None,
) -> None:
    """Add measurements to a library; the same file twice adds nothing."""
    from plait_autoconfig.importing import read_csv, read_map

    if map_ is None and source.suffix.lower() == ".csv":
        raise typer.BadParameter("a CSV file needs a map: --map map.yaml", param_hint="--map")
    if map_ is None:
        _add_all(source, into=into)
        return
    run = read_csv(source, read_map(map_))
    added = _open(into).add(run)
    typer.echo(f"{run.run_id}: {added} of {len(run.trials)} trials added to {into}")


@app.command("list")
def list_command(
    library: Library, *, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False
) -> None:
    """List the runs: what was measured, how often, and over which knobs."""
    found = [_summary(run) for run in _existing(library).runs()]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for it in found:
        trials = f"{it['trials']} trials of {it['configurations']} configurations, {it['failed']} failed"
        names = f"knobs {', '.join(it['knobs'])}; metrics {', '.join(it['metrics'])}"
        typer.echo(f"{it['run_id']}: {it['service']}, {trials}; {names}")


@app.command("show")
def show_command(library: Library, run_id: Annotated[str, typer.Argument(help="as `list` prints it")]) -> None:
    """Print one run as JSON lines: the run, then its trials."""
    from plait_autoconfig.rows import dump_lines

    typer.echo("\n".join(dump_lines([_run(library, run_id)])))


@app.command("export")
def export_command(library: Library, out: Annotated[Path, typer.Argument(help="a file of JSON lines")]) -> None:
    """Write a library to JSON lines, to keep or to pass on."""
    from plait_autoconfig.store import write_library

    runs = _existing(library).runs()
    write_library(out, runs)
    typer.echo(f"{len(runs)} runs written to {out}")


@app.command("merge")
def merge_command(library: Library, other: Annotated[Path, typer.Argument(help="the library to add")]) -> None:
    """Add all runs of another library; what is there already is not added twice."""
    _add_all(other, into=library)


@app.command("job")
def job_command(
    library: Annotated[Path, typer.Argument(help="a library; or a CSV file, with --map, which becomes one beside it")],
    *,
    scenario: Annotated[str, typer.Option(help="the load: a built-in scenario of `plait loadtest`, or a YAML file")],
    map_: Annotated[Path | None, typer.Option("--map", help="YAML that says which column is what")] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="YAML with the target of a service of yours: command, ready, ..."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run", help="which run, as `list` prints it; the last")] = None,
    out: Annotated[Path, typer.Option(help="the job file to write")] = Path("job.yaml"),
    only_measured: Annotated[
        bool, typer.Option("--only-measured", help="propose only configurations that the library has")
    ] = False,
) -> None:
    """Draft a job on the service of a past run: its knobs with the values that were measured, and its goal."""
    import yaml

    from plait_autoconfig.jobs.job_file import parse_job
    from plait_autoconfig.jobs.past_runs import draft_job
    from plait_loadtest import strict_yaml
    from plait_loadtest.load import builtin_names

    if library.suffix.lower() == ".csv":
        source, library = library, library.with_suffix(".log")
        import_command(source, library, map_)
    run = _run(library, run_id)
    where = os.path.relpath(library, out.parent)
    load = scenario if scenario in builtin_names() else os.path.relpath(scenario, out.parent)
    with told(strict_yaml.NotYaml):
        whose = {"app": _app_of(run)} if target is None else strict_yaml.parse(read(target), str(target))[1]
    settings = draft_job(run, target=whose, scenario=load, library=where, only_measured=only_measured)
    text = yaml.safe_dump(settings, sort_keys=False, width=110)
    parse_job(text, folder=out.absolute().parent, source=str(out))
    if out.exists():
        raise PlaitError(f"{out} is there already; choose another --out")
    write(out, text)
    typer.echo(f"{out}: {len(settings['knobs'])} knobs; run it with `plait tune run {out}`")


def _run(library: Path, run_id: str | None) -> LibraryRun:
    """Return a run by its id, or the last. Raises `LibraryError` naming those that there are."""
    runs = {run.run_id: run for run in _existing(library).runs()}
    if not runs or run_id not in {*runs, None}:
        raise LibraryError(f"{library} has no run {run_id or ''!r}; it has {', '.join(runs) or 'none'}")
    return runs[run_id or list(runs)[-1]]


def _app_of(run: LibraryRun) -> str:
    """Return what a run tuned, by the deployments that its knobs set."""
    first = next(iter(run.sets.values()), "")
    return "images" if first.startswith(("engine.", "controlnet")) else "recommend"


def _add_all(source: Path, *, into: Path) -> None:
    """Add the runs of a library, or of its exported lines, and say how many trials were new."""
    from plait_autoconfig.store import read_library

    runs = read_library(source) if source.suffix == ".jsonl" else _existing(source).runs()
    added = sum(map(_open(into).add, runs))
    typer.echo(f"{len(runs)} runs, {added} trials added to {into}")


def _open(path: Path) -> LibraryStore:
    from plait_autoconfig.store import LibraryStore

    return LibraryStore.open(path)


def _existing(path: Path) -> LibraryStore:
    """Open a library that must exist: a mistyped name shall not make an empty one."""
    if not path.is_file():
        raise LibraryError(f"there is no library {path}; `plait tune library import` makes one")
    return _open(path)


def _summary(run: LibraryRun) -> dict[str, Any]:
    from plait_autoconfig.values import cells_of

    return {
        "run_id": run.run_id,
        "service": run.service,
        "trials": len(run.trials),
        "configurations": len(cells_of(run.trials)),
        "failed": sum(trial.outcome.failure is not None for trial in run.trials),
        "knobs": sorted({name for trial in run.trials for name in trial.config}),
        "metrics": sorted({name for trial in run.trials for name in trial.outcome.metrics}),
    }
