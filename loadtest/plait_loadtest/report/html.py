"""`--html`: the whole report as one page that opens offline; inline styles and SVG, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from plait_loadtest.judging import Judged, judge_records
from plait_loadtest.measure import ClassSummary, Percentiles, RunSummary
from plait_loadtest.report import figures
from plait_loadtest.values import NO_ERROR, RequestOutcome
from plait_report.charts import figure
from plait_report.page import cell, details, footer, header, html_page, number, row_head, section, table, tiles

if TYPE_CHECKING:
    from plait_loadtest.session import FinishedRun

_PARTS = 60  # of the time axis in the charts of rates and errors


def page(session: FinishedRun, report: Mapping[str, Any]) -> str:
    """Return the page. `report`: the JSON document of the same session, for what is not in the numbers."""
    summary, run = session.summary, judge_records(session.result, session.scenario)
    name = report["scenario"]["name"]
    body = [
        _head(summary, report),
        _tiles(summary),
        *_latency(summary, run),
        _rates(run),
        _errors(run, summary),
        _classes(summary),
        _thresholds(report["thresholds"]),
        _capacity(report.get("capacity")),
        _generator(summary, session.result.reconnects),
        _scenario(report),
    ]
    return html_page(f"{name}: {_verdict(summary)[1]}", body)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(summary: RunSummary) -> tuple[str, str]:
    """Return the CSS class and the text."""
    if not summary.valid:
        return "invalid", "Run invalid"
    if summary.total.slo_met is None and any(each.slo for each in summary.classes):
        return "", "Too few requests to judge"
    words = {True: ("met", "SLO met"), False: ("missed", "SLO missed"), None: ("", "Valid run")}
    return words[summary.total.slo_met]


def _head(summary: RunSummary, report: Mapping[str, Any]) -> str:
    scenario = report["scenario"]
    over = [
        f"load test “{scenario['name']}”",
        scenario["target"]["url"],
        report["started"].replace("T", " ").replace("+00:00", " UTC"),
    ]
    return header(over, _verdict(summary), [_lead(summary)], [reason.text for reason in summary.reasons])


def _lead(summary: RunSummary) -> str:
    total = summary.total
    if not summary.valid:
        return "The numbers below do not speak about the server alone. Fix this first and run again:"
    if all(each.slo is None for each in summary.classes):
        return f"{total.succeeded:,} of {total.judged:,} requests succeeded. No SLO was given, so nothing is judged."
    lines = []
    for each in summary.classes if total.slo is None else (total,):
        if each.slo is None or each.attainment is None:
            continue
        name = "" if each is total else f"{each.name}: "
        verdict = "; too few to judge" if each.slo_met is None else ""
        lines.append(
            f"{name}{each.attainment:.2%} of {each.judged:,} requests succeeded within "
            f"{number(each.slo.latency_ms)} ms of their scheduled time, {each.slo_percentile:g} % wanted{verdict}."
        )
    return " ".join(lines)


def _tiles(summary: RunSummary) -> str:
    total = summary.total
    shown = [
        ("offered", number(total.offered_per_s), "/s", ""),
        ("achieved", number(total.achieved_per_s), "/s", ""),
        ("good", number(total.goodput_per_s), "/s", ""),
        ("p50", *_short(total.latency_ms.p50), ""),
        ("p95", *_short(total.latency_ms.p95), ""),
        ("p99", *_short(total.latency_ms.p99), ""),
        ("errors", f"{total.error_rate:.2%}" if total.error_rate else "none", "", ""),
    ]
    if summary.images_per_s is not None:
        shown.insert(3, ("images", number(summary.images_per_s), "/s", ""))
    return tiles(shown, bad=["errors"] if total.error_rate else ())


def _short(milliseconds: float) -> tuple[str, str]:
    """Return a number and unit that fit a tile."""
    return (number(milliseconds / 1e3), "s") if milliseconds >= 10_000.0 else (number(milliseconds), "ms")


# ---- charts ----------------------------------------------------------------------------------------------------------


def _latency(summary: RunSummary, run: Judged) -> list[str]:
    records = run.records[run.ok]
    if not records.size:
        return [section("Latency", "No request succeeded.")]
    at_s = (records["scheduled_ns"] - run.window.start_ns) / 1e9
    latency_ms = run.waited_ns[run.ok] / 1e6
    slos = sorted({each.slo.latency_ms for each in summary.classes if each.slo is not None})
    slo_ms = slos[0] if len(slos) == 1 else None
    values = summary.total.latency_ms
    marks = {"p50": values.p50, "p90": values.p90, "p95": values.p95, "p99": values.p99, "max": values.max}
    return [
        section(
            "Latency over time",
            "Each dot is a request that succeeded, from its scheduled time to its last byte; the band runs from the "
            "median to p95.",
            figure(figures.latency_over_time(at_s, latency_ms, seconds=run.window.seconds, slo_ms=slo_ms)),
        ),
        section(
            "How latency is spread",
            "Logarithmic, so that the tail shows.",
            figure(figures.latency_histogram(latency_ms, marks=marks, slo_ms=slo_ms)),
        ),
    ]


def _rates(run: Judged) -> str:
    records = run.records
    came = records["done_ns"][(records["outcome"] == RequestOutcome.OK)]
    offered = _per_part(run, records["scheduled_ns"][run.measured])
    achieved = _per_part(run, came)
    part_s = run.window.seconds / offered.size
    return section(
        "Offered and achieved",
        "What the schedule asked for, and the successes that came back.",
        figure(figures.rates_over_time(offered / part_s, achieved / part_s, seconds=run.window.seconds)),
    )


def _errors(run: Judged, summary: RunSummary) -> str:
    records = run.records[run.measured]
    names = [kind for kind in RequestOutcome if kind not in NO_ERROR and (records["outcome"] == kind).any()]
    if not names:
        return section("Errors", "None: every request that was judged succeeded.")
    counts = {kind: _per_part(run, records["scheduled_ns"][records["outcome"] == kind]) for kind in names}
    by_size = sorted(counts, key=lambda kind: -counts[kind].sum())
    named = {kind.name.lower().replace("_", " "): counts[kind] for kind in by_size}
    chart = figure(figures.errors_over_time(named, seconds=run.window.seconds))
    rows = [
        [row_head(name.replace("_", " ")), cell(f"{one.count:,}"), cell(one.why, "text")]
        for name, each in summary.total.failures.items()
        for one in each
    ]
    why = table(("", "requests", "why"), rows) if rows else ""
    return section("Errors over time", "By the time the request was scheduled for.", chart, why)


def _per_part(run: Judged, instants_ns: Any) -> Any:
    parts = max(4, min(_PARTS, int(run.measured.sum()) // 8))
    edges = np.linspace(run.window.start_ns, run.window.end_ns, parts + 1)
    return np.histogram(instants_ns, bins=edges)[0].astype(np.float64)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _classes(summary: RunSummary) -> str:
    columns = (
        "",
        "requests",
        "good /s",
        "errors",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "p99.9 ms",
        "max ms",
        "in time",
        "SLO",
    )
    several = len(summary.classes) > 1
    rows = [_class_row(each) for each in (*(summary.classes if several else ()), summary.total)]
    return section("By class of request", "", table(columns, rows))


def _class_row(each: ClassSummary) -> list[str]:
    latency = each.latency_ms
    values = (latency.p50, latency.p95, latency.p99, latency.p99_9, latency.max)
    kind, words = {True: ("good", "met"), False: ("bad", "missed"), None: ("", "-" if each.slo is None else "too few")}[
        each.slo_met
    ]
    in_time = "-" if each.attainment is None else f"{each.attainment:.1%}"
    cells = [f"{each.requests:,}", number(each.goodput_per_s), f"{each.error_rate:.2%}", *map(number, values), in_time]
    return [row_head(each.name), *map(cell, cells), cell(words, kind)]


def _thresholds(verdicts: Sequence[Mapping[str, Any]]) -> str:
    if not verdicts:
        return ""
    rows = [
        [
            row_head(each["threshold"]),
            cell("nothing" if each["value"] is None else number(each["value"])),
            cell(*{True: ("held", "good"), False: ("missed", "bad"), None: ("no verdict", "")}[each["held"]]),
            cell(each["why"], "text"),
        ]
        for each in verdicts
    ]
    return section("Thresholds", "", table(("", "measured", "verdict", "why"), rows))


def _capacity(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [
        [
            row_head(trial["purpose"]),
            cell(number(trial["rate_per_s"])),
            cell(number(trial["duration_s"])),
            cell(trial["verdict"], "good" if trial["verdict"] == "held" else "bad"),
            cell(trial["why"], "text"),
        ]
        for trial in found["trials"]
    ]
    columns = ("trial", "rate /s", "seconds", "verdict", "why")
    return section("Capacity", found["statement"], table(columns, rows))


def _generator(summary: RunSummary, reconnects: int) -> str:
    limit = f"limit {number(summary.lag_limit_ms)} ms at p99"
    rows = [
        _spread("send lag", summary.send_lag_ms, f"how late requests left; {limit}"),
        _spread(
            "control request", summary.echo_ms, f"to an echo of the generator's own: what this machine adds; {limit}"
        ),
        _spread("server's own clock", summary.total.server_ms, "what the server says a request took"),
        _spread("first byte", summary.total.first_byte_ms, "from the scheduled time"),
        _spread("first part", summary.total.first_part_ms, "first event of a streamed response"),
        _spread("from sending", summary.total.service_ms, "hides queueing: for comparison only"),
        _spread("with failures", summary.total.latency_all_ms, "latency of all that was answered or given up"),
    ]
    columns = ("", "p50 ms", "p99 ms", "max ms", "")
    note = "Whether the generator kept its schedule, and where the time went."
    if reconnects:
        note += f" {reconnects:,} requests left on a new connection, as the server had closed the kept one."
    return section("Behind the numbers", note, table(columns, [row for row in rows if row]))


def _spread(name: str, values: Percentiles, what: str) -> list[str]:
    if not values.n:
        return []
    cells = map(cell, map(number, (values.p50, values.p99, values.max)))
    return [row_head(name), *cells, cell(what, "text")]


def _scenario(report: Mapping[str, Any]) -> str:
    host, tool = report["host"], report["tool"]
    text = yaml.safe_dump(report["scenario"], sort_keys=False, allow_unicode=True, width=110)
    made = f"{tool['name']} {tool['version']}" + (f" ({tool['commit']})" if tool["commit"] else "")
    run = (
        f"{made} · seed {report['seed']} · {host['cpu']}, {host['cores']} cores, load {host['loadavg_1m']} after it · "
        f"Python {host['python']} · {report['measured_s']:g} s measured"
    )
    return section("Scenario", "", details("Every setting", text)) + footer(run)
