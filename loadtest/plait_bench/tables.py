"""README's tables, generated from ``loadtest/results``: ``python -m plait_bench.tables [--check] [README.md]``.

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; it shows the newest recorded run of NAME.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "loadtest" / "results"

_BLOCK = re.compile(r"(<!-- bench:(?P<name>[a-z0-9_]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
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
}
_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "images": ("torch", "diffusers", "peft"),
    "loadtest": (),
    "disagg": ("torch",),
}


def with_tables(text: str, results: Path) -> str:
    """``text`` with every block filled. Raises `BenchError` if it has none: then the markers were lost."""
    filled, count = _BLOCK.subn(lambda match: match[1] + table(_newest(results, match["name"])) + match[3], text)
    if count == 0:
        raise BenchError("there is no <!-- bench:NAME --> block")
    return filled


def table(run: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for one run: a line for each workload (and metric, if several are shown), a column for each system, then
    the ratios, then the machine."""
    rows = [row for row in run if row["unit"] != "ratio" and row["metric"] in _SHOWN]
    if not rows:
        return NOT_MEASURED
    systems = list(dict.fromkeys(row["system"] for row in rows))
    values = {(row["workload"], row["metric"], row["system"]): row for row in rows}
    ratios = {(row["workload"], row["metric"], row["system"]): row for row in run if row["unit"] == "ratio"}
    compared = list(dict.fromkeys(system for _, metric, system in ratios if metric in _SHOWN))
    table_lines = [
        _line(["workload", "unit", *systems, *(name.replace("/", " / ") for name in compared)]),
        _line(["---", "---", *["---:"] * (len(systems) + len(compared))]),
    ]
    for workload, metric in _lines(rows, run):
        shown = _SHOWN[metric]
        cells = [_value(values.get((workload, metric, system))) for system in systems]
        cells += [_ratio(ratios.get((workload, shown.ratio_of or metric, system))) for system in compared]
        table_lines.append(_line([f"`{workload}`", shown.unit, *cells]))
    return "\n".join([*table_lines, "", _footer(run), ""])


def _lines(rows: Sequence[Mapping[str, Any]], run: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The (workload, metric) pairs to show. Pictures that are asked for at once (only those have a mean latency) show
    throughput, those made one by one seconds per image; other benchmarks show all their metrics."""
    pairs = list(dict.fromkeys((row["workload"], row["metric"]) for row in rows))
    at_once = {row["workload"] for row in run if row["metric"] == "mean_latency_s"}
    hidden = {False: "images_per_s", True: "seconds_per_image"}
    return [(workload, metric) for workload, metric in pairs if metric != hidden[workload in at_once]]


def _value(row: Mapping[str, Any] | None) -> str:
    """Median, and the layout it was taken in."""
    if row is None:
        return ""
    number = f"{row['value']:,.0f}" if row["value"] >= 1000 else f"{row['value']:.3g}"
    return f"{number} ({row['layout']})"


def _ratio(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"**{row['value']:.2f}** ({row['p20']:.2f} to {row['p80']:.2f})"


def _footer(run: Sequence[Mapping[str, Any]]) -> str:
    host = run[0]["host"]
    shown = {row["metric"] for row in run} & _SHOWN.keys()
    libraries = ", ".join(f"{name} {host[name]}" for name in _LIBRARIES[run[0]["bench"]] if host.get(name))
    rounds = max((int(row["n"]) for row in run if row["metric"] in shown), default=0)
    python = f"Python {host['python']}" + (f", {libraries}" if libraries else "")
    return (
        f"Measured on {host['cpu']}, {host['cores']} cores, {host['ram_gib']:.0f} GiB; {python}; commit "
        f"`{run[0]['commit']}`, {host['date'][:10]}. Medians of {rounds} rounds taken in turn; in parentheses the "
        f"layout that was best for that system. Ratios are taken pair by pair, with their 20th and 80th percentiles."
    )


def _newest(results: Path, name: str) -> list[dict[str, Any]]:
    """The lines of the newest run of a benchmark, by date."""
    recorded = records.read(results / f"{name}.jsonl")
    newest = max((record["host"]["date"] for record in recorded), default=None)
    return [record for record in recorded if record["host"]["date"] == newest]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Rewrites the file, or with ``--check`` only says (exit code 1) whether it is up to date."""
    paths = [Path(argument) for argument in arguments if not argument.startswith("-")]
    path = paths[0] if paths else ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    try:
        new = with_tables(old, RESULTS)
    except BenchError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if "--check" in arguments:
        return int(new != old)
    if new != old:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
