"""What documents show of the recorded rows: `python -m plait_bench.results [--check]`.

`loadtest/RESULTS.md` has all of them. README.md opens with a few ratios, between `<!-- headlines -->` and
`<!-- /headlines -->`: one in which plait is ahead beside one in which it is not, so that the page promises no more than
the tables show. A guide has at most one table of at most eight lines, between `<!-- results: BENCH WORKLOAD... -->` and
`<!-- /results -->`. Rows whose commit is not in the history of HEAD are not shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from plait_bench import records
from plait_bench.benchmark import RATIO
from plait_bench.errors import BenchError
from plait_bench.host import PACKAGE_FOLDERS, ROOT, history
from plait_bench.job import RESULTS
from plait_bench.records import Record

PAGE = ROOT / "loadtest" / "RESULTS.md"
_MAX_LINES, _MAX_NAMES = 8, 8
_HEAD = """# Results

The newest rows that count, in the metrics by which one decides: medians over rounds. In bold a ratio, taken round by
round, with its 20th and 80th percentile. Below a table stands what all its lines share; an empty first or last cell is
as above. `python -m plait_bench.results` made this page of `loadtest/results`, which has every metric, each value's
rounds, the commit, and the versions of all libraries.
"""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "images": ("images_per_s", "peak_memory_gib", "first_image_s"),
    "disagg": ("goodput_per_s", "in_process_per_s", "latency_p50_us"),
    "fabric": ("gb_per_s", "round_trip_us", "there_and_back_us"),
    "kernels": ("time_us",),
    "loadtest": ("requests_per_s", "cpu_s_per_1000"),
    "autoconfig": ("trials_to_5pct", "extra_trials_to_5pct"),
    "tuning": ("gain", "promised_per_s", "held_at_0.9", "held_at_1.1", "job_s"),
    "placement": ("allocated_mean_pct", "stranded_pct", "without_place"),
    "zoo": ("refused",),
    "models": ("p99_steps", "images_per_s"),
    "faults": (
        "requests", "right", "documented", "wrong", "hung", "answered_s", "goodput_per_s", "latency_p95_s",
        "health_p99_s", "first_image_s", "refused_p99_s", "engine_mib", "ingress_peak_mib",
        "memory_bytes_per_hour", "refusal_ms", "listing_ms", "known_s",
    ),
}  # fmt: skip
"""The metrics by which one decides, in their order; all others are in `loadtest/results` alone."""

HEADLINES = (  # one for each pillar, and beside it what it does not win
    ("images", "sd15-bf16-mixed4:images_per_s:plait/diffusers_fair", "serving",
     "images/s against a fair diffusers server at Stable Diffusion 1.5's size: four requests at once, four LoRA sets"),
    ("images", "sd35m-512-bf16-single:images_per_s:plait/diffusers_fair", "serving",
     "the same at Stable Diffusion 3.5 Medium's, compiled: one image"),
    ("images", "mixed16:images_per_s:plait/diffusers_fair", "serving",
     "the same at the starter's size: sixteen requests at once, mixed LoRAs, ControlNets, steps and schedulers"),
    ("disagg", "rm2-64:goodput_per_s:plait/pytorch", "disagg",
     "rankings/s with p99 within 50 ms against PyTorch behind FastAPI: DeepRecSys' RM2, 64 candidates"),
    ("disagg", "one-by-one-64:latency_p50_us:plait_split/plait", "disagg",
     "median latency of one ranking, cut in two against whole, in process (less is better): on one machine the cut "
     "costs time and brings nothing"),
    ("autoconfig", "falcon:trials_to_5pct:plait/optuna-tpe", "autoconfig",
     "trials until within 5 % of the optimum against Optuna's TPE (less is better): replayed measurements, library of "
     "29 other services"),
    ("autoconfig", "own-images:trials_to_5pct:plait/optuna-tpe", "autoconfig",
     "the same on plait's own image engine, with a library of few, noisy runs"),
)  # fmt: skip
"""Benchmark, ratio, folder of the guide, and what it is of."""

_LESS_IS_BETTER = ("latency_p50_us", "trials_to_5pct")
NOT_AHEAD = "**not ahead**: "
NOT_RECORDED = "Without a number, because none was recorded on an idle host:"

Read = Callable[[str], Sequence[Record]]


def page(read: Read) -> str:
    """Return RESULTS.md."""
    parts = [_HEAD]
    for bench in SECTIONS:
        tables = "\n".join(_tables(bench, read(bench))).rstrip("\n")
        parts.append(f"## {bench}\n\n{tables or 'Not measured yet.'}\n")
    return "\n".join(parts)


def _tables(bench: str, shown: Sequence[Record]) -> Iterator[str]:
    """Yield one table for all workloads of a benchmark that have the same metrics, after the machine it is of."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    shown = [row for row in shown if row["system"] != "model"]  # a formula, which nothing was measured beside
    for workload in dict.fromkeys(row["workload"] for row in shown):
        rows = [row for row in shown if row["workload"] == workload and row["metric"] in SECTIONS[bench]]
        there = {row["metric"] for row in rows}
        if metrics := tuple(metric for metric in SECTIONS[bench] if metric in there):
            groups.setdefault((_machines(rows), metrics), []).append(workload)
    said = ""
    for (machines, metrics), workloads in sorted(groups.items(), key=lambda group: group[0][0]):
        if machines != said:
            yield f"On {machines}:\n"
            said = machines
        yield _table(metrics, workloads, shown) + "\n"


def _table(
    metrics: Sequence[str], workloads: Sequence[str], shown: Sequence[Record], max_lines: int | None = None
) -> str:
    """Return the table of some workloads, of at most so many lines. A ratio stands beside the system that it divides
    by; what all lines have in common stands below the table."""
    rows = [row for row in shown if row["workload"] in workloads and row["metric"] in metrics]
    by_line: dict[tuple[str, str], list[Record]] = {}
    for row in sorted(rows, key=lambda row: workloads.index(row["workload"])):
        by_line.setdefault((row["workload"], row["system"].rpartition("/")[2]), []).append(row)
    lines = dict(list(by_line.items())[:max_lines])
    divided = {row["system"].rpartition("/")[0] for row in rows if row["unit"] == RATIO}
    is_modelled = all(row.get("kind") == "modelled" for row in rows)

    def cell(row: Record) -> str:
        ours = f"{row['system'].rpartition('/')[0]} " if len(divided) > 1 else ""
        text = f"{ours}**{_number(row['value'])}x**" if row["unit"] == RATIO else _number(row["value"])
        low, high = _number(row["p20"]), _number(row["p80"])
        if low != high and (row["unit"] == RATIO or not (divided or is_modelled)):
            text += f" ({low}..{high})"
        return text + (" modelled" if row.get("kind") == "modelled" and not is_modelled else "")

    columns = {"workload": [f"`{workload}`" for workload, _ in lines], "system": [system for _, system in lines]}
    for metric in metrics:
        name = metric.removesuffix("_per_s")
        unit = next((row["unit"] for row in rows if row["metric"] == metric and row["unit"] != RATIO), name)
        columns[name if unit == name else f"{name}, {unit}"] = [
            "; ".join(cell(row) for row in line if row["metric"] == metric) for line in lines.values()
        ]
    columns["recorded"] = [", ".join(dict.fromkeys(row["date"][:10] for row in line)) for line in lines.values()]
    if len(lines) == len(workloads):  # workloads of one line each share it where all else is equal
        alike: dict[tuple[str, ...], list[str]] = {}
        for workload, *cells in zip(*columns.values(), strict=True):
            alike.setdefault(tuple(cells), []).append(workload)
        shared = [
            (
                ", ".join(names) if len(names) <= _MAX_NAMES else f"{names[0]} to {names[-1]}, {len(names)} in all",
                *cells,
            )
            for cells, names in alike.items()
        ]
        columns = dict(zip(columns, map(list, zip(*shared, strict=True)), strict=True))
    heads: dict[tuple[str, ...], str] = {}  # columns with the same cells are one
    for head, cells in columns.items():
        heads[tuple(cells)] = f"{heads[tuple(cells)]} = {head}" if tuple(cells) in heads else head
    common = {head: cells[0] for cells, head in heads.items() if len(set(cells)) == 1 < len(cells)}
    common.pop("workload", None)
    left = {head: list(cells) for cells, head in heads.items() if head not in common}
    for cells in (left[head] for head in ("recorded", "workload") if head in left):
        cells[:] = ["" if cell == above else cell for above, cell in zip(["", *cells], cells, strict=False)]
    rule = ["---" if head in ("workload", "system", "recorded") else "---:" for head in left]
    table = [_line(left), f"|{'|'.join(rule)}|", *map(_line, zip(*left.values(), strict=True))]
    notes = [f"{head} {cell}" for head, cell in common.items()] + ["modelled"] * is_modelled
    if len(divided) == 1:
        notes.append(f"in bold {divided.pop()} over this system")
    below = "; ".join(notes)
    return "\n".join([*table, "", f"{below[0].upper()}{below[1:]}."] if notes else table)


def _machines(rows: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(_machine(row) for row in rows))


def _machine(row: Record) -> str:
    host = row["host"]
    instructions = host.get("instruction_set") or "instruction set not recorded"
    return f"{host['cpu']}, {host['cores']} cores ({instructions}), {host['ram_gib']:.0f} GiB"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def with_headlines(text: str, read: Read) -> str:
    """Return `text` with its block of headlines filled. Raises `BenchError` if there is none."""
    block = re.compile(r"(?<=<!-- headlines -->\n).*?(?=<!-- /headlines -->)", re.DOTALL)
    if block.search(text) is None:
        raise BenchError("there is no <!-- headlines --> block")
    filled = "\n".join(_headlines(read)) + "\n"
    return block.sub(lambda _: filled, text)


def _headlines(read: Read) -> Iterator[str]:
    yield from ("| ratio | of what | recorded |", "| ---: | --- | --- |")
    machines: dict[str, None] = {}
    missing = []
    for bench, key, guide, says in HEADLINES:
        wanted = dict(zip(("workload", "metric", "system"), key.split(":"), strict=True))
        what = f"[`{wanted['workload']}`]({guide}/README.md#benchmarks) `{wanted['system']}`: {says}"
        row = next((row for row in read(bench) if wanted.items() <= row.items()), None)
        if row is None:
            missing.append(what)
            continue
        low, high = float(row["p20"]), float(row["p80"])
        ahead = "" if (high < 1.0 if wanted["metric"] in _LESS_IS_BETTER else low > 1.0) else NOT_AHEAD
        machines[_machine(row)] = None
        where = f"{row['date'][:10]}, `{row['commit'][:7]}`"
        yield f"| **{row['value']:.2f}** ({low:.2f} to {high:.2f}) | {ahead}{what} | {where} |"
    yield ""
    yield f"Measured on {'; '.join(machines) or 'no machine yet'}. All: [loadtest/RESULTS.md](loadtest/RESULTS.md)."
    if missing:
        yield f"{NOT_RECORDED} {'; '.join(missing)}."


def with_tables(text: str, read: Read) -> str:
    """Return a guide with its table filled. Raises `BenchError` for an unknown benchmark."""
    block = re.compile(r"(<!-- results: (\w+) ([\w. -]+?) -->\n).*?(<!-- /results -->)", re.DOTALL)

    def filled(match: re.Match[str]) -> str:
        bench, workloads = match[2], match[3].split()
        if bench not in SECTIONS:
            raise BenchError(f"there is no benchmark {bench!r}; there are {', '.join(SECTIONS)}")
        shown = [row for row in read(bench) if row["workload"] in workloads]
        there = {row["metric"] for row in shown}
        metrics = [metric for metric in SECTIONS[bench] if metric in there]
        made = "Not measured yet.\n"
        if metrics:
            made = f"{_table(metrics, workloads, shown, _MAX_LINES)}\n\nOn {_machines(shown)}.\n"
        return f"{match[1]}{made}{match[4]}"

    return block.sub(filled, text)


_history = cache(lambda: history(ROOT))


def shown(bench: str) -> list[Record]:
    """Return the rows of a benchmark that may be shown."""
    return [row for row in records.read(RESULTS / f"{bench}.jsonl") if row["commit"] in _history()]


def made() -> dict[Path, str]:
    """Return what the documents should be."""
    readme = ROOT / "README.md"
    guides = [path for folder in PACKAGE_FOLDERS if (path := ROOT / folder / "README.md").is_file()]
    return {
        PAGE: page(shown),
        readme: with_headlines(readme.read_text(encoding="utf-8"), shown),
        **{path: with_tables(path.read_text(encoding="utf-8"), shown) for path in guides},
    }


def main(arguments: Sequence[str]) -> int:
    """Rewrite the documents, or with `--check` only report which are stale (exit code 1)."""
    stale = 0
    for path, text in made().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in arguments:
            print(f"{path}: stale; python -m plait_bench.results fills it", file=sys.stderr)
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
