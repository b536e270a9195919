"""README's tables, generated from ``loadtest/results``: ``python -m plait_bench.tables [--check] [README.md]``.

A table stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; it shows the newest recorded run of NAME.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "loadtest" / "results"

_BLOCK = re.compile(r"(<!-- bench:(?P<name>[a-z0-9_]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"


def with_tables(text: str, results: Path) -> str:
    """``text`` with every block filled. Raises `BenchError` if it has none: then the markers were lost."""
    filled, count = _BLOCK.subn(lambda match: match[1] + table(_newest(results, match["name"])) + match[3], text)
    if count == 0:
        raise BenchError("there is no <!-- bench:NAME --> block")
    return filled


def table(run: Sequence[Mapping[str, Any]]) -> str:
    """Markdown for one run: a line for each workload, a column for each system, then the ratios, then the machine."""
    rows = [row for row in run if row["unit"] != "ratio" and row["metric"] in ("images_per_s", "seconds_per_image")]
    if not rows:
        return NOT_MEASURED
    systems = list(dict.fromkeys(row["system"] for row in rows))
    values = {(row["workload"], row["metric"], row["system"]): row for row in rows}
    ratios = {(row["workload"], row["metric"], row["system"]): row for row in run if row["unit"] == "ratio"}
    compared = list(dict.fromkeys(system for _, _, system in ratios))
    lines = [
        _line(["workload", "unit", *systems, *(name.replace("/", " / ") for name in compared)]),
        _line(["---", "---", *["---:"] * (len(systems) + len(compared))]),
    ]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        metric = _headline(workload, run)
        cells = [_value(values.get((workload, metric, system))) for system in systems]
        cells += [_ratio(ratios.get((workload, "images_per_s", system))) for system in compared]
        lines.append(_line([f"`{workload}`", {"images_per_s": "images/s"}.get(metric, "s per image"), *cells]))
    return "\n".join([*lines, "", _footer(run), ""])


def _headline(workload: str, run: Iterable[Mapping[str, Any]]) -> str:
    """Throughput where requests come at once (only those have a mean latency), else seconds per image."""
    at_once = any(row["workload"] == workload and row["metric"] == "mean_latency_s" for row in run)
    return "images_per_s" if at_once else "seconds_per_image"


def _value(row: Mapping[str, Any] | None) -> str:
    """Median, and the layout it was taken in."""
    return "" if row is None else f"{row['value']:.3g} ({row['layout']})"


def _ratio(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"**{row['value']:.2f}** ({row['p20']:.2f} to {row['p80']:.2f})"


def _footer(run: Sequence[Mapping[str, Any]]) -> str:
    host = run[0]["host"]
    libraries = ", ".join(f"{name} {host[name]}" for name in ("torch", "diffusers", "peft") if host.get(name))
    rounds = max((int(row["n"]) for row in run if row["metric"] == "images_per_s"), default=0)
    return (
        f"Measured on {host['cpu']}, {host['cores']} cores, {host['ram_gib']:.0f} GiB, fp32; Python {host['python']}, "
        f"{libraries}; commit `{run[0]['commit']}`, {host['date'][:10]}. Medians of {rounds} rounds taken in turn; in "
        f"parentheses the layout (processes x threads) that was best for that system. Ratios are of images per second, "
        f"pair by pair, with their 20th and 80th percentiles."
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
