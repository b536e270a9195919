"""The runs' rows in `loadtest/results/faults.jsonl`, in the form of the benchmarks' (`plait_bench.records`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from faults.crowds import UNITS, CrowdReport
from faults.ends import End, Tally
from faults.fairness import FairnessReport
from faults.neighbours import KINDS, NeighbourReport
from faults.refusals import RefusalReport
from faults.run import FaultReport
from faults.steady import SAMPLED, SteadyReport
from faults.usage import Usage
from plait_bench import records
from plait_bench.benchmark import ResultRow
from plait_bench.errors import RecordError
from plait_bench.host import ROOT, commit, conditions, host_facts, is_busy
from plait_bench.job import RESULTS

__all__ = ["Recorder", "crowd_rows", "fairness_rows", "fault_rows", "neighbour_rows", "refusal_rows", "steady_rows"]

NAME = "faults"
PATH = RESULTS / f"{NAME}.jsonl"

_COUNTED = ("requests", "processes", "1", "MiB")
"""The units of what a busy host does not change."""


class Recorder:
    """Records a run at the commit and under the conditions that were there when it began."""

    def __init__(self, path: Path = PATH) -> None:
        """Take note of them. Raises `RecordError` unless the checkout is clean."""
        records.require_clean(ROOT)
        self._path = path
        self._at = commit(ROOT)
        self._seen = conditions()
        self._host = host_facts()

    def write(self, rows: Sequence[ResultRow]) -> None:
        """Record the rows that count. Raises `RecordError` if the checkout has changed meanwhile."""
        records.require_clean(ROOT)
        if commit(ROOT) != self._at:
            raise RecordError(f"the checkout left commit {self._at} during the run: nothing is recorded")
        busy = is_busy(self._seen)
        marked = [
            replace(row, load=(self._seen.load,), wake_us=self._seen.wake_us, busy=busy and row.unit not in _COUNTED)
            for row in rows
        ]
        records.put(self._path, NAME, self._at, self._host, marked)


def fault_rows(report: FaultReport) -> list[ResultRow]:
    """Return the rows of a fault run: ends by the fault before them, recoveries by kind, and what was held."""
    rows = []
    for name, part in {**report.ends, "all": report.all_ends}.items():
        rows += list(_ends(name, part))
    for name in dict.fromkeys(fault.name for fault in report.faults):
        mine = [fault for fault in report.faults if fault.name == name]
        for metric in ("answered_s", "replaced_s"):
            if values := [value for it in mine if (value := getattr(it, metric)) is not None]:
                rows.append(ResultRow.of(values, system=name, workload="ends", metric=metric, unit="s"))
    for name, usage in (("before", report.held_before), ("after", report.held_after)):
        rows += list(_held(name, usage))
    return rows


def _ends(name: str, part: Tally) -> Iterator[ResultRow]:
    counts = {"requests": part.total, **{end.value: part.ends[end] for end in End}}
    for metric, count in counts.items():
        yield ResultRow.of([float(count)], system=name, workload="ends", metric=metric, unit="requests")


def _held(name: str, usage: Usage) -> Iterator[ResultRow]:
    for metric, value in usage.to_json().items():
        if metric == "memory_by_kind":
            continue
        is_bytes = metric.endswith("_bytes")
        yield ResultRow.of(
            [value / 2**20 if is_bytes else float(value)],
            system=name,
            workload="held",
            metric=metric.replace("_bytes", "_mib"),
            unit="MiB" if is_bytes else "1",
        )


def fairness_rows(report: FairnessReport) -> list[ResultRow]:
    """Return the rows of a fairness run, and the ratio of B's goodput."""
    rows = []
    for name, rounds in (("alone", report.alone), ("beside", report.beside)):
        values = {
            "goodput_per_s": ([it.goodput_per_s for it in rounds], "images/s"),
            "latency_p50_s": ([it.p50_s for it in rounds], "s"),
            "latency_p99_s": ([it.p99_s for it in rounds], "s"),
        }
        for metric, (taken, unit) in values.items():
            rows.append(ResultRow.of(taken, system=name, workload="share", metric=metric, unit=unit))
    for name, taken in (("alone", report.first_alone_s), ("beside", report.first_beside_s)):
        rows.append(ResultRow.of(taken, system=name, workload="first-image", metric="first_image_s", unit="s"))
    return [*rows, report.goodput_ratio]


def neighbour_rows(report: NeighbourReport) -> list[ResultRow]:
    """Return the rows of a tenant beside an attack, and the ratio of its latencies. What an attack leaves in memory is
    in the rows beside it."""
    rows = []
    workload = f"neighbours-{report.attack}"
    sides = (
        ("alone", report.alone, report.before_bytes, 0),
        ("beside", report.beside, report.after_bytes, report.killed),
    )
    for name, rounds, held, killed in sides:
        values = {
            "latency_p50_s": ([it.p50_s for it in rounds], "s"),
            "latency_p95_s": ([it.p95_s for it in rounds], "s"),
            "health_p99_s": ([it.health_p99_s for it in rounds], "s"),
            "requests": ([float(it.ends.total) for it in rounds], "requests"),
            "right": ([float(it.ends.ends[End.RIGHT]) for it in rounds], "requests"),
        }
        values["killed"] = ([float(killed)], "processes")
        for kind in KINDS:
            values[f"{kind}_peak_mib"] = ([it.peak_bytes[kind] / 2**20 for it in rounds], "MiB")
            values[f"{kind}_mib"] = ([held[kind] / 2**20], "MiB")
        for metric, (taken, unit) in values.items():
            rows.append(ResultRow.of(taken, system=name, workload=workload, metric=metric, unit=unit))
    return [*rows, report.p95_ratio]


def crowd_rows(report: CrowdReport) -> list[ResultRow]:
    """Return the rows of a server with few and with many."""
    return [
        ResultRow.of(taken, system=system, workload=f"many-{report.name}", metric=metric, unit=UNITS[metric])
        for system, values in report.values.items()
        for metric, taken in values.items()
    ]


def refusal_rows(reports: Sequence[RefusalReport]) -> list[ResultRow]:
    """Return the rows of the refusals, by number of connections."""
    rows = []
    for it in reports:
        values = {"refused_p50_s": it.p50_s, "refused_p99_s": it.p99_s, "refused_per_s": it.refused / it.seconds}
        for metric, value in values.items():
            unit = "1/s" if metric.endswith("per_s") else "s"
            name = f"refusals-{it.connections}"
            rows.append(ResultRow.of([value], system="plait", workload=name, metric=metric, unit=unit))
    return rows


def steady_rows(report: SteadyReport) -> list[ResultRow]:
    """Return the slopes; the spread of a row is the slope's 95 % interval."""
    rows = []
    for name, slope in report.slopes.items():
        unit = SAMPLED[name] or "1"
        values = {f"{name}_per_hour": (slope.per_hour, slope.low, slope.high), f"{name}_start": (slope.start,) * 3}
        for metric, (value, low, high) in values.items():
            row = ResultRow.of([value], system="plait", workload="steady", metric=metric, unit=unit)
            rows.append(replace(row, p20=low, p80=high))
    return rows
