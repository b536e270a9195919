"""The guides' tables, generated from ``loadtest/results``: ``python -m plait_bench.tables [--check] [FILE ...]``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- /table -->``; it shows every workload as it was recorded
last. NAME is a benchmark, or one of `_NAMED`. Without a FILE: README.md of every top-level folder with a table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.errors import BenchError
from plait_bench.host import SLOW_WAKE_US

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "loadtest" / "results"

_BLOCK = re.compile(r"(?P<open><!-- table: (?P<name>[a-z0-9-]+) -->\n).*?(?P<close><!-- /table -->)", re.DOTALL)
_NAMED: Mapping[str, tuple[str, str]] = {
    "in-process": ("disagg", "in_process_per_s"),
    "one-by-one": ("disagg", "latency_p50_us added_p50_us"),
    "serve-one-by-one": ("disagg", "latency_p50_ms latency_p99_ms"),
    "overload": ("disagg", "in_time_per_s share_of_peak"),
    "refresh": ("disagg", "p99_ms"),
    "refresh-counts": ("disagg", "mixed_version_answers lost_requests rows_refreshed_per_s"),
    "crossing": ("disagg", "crossing_bytes"),
    "autoconfig": (
        "autoconfig",
        "regret_at_1 regret_at_5 regret_at_30 trials_to_5pct_median trials_to_3pct_median infeasible_6_to_15 "
        "extra_trials_to_5pct so_score_3_trials so_score_zero_shot ask_ms_after_100 pretrain_s",
    ),
}
"""Tables of other metrics than a benchmark's usual ones: their benchmark, and the metrics."""
NOT_MEASURED = "Not measured yet.\n"


@dataclass(frozen=True, slots=True)
class _Shown:
    """A metric that tables show: its unit, and the metric whose ratio stands beside it (None: its own)."""

    unit: str
    ratio_of: str | None = None


_SHOWN: Mapping[str, _Shown] = {
    "images_per_s": _Shown("images/s"),
    "seconds_per_image": _Shown("s per image", ratio_of="images_per_s"),
    "requests_per_s": _Shown("requests/s"),
    "cpu_s_per_1000": _Shown("CPU s per 1,000"),
    "goodput_per_s": _Shown("requests/s"),
    "crossing_bytes": _Shown("bytes"),
    "gb_per_s": _Shown("GB/s"),
    "round_trip_us": _Shown("us"),
    "one_way_us": _Shown("us one way"),
    "alpha_us": _Shown("us, alpha"),
}
_ASKED_FOR: Mapping[str, _Shown] = {
    "latency_p50_us": _Shown("us, median"),
    "in_process_per_s": _Shown("requests/s"),
    "added_p50_us": _Shown("us more than whole"),
    "latency_p50_ms": _Shown("ms, median"),
    "latency_p99_ms": _Shown("ms, p99"),
    "in_time_per_s": _Shown("in time/s"),
    "share_of_peak": _Shown("of its peak"),
    "p99_ms": _Shown("ms, p99"),
    "mixed_version_answers": _Shown("wrong answers"),
    "lost_requests": _Shown("lost requests"),
    "rows_refreshed_per_s": _Shown("of all rows/s"),
    "regret_at_1": _Shown("regret at trial 1"),
    "regret_at_5": _Shown("regret at trial 5"),
    "regret_at_30": _Shown("regret at trial 30"),
    "trials_to_5pct_median": _Shown("trials to 5 %, median"),
    "trials_to_3pct_median": _Shown("trials to 3 %, median"),
    "extra_trials_to_5pct": _Shown("more trials than cold"),
    "infeasible_6_to_15": _Shown("infeasible of trials 6 to 15"),
    "ask_ms_after_100": _Shown("ms per proposal after 100 trials"),
    "pretrain_s": _Shown("s to learn from the library"),
    "so_score_3_trials": _Shown("S/O score at trial 3"),
    "so_score_zero_shot": _Shown("S/O score, no trial"),
}
"""The same of metrics that only a block which names them shows."""

_SEARCHES = "autoconfig"
"""The benchmark whose rounds are seeds."""
_ALONE = frozenset({"crossing_bytes", "mixed_version_answers", "lost_requests", "rows_refreshed_per_s"})
"""Metrics that are counted, not measured."""
_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "images": ("torch", "diffusers", "peft"),
    "loadtest": (),
    "disagg": ("torch",),
    "fabric": (),
    "autoconfig": ("torch",),
}


def with_tables(text: str, results: Path) -> str:
    """``text`` with every block filled. Raises `BenchError` if it has none: then the markers were lost."""
    filled, count = _BLOCK.subn(lambda match: match["open"] + _filled(results, match) + match["close"], text)
    if count == 0:
        raise BenchError("there is no <!-- table: NAME --> block")
    return filled


def _filled(results: Path, block: re.Match[str]) -> str:
    bench, metrics = _NAMED.get(block["name"], (block["name"], ""))
    wanted = metrics.split() or [name for name in _SHOWN if name not in _ALONE]
    return table(_newest(records.read(results / f"{bench}.jsonl"), wanted), wanted)


def table(run: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    """Markdown for one run: a line for each workload (and metric, if several are shown), a column for each system, then
    the ratios, then the machine."""
    wanted = frozenset(metrics)
    rows = [row for row in run if row["unit"] != "ratio" and row["metric"] in wanted]
    if not rows:
        return NOT_MEASURED
    systems = list(dict.fromkeys(row["system"] for row in rows))
    values = {(row["workload"], row["metric"], row["system"]): row for row in rows}
    ratios = {(row["workload"], row["metric"], row["system"]): row for row in run if row["unit"] == "ratio"}
    compared = list(dict.fromkeys(system for _, name, system in ratios if name in wanted))
    table_lines = [
        _line(["workload", "unit", *systems, *(name.replace("/", " / ") for name in compared)]),
        _line(["---", "---", *["---:"] * (len(systems) + len(compared))]),
    ]
    for workload, name in _lines(rows, run):
        unit = next(row["unit"] for row in rows if row["metric"] == name)
        shown = _SHOWN.get(name) or _ASKED_FOR.get(name) or _Shown(unit)
        cells = [_value(values.get((workload, name, system))) for system in systems]
        cells += [_ratio(ratios.get((workload, shown.ratio_of or name, system))) for system in compared]
        table_lines.append(_line([f"`{workload}`", shown.unit, *cells]))
    return "\n".join([*table_lines, "", _footer(run, wanted), ""])


def _lines(rows: Sequence[Mapping[str, Any]], run: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The (workload, metric) pairs to show. Pictures that are asked for at once (only those have a mean latency) show
    throughput, those made one by one seconds per image; other benchmarks show all their metrics."""
    pairs = list(dict.fromkeys((row["workload"], row["metric"]) for row in rows))
    at_once = {row["workload"] for row in run if row["metric"] == "mean_latency_s"}
    hidden = {False: "images_per_s", True: "seconds_per_image"}
    return [(workload, metric) for workload, metric in pairs if metric != hidden[workload in at_once]]


def _value(row: Mapping[str, Any] | None) -> str:
    """Median, the layout it was taken in, and whether it is a model's."""
    if row is None:
        return ""
    number = f"{row['value']:,.0f}" if row["value"] >= 1000 else f"{row['value']:.3g}"
    remarks = [row["layout"]] if row["layout"] else []
    remarks += ["modelled"] if row.get("kind") == "modelled" else []
    return f"{number} ({', '.join(remarks)})" if remarks else number


def _ratio(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"**{row['value']:.2f}** ({row['p20']:.2f} to {row['p80']:.2f})"


def _footer(run: Sequence[Mapping[str, Any]], wanted: Set[str]) -> str:
    host = run[0]["host"]
    libraries = ", ".join(f"{name} {host[name]}" for name in _LIBRARIES[run[0]["bench"]] if host.get(name))
    rounds = max((int(row["n"]) for row in run if row["metric"] in wanted), default=0)
    python = f"Python {host['python']}" + (f", {libraries}" if libraries else "")
    shown = [row for row in run if row["metric"] in wanted]
    commits = list(dict.fromkeys(f"`{row['commit']}`" for row in shown))
    made = f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}"
    where = f"{host['cpu']}, {host['cores']} cores, {host['ram_gib']:.0f} GiB; {python}; {made}"
    if wanted <= _ALONE:
        return f"Counted on {where}, {host['date'][:10]}."
    if run[0]["bench"] == _SEARCHES:
        return (
            f"Searched on {where}, {host['date'][:10]}. The mean over the services of a workload, then the median of "
            f"{rounds} seeds (slow designers had fewer)."
        )
    return (
        f"Measured on {where}, {host['date'][:10]}. Medians of {rounds} rounds taken in turn; in parentheses the "
        f"layout that was best for that system. Ratios are taken pair by pair, with their 20th and 80th percentiles."
        + _busy_host(shown)
    )


def _busy_host(shown: Sequence[Mapping[str, Any]]) -> str:
    """A warning, if messages between processes were slow there."""
    wake_us = max((row["host"].get("wake_us", 0.0) for row in shown), default=0.0)
    if wake_us <= SLOW_WAKE_US:
        return ""
    return f" The host was busy: a byte to another process and back took up to {wake_us:.0f} us."


def _newest(recorded: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Of every workload the lines of the last run, by date, that measured one of these metrics; workloads in the order
    in which they were first recorded."""
    dates = {
        workload: max(
            (line["host"]["date"] for line in recorded if line["workload"] == workload and line["metric"] in wanted),
            default=None,
        )
        for workload in dict.fromkeys(str(line["workload"]) for line in recorded)
    }
    return [
        line
        for workload, date in dates.items()
        for line in recorded
        if line["workload"] == workload and line["host"]["date"] == date
    ]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def guides() -> list[Path]:
    """The documents that hold tables: README.md of the checkout and of its folders."""
    found = (ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/README.md")))
    return [path for path in found if _BLOCK.search(path.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str]) -> int:
    """Rewrites the files, or with ``--check`` only says (exit code 1) whether they are up to date."""
    paths = [Path(argument) for argument in arguments if not argument.startswith("-")] or guides()
    return max([_refresh(path, only_check="--check" in arguments) for path in paths], default=1)


def _refresh(path: Path, *, only_check: bool) -> int:
    old = path.read_text(encoding="utf-8")
    try:
        new = with_tables(old, RESULTS)
    except BenchError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if only_check:
        return int(new != old)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
