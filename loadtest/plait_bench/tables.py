"""The tables of README files, from `loadtest/results`: `python -m plait_bench.tables [--check] [FILE...]`.

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`; NAME is one of `TABLES`. Without FILE, README.md
and that of every top-level package folder is filled. Only rows whose commit is in the history of HEAD are shown.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.errors import BenchError
from plait_bench.host import PACKAGE_FOLDERS, is_in_history
from plait_bench.table_spec import TableSpec
from plait_bench.table_specs import TABLES
from plait_bench.tabulated import TableLine, lines_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "loadtest" / "results"

_BLOCK = re.compile(r"(?P<open><!-- table: (?P<name>[a-z0-9-]+) -->\n).*?(?P<close><!-- /table -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"
_WIDTH = 120


def files(root: Path) -> list[Path]:
    """List the existing files that may hold tables."""
    wanted = [root / "README.md", *(root / folder / "README.md" for folder in PACKAGE_FOLDERS)]
    return [path for path in wanted if path.is_file()]


def with_tables(text: str, results: Path, root: Path = ROOT) -> str:
    """Return `text` with every table filled. Raises `BenchError` for an unknown table name, or without git."""
    return _BLOCK.sub(lambda match: match["open"] + _filled(match["name"], results, root) + match["close"], text)


def _filled(name: str, results: Path, root: Path) -> str:
    if name not in TABLES:
        raise BenchError(f"there is no table {name!r}; there are {', '.join(sorted(TABLES))}")
    spec = TABLES[name]
    return render(spec, records.read(results / f"{spec.bench}.jsonl"), root)


def render(spec: TableSpec, recorded: Sequence[Mapping[str, Any]], root: Path) -> str:
    """Render a table of the rows that it shows, and note how many rows may not be shown."""
    mine = [row for row in recorded if spec.shows(row)]
    shown = [row for row in mine if _may_be_shown(str(row["commit"]), root)]
    left_out = len(mine) - len(shown)
    lines = lines_of(spec, shown)
    note = f"{left_out} recorded rows are left out: their commit is not in this history.\n" if left_out else ""
    if not lines:
        return NOT_MEASURED + note
    compared = any(line.ratio for line in lines)
    head = ["workload", "system", *spec.columns, *([spec.ratio_title] if compared else []), spec.counted, *_RUN]
    right = len(head) - 3 - len(_RUN)
    table = [_line(head), _line(["---", "---", *["---:"] * (right + 2), "---", "---"])]
    before = ""
    for line in lines:
        workload = "" if line.workload == before else f"`{line.workload}`"
        before = line.workload
        ratio = [line.ratio] if compared else []
        table.append(_line([workload, line.system, *line.cells, *ratio, *_run(line)]))
    return "\n".join([*table, "", _footer(spec, shown), note.rstrip("\n")]).rstrip("\n") + "\n"


_RUN = ("load", "commit", "date")


def _run(line: TableLine) -> list[str]:
    rounds = f"{line.runs} x {line.rounds}" if line.runs > 1 else str(line.rounds)
    return [rounds, f"{line.load:.2f}" + (" busy" if line.busy else ""), f"`{line.commit[:7]}`", line.date[:10]]


def _may_be_shown(commit: str, root: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{7,40}", commit) is not None and _is_in_history(root, commit)


_is_in_history = cache(is_in_history)


def _footer(spec: TableSpec, shown: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that applies to all lines: the machine, and what the numbers are."""
    hosts = dict.fromkeys(_host(row["host"]) for row in shown)
    where = " and ".join(hosts)
    return textwrap.fill(f"{spec.verb} on {where}. {spec.says}", width=_WIDTH)


def _host(host: Mapping[str, Any]) -> str:
    return f"{host['cpu']}, {host['cores']} cores, {host['ram_gib']:.0f} GiB, Python {host['python']}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Rewrite the files, or with `--check` only report which are stale (exit code 1)."""
    paths = [Path(argument) for argument in arguments if not argument.startswith("-")] or files(ROOT)
    stale = 0
    for path in paths:
        old = path.read_text(encoding="utf-8")
        try:
            new = with_tables(old, RESULTS)
        except BenchError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        if "--check" in arguments:
            print(f"{path}: its tables are stale; python -m plait_bench.tables fills them", file=sys.stderr)
            stale = 1
        else:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
