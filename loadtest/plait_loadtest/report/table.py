"""The table on stdout: the verdict, one row per class, then further notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait_loadtest.measure import ClassSummary, Percentiles, RunSummary
from plait_report.page import number

if TYPE_CHECKING:
    from rich.console import Console

    from plait_loadtest.capacity import Capacity
    from plait_loadtest.session import FinishedRun


def print_table(session: FinishedRun, console: Console) -> None:
    """Print the report for people to `console`."""
    from rich.table import Table
    from rich.text import Text

    summary = session.summary
    console.print(Text(headline(summary), style="bold"))
    columns = (*(summary.classes if len(summary.classes) > 1 else ()), summary.total)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for each in columns:
        table.add_column(each.name, justify="right", overflow="fold")
    for name, *cells in zip(_ROWS, *map(_cells, columns), strict=True):
        table.add_row(name, *cells)
    console.print(table)
    for line in notes(session):
        console.print(Text(line))


def headline(summary: RunSummary) -> str:
    """Return the verdict in one line."""
    if not summary.valid:
        return "INVALID RUN: " + "; ".join(reason.text for reason in summary.reasons)
    has_slo = any(each.slo is not None for each in summary.classes)
    unjudged = "too few requests to judge the SLO" if has_slo else "valid run, no SLO to judge"
    return {True: "SLO met", False: "SLO MISSED", None: unjudged}[summary.total.slo_met]


def notes(session: FinishedRun) -> list[str]:
    """Return the lines below the table: errors by class and why, lag, control request, thresholds."""
    lines, summary = [], session.summary
    total, reconnects = summary.total, session.result.reconnects
    if total.errors:
        lines.append("not answered as hoped: " + ", ".join(f"{n} {name}" for name, n in total.errors.items()))
        lines += [f"  {name}: {one.count} x {one.why}" for name, each in total.failures.items() for one in each]
    if reconnects:
        lines.append(f"sent on a new connection, as the server had closed the kept one: {reconnects}")
    if total.latency_all_ms.n > total.latency_ms.n:
        lines.append(f"latency ms with that of failures {_spread(total.latency_all_ms)}")
    if summary.images_per_s is not None:
        lines.append(f"images/s {number(summary.images_per_s)}")
    lines.append(f"send lag ms {_spread(summary.send_lag_ms)} (limit {number(summary.lag_limit_ms)})")
    if summary.echo_ms.n:
        lines.append(f"control request ms {_spread(summary.echo_ms)}")
    if summary.total.server_ms.n:
        lines.append(f"by the server's own clock ms {_spread(summary.total.server_ms)}")
    for verdict in session.verdicts:
        value = "nothing" if verdict.value is None else number(verdict.value)
        why = f": {verdict.why}" if verdict.why else ""
        said = {True: "held", False: "MISSED", None: "no verdict"}[verdict.held]
        lines.append(f"threshold {verdict.threshold.text}: {said} ({value}{why})")
    return lines


_ROWS = (
    "requests", "offered/s", "done/s", "good/s", "errors",
    "p50 ms", "p90 ms", "p95 ms", "p99 ms", "p99.9 ms", "max ms", "SLO", "in time", "verdict",
)  # fmt: skip


def _cells(each: ClassSummary) -> tuple[str, ...]:
    """Return one class, in the order of `_ROWS`."""
    latency = each.latency_ms
    rates = (each.offered_per_s, each.achieved_per_s, each.goodput_per_s)
    values = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p99_9, latency.max)
    errors = f"{each.error_rate:.2%}" if each.error_rate else "0"
    wanted = "-" if each.slo is None else f"{each.slo_percentile:g} % in {number(each.slo.latency_ms)} ms"
    in_time = "-" if each.attainment is None else f"{each.attainment:.1%}"
    unjudged = "-" if each.slo is None else "too few"
    verdict = {True: "met", False: "missed", None: unjudged}[each.slo_met]
    return (f"{each.requests:,}", *map(number, rates), errors, *map(number, values), wanted, in_time, verdict)


def _spread(values: Percentiles) -> str:
    return f"p50 {number(values.p50)}, p99 {number(values.p99)}, max {number(values.max)}"


def print_capacity(capacity: Capacity, console: Console) -> None:
    """Print the statement, then every trial with the reason that it was rejected."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(capacity.statement, style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("trial", "rate/s", "seconds", "good/s", "verdict", "why"):
        table.add_column(column, justify="right" if "/s" in column or column == "seconds" else "left")
    for trial in capacity.trials:
        good = number(trial.observed.goodput_per_s)
        table.add_row(
            trial.purpose, number(trial.rate_per_s), number(trial.duration_s), good, trial.verdict, Text(trial.why)
        )
    console.print(table)
