"""`plait loadtest run`, `merge` and `compare`. Data on stdout, progress on stderr.

Exit codes: 0 done, 1 failed (also: the run is invalid, a threshold has no verdict, not a single request succeeded, a
report could not be written), 2 wrong usage, 99 an SLO or a threshold was missed or something regressed, 130
interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait_loadtest.errors import LoadtestError, ScenarioError

if TYPE_CHECKING:
    from plait_loadtest.capacity import Capacity
    from plait_loadtest.report.outputs import Outputs
    from plait_loadtest.scenario import Scenario
    from plait_loadtest.session import FinishedRun
    from plait_loadtest.values import HostPart, OnProgress, RunProgress

EXIT_FAILED, EXIT_USAGE, EXIT_THRESHOLD, EXIT_INTERRUPTED = 1, 2, 99, 130

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
    help="An honest load generator: open loop, latency from the scheduled time.",
)  # fmt: skip

Option = typer.Option


@app.command()
def run(
    scenario: Annotated[str | None, typer.Argument(help="a built-in scenario or a YAML file")] = None,
    *,
    url: Annotated[str | None, Option(help="the server: http://host:port")] = None,
    api: Annotated[str | None, Option(help="images, infer or raw")] = None,
    path: Annotated[str | None, Option(help="path of the request, where it is not the API's own")] = None,
    method: Annotated[str | None, Option(help="of raw requests; POST where there is a --body, else GET")] = None,
    body: Annotated[str | None, Option(help="of raw requests")] = None,
    arrivals: Annotated[str | None, Option(help="constant, poisson, gamma, ramp, step, trace or closed")] = None,
    rate: Annotated[float | None, Option(help="requests per second")] = None,
    duration: Annotated[float | None, Option(help="seconds of the measured part")] = None,
    count: Annotated[int | None, Option(help="end after so many measured requests instead")] = None,
    seed: Annotated[int | None, Option(help="of arrivals and requests")] = None,
    processes: Annotated[int | None, Option(help="sending processes")] = None,
    threshold: Annotated[list[str] | None, Option(help='"p99_ms < 250"; may be repeated; exit 99 if missed')] = None,
    slo_ms: Annotated[float | None, Option(help="a response of any class is good within so many ms")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="KEY=VALUE, dotted: mix.*.steps=10; repeatable")] = None,
    trace: Annotated[Path | None, Option(help="replay the arrivals of this CSV file")] = None,
    speed: Annotated[float | None, Option(help="of the trace; 2: twice as fast")] = None,
    timeout: Annotated[float | None, Option(help="seconds until a request is given up")] = None,
    header: Annotated[list[str] | None, Option(help='"Name: value" of every request; may be repeated')] = None,
    ca: Annotated[Path | None, Option(help="trust the authorities in this PEM file")] = None,
    insecure: Annotated[bool, Option("--insecure", help="take any certificate of the server's")] = False,
    http2: Annotated[bool, Option("--http2", hidden=True)] = False,
    json: Annotated[str | None, Option(help="write the report as JSON; - is stdout, instead of the table")] = None,
    raw: Annotated[Path | None, Option(help="write one row a request: .csv, .jsonl or .npz")] = None,
    html: Annotated[Path | None, Option(help="write the report as one page that opens offline")] = None,
    locust: Annotated[Path | None, Option(help="write an equivalent locustfile")] = None,
    part: Annotated[str | None, Option(metavar="K/N", help="send every N-th request only: the K-th of N hosts")] = None,
    start_at: Annotated[
        str | None, Option(help="when all hosts start: 2026-11-24T12:30:00, with +00:00 or in this host's time")
    ] = None,
    save: Annotated[Path | None, Option(help="write the run as .npz, for plait loadtest merge")] = None,
    show_config: Annotated[bool, Option("--show-config", help="print every setting as YAML and end")] = False,
    find_capacity: Annotated[
        bool, Option("--find-capacity", help="search the highest rate that holds the SLO")
    ] = False,
    confirm: Annotated[bool, Option("--confirm", help="then show too that 1.3 times that rate does not hold")] = False,
    within: Annotated[float | None, Option(min=0, help="minutes that the search may take, in place of its own")] = None,
) -> None:
    """Send a load and report the results. Flags override the scenario."""
    asked = locals().copy()
    from plait_loadtest.load import as_yaml, load_scenario
    from plait_loadtest.report.outputs import Outputs

    with _errors_as_messages():
        if http2:
            raise ScenarioError("--http2: plait loadtest speaks HTTP/1.1 only")
        _check_search({name for name, value in asked.items() if value is not None and value is not False})
        chosen = load_scenario(scenario or {}, _overrides(asked, verify_tls=False if insecure else None))
        outputs = Outputs(json=json, raw=raw, html=html, locust=locust, save=save)
        if show_config:
            typer.echo(as_yaml(chosen), nl=False)
            return
        outputs.check()
        if find_capacity:
            code = _search(chosen, outputs, confirm=confirm, within_min=within)
        else:
            code = _run(chosen, outputs, _part(part), _instant(start_at))
    raise typer.Exit(code)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="PART.npz...", help="the parts of all hosts (run --save)")],
    *,
    threshold: Annotated[list[str] | None, Option(help='beside those of the scenario: "p99_ms < 250"')] = None,
    json: Annotated[str | None, Option(help="write the report as JSON; - is stdout, instead of the table")] = None,
    raw: Annotated[Path | None, Option(help="write one row a request: .csv, .jsonl or .npz")] = None,
    html: Annotated[Path | None, Option(help="write the report as one page that opens offline")] = None,
) -> None:
    """Report the run that several hosts made together, as if one had sent every request."""
    from plait_loadtest import parts
    from plait_loadtest.report.outputs import Outputs

    with _errors_as_messages():
        outputs = Outputs(json=json, raw=raw, html=html)
        outputs.check()
        whole = parts.merged([parts.read(path) for path in files], thresholds=threshold or ())
        code = _exit_code(whole, _written(outputs, whole))
    raise typer.Exit(code)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="a report of run --json")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="the report to compare with it")],
    *,
    least_change: Annotated[float, Option(help="smaller changes of latency do not count; 0.05 is 5 %")] = 0.05,
    as_json: Annotated[bool, Option("--json", help="print one JSON document")] = False,
) -> None:
    """Report what got better or worse beyond noise; exit code 99 if anything got worse."""
    from plait_loadtest import compare as comparing

    with _errors_as_messages():
        outcome = comparing.compare(comparing.read(before), comparing.read(after), least_change=least_change)
        typer.echo(comparing.as_document(outcome) if as_json else comparing.as_text(outcome))
    raise typer.Exit(EXIT_THRESHOLD if outcome.regressed else 0)


def _overrides(asked: Mapping[str, Any], *, verify_tls: bool | None) -> dict[str, object]:
    """Return the settings that the flags of `run` stand for."""
    method, body = asked["method"], asked["body"]
    is_raw = not asked["scenario"] and (method, body) != (None, None)
    flags = {
        "target.url": asked["url"], "target.api": asked["api"] or ("raw" if is_raw else None),
        "target.path": asked["path"], "target.timeout_s": asked["timeout"],
        "target.ca": asked["ca"] and str(asked["ca"].absolute()), "mix.*.body": body,
        "mix.*.method": method.upper() if method is not None else None if body is None else "POST",
        "target.verify_tls": verify_tls,
        "arrivals.kind": asked["arrivals"] or (asked["trace"] and "trace"), "arrivals.rate_per_s": asked["rate"],
        "arrivals.file": asked["trace"] and str(asked["trace"].absolute()), "arrivals.speed": asked["speed"],
        "duration_s": asked["duration"], "thresholds": asked["threshold"], "slo.latency_ms": asked["slo_ms"],
        "slos": None if asked["slo_ms"] is None else {},
        **{name: asked[name] for name in ("count", "seed", "processes")},
    }  # fmt: skip
    overrides = {key: value for key, value in flags.items() if value is not None}
    return overrides | dict(map(_setting, asked["settings"] or ())) | dict(map(_header, asked["header"] or ()))


def _part(text: str | None) -> HostPart:
    """Parse `K/N`, counted from 1."""
    from plait_loadtest.values import HostPart

    if text is None:
        return HostPart()
    first, slash, second = text.partition("/")
    if not slash or not (first.isdecimal() and second.isdecimal()) or not 1 <= int(first) <= int(second):
        raise ScenarioError(f"--part {text!r}: write K/N, for example 1/3, 2/3 and 3/3")
    return HostPart(rank=int(first) - 1, hosts=int(second))


def _instant(text: str | None) -> float | None:
    from datetime import datetime

    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ScenarioError(f"--start-at {text!r}: write a date and a time, as 2026-11-24T12:30:00+00:00") from error


def _check_search(given: set[str]) -> None:
    """Refuse flags, by name, that a capacity search, or a run that is none, would ignore."""
    if "find_capacity" not in given:
        if given & {"confirm", "within"}:
            raise ScenarioError("--confirm and --within belong to --find-capacity")
    elif given & {"part", "start_at", "save"}:
        raise ScenarioError("--find-capacity runs on one host: leave out --part, --start-at and --save")
    elif given & {"count", "threshold"}:
        raise ScenarioError(
            "--find-capacity decides by the SLO, with runs as long as that takes: leave out --count and --threshold"
        )


def _run(scenario: Scenario, outputs: Outputs, part: HostPart, start_unix_s: float | None) -> int:
    from plait_loadtest.session import foreseen, run_scenario
    from plait_loadtest.wire.dial import require_listener

    for sentence in foreseen(scenario):
        _say(sentence)
    if start_unix_s is None:  # else there is time to start the server
        require_listener(scenario.target)
    total_s = None if scenario.count is not None else scenario.warm_up_s + scenario.duration_s
    with live_line(total_s) as show:
        session = run_scenario(scenario, part=part, start_unix_s=start_unix_s, on_progress=show)
    return _exit_code(session, _written(outputs, session))


def _search(scenario: Scenario, outputs: Outputs, *, confirm: bool, within_min: float | None) -> int:
    """Run the capacity search; its report is that of the run that confirmed the rate, plus the trials."""
    from plait_loadtest.capacity import find_capacity
    from plait_loadtest.measure import lag_limit
    from plait_loadtest.run.echo import is_slow_alone
    from plait_loadtest.session import measure_at, search_of
    from plait_loadtest.wire.dial import require_listener

    sessions: list[FinishedRun] = []
    within_s = None if within_min is None else 60.0 * within_min
    search = search_of(scenario, beyond=1.3 if confirm else None, within_s=within_s)
    require_listener(scenario.target)
    with live_line(None) as show:
        measure = measure_at(scenario, on_progress=show, keep=sessions.append, say=_say)
        found = find_capacity(measure, search, say=_say, is_busy=lambda: is_slow_alone(lag_limit(scenario)))
    # Each trial is one session, in the same order.
    confirmed = [
        session
        for session, trial in zip(sessions, found.trials, strict=True)
        if trial.rate_per_s == found.rate_per_s and trial.verdict == "held"
    ]
    if not sessions:
        _say(f"plait loadtest: {found.statement}")
        return EXIT_FAILED
    is_written = _written(outputs, (confirmed or sessions)[-1], found)
    if any(trial.observed.interrupted for trial in found.trials):
        return EXIT_INTERRUPTED
    return 0 if found.confirmed and is_written else EXIT_FAILED


@contextmanager
def live_line(total_s: float | None) -> Iterator[OnProgress]:
    """Yield the function that shows progress on stderr while the block runs; silent where that is no terminal.
    `total_s`: of the whole run, if known."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("preparing"), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(
            Text(progress_line(progress, total_s), no_wrap=True, overflow="ellipsis"), refresh=True
        )


def progress_line(progress: RunProgress, total_s: float | None) -> str:
    """Return one line: time, requests, errors, requests in flight, recent latency."""
    from plait_report.page import number

    if progress.elapsed_s < 0:
        return "preparing requests"
    of_s = "" if total_s is None else f" of {total_s:.0f}"
    of_n = "" if progress.planned is None else f" of {progress.planned:,}"
    parts = [f"{progress.elapsed_s:.0f}{of_s} s", f"{progress.done:,}{of_n} done"]
    if progress.errors:
        parts.append(f"{progress.errors:,} failed")
    parts.append(f"{progress.in_flight:,} in flight" + (f", {progress.waiting:,} waiting" if progress.waiting else ""))
    if progress.recent_p50_ms is not None:
        parts.append(f"now p50 {number(progress.recent_p50_ms)} ms, p95 {number(progress.recent_p95_ms)} ms")
    return " · ".join(parts)


def _written(outputs: Outputs, session: FinishedRun, capacity: Capacity | None = None) -> bool:
    """Write the reports, say which could not be, and return whether all were."""
    from plait_loadtest.run.processes import ended_by_signal

    with ended_by_signal(lambda: None):
        failed = outputs.write(session, capacity=capacity)
    for sentence in failed:
        _say(f"plait loadtest: {sentence}")
    return not failed


def _exit_code(session: FinishedRun, is_written: bool) -> int:
    total, held = session.summary.total, [verdict.held for verdict in session.verdicts]
    if session.result.interrupted:
        return EXIT_INTERRUPTED
    if total.requests and not total.succeeded:
        errors = ", ".join(f"{n} {name}" for name, n in total.errors.items())
        _say(f"plait loadtest: not one request succeeded: {errors}")
    if not session.summary.valid:
        _say(f"plait loadtest: invalid run: {'; '.join(reason.text for reason in session.summary.reasons)}")
        return EXIT_FAILED
    if False in held or total.slo_met is False:
        return EXIT_THRESHOLD
    if None in held:
        _say("plait loadtest: a threshold has no verdict")
    return EXIT_FAILED if None in held or not total.succeeded or not is_written else 0


def _setting(text: str) -> tuple[str, object]:
    """Parse `KEY=VALUE`; the value is YAML, so numbers are numbers and lists are lists."""
    from plait_loadtest import strict_yaml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ScenarioError(f"--set {text!r}: write KEY=VALUE")
    try:
        return key, strict_yaml.parse(value, "the value")[1]
    except strict_yaml.NotYaml as error:
        raise ScenarioError(f"--set {text!r}: the value is not YAML") from error


def _header(text: str) -> tuple[str, object]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ScenarioError(f"--header {text!r}: write 'Name: value'")
    return f"target.headers.{name.strip()}", value.strip()


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Print errors meant for users as one sentence on stderr and set the exit code."""
    import signal

    from plait_loadtest.run.processes import on_ending

    try:
        with on_ending(signal.default_int_handler):
            yield
    except (LoadtestError, OSError) as error:
        _say(f"plait loadtest: {error}")
        raise typer.Exit(EXIT_USAGE if isinstance(error, ScenarioError) else EXIT_FAILED) from error
    except KeyboardInterrupt as error:  # before or after the load; during it the run ends by itself
        _say("plait loadtest: interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main() -> None:
    """Run the command without plait's own CLI: `python -m plait_loadtest`."""
    app(prog_name="plait loadtest")
