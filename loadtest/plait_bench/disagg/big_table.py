"""A table of 20 GB: how soon a server over it answers, and whether two servers share its pages.

The file is sparse, so it takes no room on disk; the server maps it as any other. A page that was read lies in the page
cache once: Pss counts it half for each of two processes that map it.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.bodies import body
from plait_bench.disagg.packages import SEED
from plait_bench.disagg.serving import serving
from plait_disagg.graph.capture import capture
from plait_disagg.models.configs import build, ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import PackageOptions, write_package
from plait_disagg.package.manifest import TABLES
from plait_disagg.tables.storage import ZeroRows, write_tables

__all__ = ["rows"]

_MODEL, _WORKLOAD = "rm1", "table-20gb"
_BYTES = 20e9
_CANDIDATES, _REQUESTS = 64, 20


def rows(*, say: Callable[[str], None]) -> list[ResultRow]:
    """Seconds from the start of the process to the first answer, and the resident memory of the mapped file."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch, ExitStack() as stack:
        package, table_rows = _package(Path(scratch) / "package")
        bodies = _bodies(table_rows)
        say(f"{_MODEL} with {_BYTES / 1e9:.0f} GB of tables")
        made, pids = [], []
        for _ in range(2):
            started_s = time.monotonic()
            server = stack.enter_context(serving(("plait_bench.disagg.ours", str(package), "1", "whole"), bodies[0]))
            made.append(_row("plait", "first_answer_s", "s", time.monotonic() - started_s))
            for content in bodies:
                server.ask(content)
            pids.append(server.pid)
        for pid in pids:
            rss, pss = resident_bytes(pid, TABLES)
            made += [_row("plait", "table_rss_bytes", "bytes", rss), _row("plait", "table_pss_bytes", "bytes", pss)]
    return _merged(made)


def resident_bytes(pid: int, file: str) -> tuple[float, float]:
    """Rss and Pss of a process's mappings of a file, in bytes."""
    found = {"Rss": 0.0, "Pss": 0.0}
    counts = False
    for line in (Path("/proc") / str(pid) / "smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(f"/{file}")
        name, _, rest = line.partition(":")
        if counts and name in found:
            found[name] += 1024 * float(rest.split()[0])
    return found["Rss"], found["Pss"]


def _package(folder: Path) -> tuple[Path, int]:
    """The model packaged small, and then given tables of the size that is wanted."""
    module, inputs = build(_MODEL, rows_scale=1e-5, seed=SEED)
    tables = capture(module, inputs).tables
    dims = sum(int(weight.shape[1]) for weight in tables.values())
    count = int(_BYTES / (4 * dims))
    # With clip the package keeps no bounds: the tables that it gets have far more rows than those it was made with.
    options = PackageOptions(ids_per_bag=ids_per_bag(_MODEL), out_of_range="clip")
    write_package(folder, module, inputs, name="model", options=options)
    (folder / TABLES).unlink()
    write_tables(folder / TABLES, {name: ZeroRows(rows=count, dim=int(w.shape[1])) for name, w in tables.items()})
    return folder, count


def _bodies(table_rows: int) -> list[bytes]:
    """Requests with ids all over the tables."""
    _, inputs = build(_MODEL, rows_scale=1e-5, seed=SEED)
    bounds = dict.fromkeys(ids_per_bag(_MODEL), table_rows)
    return [
        body(
            random_request(
                inputs, bounds, model=_MODEL, candidates=_CANDIDATES, ids_per_bag=ids_per_bag(_MODEL), seed=seed
            )
        )
        for seed in range(_REQUESTS)
    ]


def _row(system: str, metric: str, unit: str, value: float) -> ResultRow:
    return ResultRow(
        system=system, workload=_WORKLOAD, metric=metric, unit=unit, value=value, p20=value, p80=value, n=1
    )


def _merged(rows_of_both: list[ResultRow]) -> list[ResultRow]:
    """The worse of the two servers."""
    worst: dict[str, ResultRow] = {}
    for row in rows_of_both:
        if row.metric not in worst or row.value > worst[row.metric].value:
            worst[row.metric] = row
    return list(worst.values())
