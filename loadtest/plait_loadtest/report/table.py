"""The table on stdout: the verdict, one row a class, then what else a person should know."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from plait_loadtest.measure import ClassSummary, Percentiles, Summary
from plait_loadtest.thresholds import Verdict

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("p50", "p90", "p95", "p99", "p99.9", "max")


def print_table(summary: Summary, verdicts: Iterable[Verdict], console: Console) -> None:
    """Writes the report for people to ``console``."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(headline(summary), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in (
        "",
        "requests",
        "offered/s",
        "done/s",
        "good/s",
        "errors",
        *(f"{name} ms" for name in _COLUMNS),
        "SLO",
    ):
        table.add_column(column, justify="left" if column in ("", "SLO") else "right", no_wrap=True)
    several = len(summary.classes) > 1
    for each in (*(summary.classes if several else ()), summary.total):
        table.add_row(*_row(each))
    console.print(table)
    for line in notes(summary, verdicts):
        console.print(Text(line))


def headline(summary: Summary) -> str:
    """The verdict in one line."""
    if not summary.valid:
        return "INVALID RUN: " + "; ".join(reason.text for reason in summary.reasons)
    return {True: "SLO met", False: "SLO MISSED", None: "valid run, no SLO to judge"}[summary.total.slo_met]


def notes(summary: Summary, verdicts: Iterable[Verdict]) -> list[str]:
    """Lines below the table: errors by class, lag, control request, thresholds."""
    lines = []
    if summary.total.errors:
        lines.append("not answered as hoped: " + ", ".join(f"{n} {name}" for name, n in summary.total.errors.items()))
    if summary.images_per_s is not None:
        lines.append(f"images/s {number(summary.images_per_s)}")
    lines.append(f"send lag ms {_spread(summary.send_lag_ms)} (limit {number(summary.lag_limit_ms)})")
    if summary.echo_ms.n:
        lines.append(f"control request ms {_spread(summary.echo_ms)}")
    if summary.total.server_ms.n:
        lines.append(f"by the server's own clock ms {_spread(summary.total.server_ms)}")
    for verdict in verdicts:
        value = "nothing" if verdict.value is None else number(verdict.value)
        why = f": {verdict.why}" if verdict.why else ""
        lines.append(f"threshold {verdict.threshold.text}: {'held' if verdict.held else 'MISSED'} ({value}{why})")
    return lines


def number(value: float | None) -> str:
    """Three significant digits without an exponent; a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits else f"{round(value):,}"


def _row(each: ClassSummary) -> tuple[str, ...]:
    failed = f"{each.error_rate:.2%}" if each.error_rate else "0"
    latency = each.latency_ms
    values = (latency.p50, latency.p90, latency.p95, latency.p99, latency.p99_9, latency.max)
    rates = (each.offered_per_s, each.achieved_per_s, each.goodput_per_s)
    return (each.name, f"{each.requests:,}", *map(number, rates), failed, *map(number, values), _slo(each))


def _slo(each: ClassSummary) -> str:
    if each.slo is None or each.attainment is None:
        return "-" if each.slo_met is None else "met" if each.slo_met else "missed"
    verdict = {True: "met", False: "missed", None: "too few"}[each.slo_met]
    return f"{verdict}: {each.attainment:.1%} in {number(each.slo.latency_ms)} ms, {each.slo_percentile:g} % wanted"


def _spread(values: Percentiles) -> str:
    return f"p50 {number(values.p50)}, p99 {number(values.p99)}, max {number(values.max)}"
