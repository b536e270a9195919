"""From recorded rows to the lines of a table: each row's latest records, and their spread over runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait_bench.host import BUSY_LOAD, SLOW_WAKE_US
from plait_bench.summary import percentile
from plait_bench.table_spec import TableSpec

__all__ = ["TableLine", "is_busy_row", "latest_runs", "lines_of", "load_of", "spread_of"]

Record = Mapping[str, Any]
_Key = tuple[str, str, str]
"""Workload, system, metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One line: a system's values, the ratio to it, and the run (or `runs`) that they come from."""

    workload: str
    system: str
    cells: tuple[str, ...]
    ratio: str
    rounds: int
    runs: int
    load: float
    busy: bool
    commit: str
    date: str


def lines_of(table: TableSpec, shown: Sequence[Record]) -> list[TableLine]:
    """Make the lines, workload by workload, in the order in which rows were first recorded."""
    groups = _groups(shown)
    found = []
    for workload, system in dict.fromkeys((key[0], key[1]) for key in groups if "/" not in key[1]):
        there = [metric for metric in table.metrics if (workload, system, metric) in groups]
        mine = {metric: groups[workload, system, metric] for metric in there}
        for metrics in [[metric] for metric in mine] if table.long else [list(table.metrics)]:
            cells = tuple(_cell(mine.get(metric, []), table, metric) for metric in metrics)
            ratio = _ratio(groups, workload, system, metrics[0] if table.ratio == "*" else table.ratio)
            runs = next(mine[metric] for metric in metrics if metric in mine)
            found.append(_line(workload, system, cells, ratio, runs))
    order = list(dict.fromkeys(line.workload for line in found))
    return sorted(found, key=lambda line: order.index(line.workload))


def _groups(shown: Sequence[Record]) -> dict[_Key, list[Record]]:
    """By row: its `latest_runs`."""
    by_key: dict[_Key, list[Record]] = {}
    for row in shown:
        by_key.setdefault((row["workload"], row["system"], row["metric"]), []).append(row)
    return {key: latest_runs(rows) for key, rows in by_key.items()}


def latest_runs(rows: Sequence[Record]) -> list[Record]:
    """Of the records of one row: those of the commit at which it was recorded last, oldest first."""
    newest = max(rows, key=date_of)
    return sorted((row for row in rows if row["commit"] == newest["commit"]), key=date_of)


def date_of(row: Record) -> str:
    """Say when a row was recorded; rows of the first format have it in their host."""
    return str(row.get("date") or row["host"].get("date", ""))


def _line(workload: str, system: str, cells: tuple[str, ...], ratio: str, runs: Sequence[Record]) -> TableLine:
    return TableLine(
        workload=workload,
        system=system,
        cells=cells,
        ratio=ratio,
        rounds=max(int(row["n"]) for row in runs),
        runs=len(runs),
        load=max(load_of(row) for row in runs),
        busy=any(is_busy_row(row) for row in runs),
        commit=str(runs[-1]["commit"]),
        date=date_of(runs[-1]),
    )


def load_of(row: Record) -> float:
    """Return the load average before the run began."""
    return float(row["host"].get("loadavg_1m", 0.0))


def is_busy_row(row: Record) -> bool:
    """Whether the host was busy; rows of the first format did not say so."""
    return bool(row.get("busy")) or load_of(row) > BUSY_LOAD or row["host"].get("wake_us", 0.0) > SLOW_WAKE_US


def _ratio(groups: Mapping[_Key, Sequence[Record]], workload: str, system: str, metric: str) -> str:
    """Format the ratio of the pair whose second system this is."""
    for (where, pair, what), runs in groups.items():
        if where == workload and what == metric and pair.endswith(f"/{system}") and runs[-1]["unit"] == "ratio":
            value, low, high = spread_of(runs)
            return f"**{value:.2f}** ({low:.2f} to {high:.2f})"
    return ""


def _cell(runs: Sequence[Record], table: TableSpec, metric: str) -> str:
    """Format value, spread and, where lines have different ones, the unit."""
    if not runs:
        return ""
    value, low, high = spread_of(runs)
    text = _number(value, table.digits)
    if low != high:
        text += f" ({_number(low, table.digits)} to {_number(high, table.digits)})"
    if table.long:
        text += f" {table.metrics[metric]}"
    return text + (" modelled" if runs[-1].get("kind") == "modelled" else "")


def spread_of(runs: Sequence[Record]) -> tuple[float, float, float]:
    """Return value, low and high: of one run median, p20 and p80; of several the median, lowest and highest median."""
    if len(runs) == 1:
        return float(runs[0]["value"]), float(runs[0]["p20"]), float(runs[0]["p80"])
    values = [float(row["value"]) for row in runs]
    return percentile(values, 0.5), min(values), max(values)


def _number(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
