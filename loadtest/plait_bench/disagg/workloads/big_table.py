"""A table of 20 GB: how soon a server over it answers, and whether two servers share its pages; and the same tables on
two shards, of which each has only its own in memory.

The file is sparse, so it takes no room on disk; the server maps it like any other. A page that was read is in the
page cache once: Pss counts half of it for each of two processes that map it.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.disagg.load.bodies import body
from plait_bench.disagg.load.packages import SEED
from plait_bench.disagg.systems.serving import serving
from plait_disagg.graph.capture import capture
from plait_disagg.models.configs import build, ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import PackageOptions, open_package, write_package
from plait_disagg.package.manifest import TABLES
from plait_disagg.tables.storage import ZeroRows, write_tables
from plait_disagg.values import RankRequest

__all__ = ["BigTable", "resident_bytes"]

_MODEL = "rm1"
_BYTES = 20e9
_CANDIDATES, _REQUESTS = 64, 20


class BigTable(Workload):
    """Seconds from the start of the process to the first answer, and the resident memory of the mapped file: the worse
    value of two servers. One round only, because what is mapped stays in the page cache."""

    name = "table-20gb"
    systems = ("plait", "plait_shards")
    ours = "plait"
    rounds: ClassVar[Mapping[str, int]] = {"plait": 1, "plait_shards": 1}
    metrics: Mapping[str, Metric] = {
        "first_answer_s": Metric(unit="s", better="lower"),
        "table_rss_bytes": Metric(unit="bytes", better="lower"),
        "table_pss_bytes": Metric(unit="bytes", better="lower"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model."""
        say(f"{_MODEL} with {_BYTES / 1e9:.0f} GB of tables")
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch:
            self._package, table_rows = _package(Path(scratch) / "package")
            self._requests = _requests(table_rows)
            yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open nothing yet: the server's start is what is measured."""
        if system == "plait":
            yield _Mapping(self._package, [body(request) for request in self._requests])
        else:
            yield _Dealt(self._package, self._requests)


@dataclass(frozen=True)
class _Mapping:
    """Implements `Subject`."""

    package: Path
    bodies: list[bytes]

    def warm_up(self) -> None:
        """Do nothing: a cold start is what is measured."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Start two servers over the same file, send requests to both, and read their memory use."""
        command = ("plait_bench.disagg.systems.ours", str(self.package), "1", "whole")
        seen: dict[str, list[float]] = {"first_answer_s": [], "table_rss_bytes": [], "table_pss_bytes": []}
        with ExitStack() as stack:
            pids = []
            for _ in range(2):
                started_s = time.monotonic()
                server = stack.enter_context(serving(command, self.bodies[0]))
                seen["first_answer_s"].append(time.monotonic() - started_s)
                for content in self.bodies:
                    server.ask(content)
                pids.append(server.pid)
            for pid in pids:
                rss, pss = resident_bytes(pid, TABLES)
                seen["table_rss_bytes"].append(rss)
                seen["table_pss_bytes"].append(pss)
        return [Reading(metric=metric, value=max(values)) for metric, values in seen.items()]


@dataclass(frozen=True)
class _Dealt:
    """Implements `Subject`: the tables on two shards of half of them each."""

    package: Path
    requests: list[RankRequest]

    def warm_up(self) -> None:
        """Do nothing: a cold start is what is measured."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Start both shards, ask for the CN half of all requests, and read the memory use of the shards."""
        from plait_bench.disagg.systems.shards import on_shards  # the child is that module: not loaded twice

        started_s = time.monotonic()
        with on_shards(open_package(self.package, ahead=False), 2) as (half, pids):
            half.run(self.requests[:1])
            first_s = time.monotonic() - started_s
            for request in self.requests:
                half.run([request])
            seen = [resident_bytes(pid, TABLES) for pid in pids]
        return [
            Reading(metric="first_answer_s", value=first_s),
            Reading(metric="table_rss_bytes", value=max(rss for rss, _ in seen)),
            Reading(metric="table_pss_bytes", value=max(pss for _, pss in seen)),
        ]


def resident_bytes(pid: int, file: str) -> tuple[float, float]:
    """Sum Rss and Pss of a process's mappings of a file, in bytes."""
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
    """Package a small model, then give it tables of the wanted size. Returns the folder and the rows per table."""
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


def _requests(table_rows: int) -> list[RankRequest]:
    """Make requests with ids spread over the whole tables."""
    _, inputs = build(_MODEL, rows_scale=1e-5, seed=SEED)
    bounds = dict.fromkeys(ids_per_bag(_MODEL), table_rows)
    return [
        random_request(inputs, bounds, model=_MODEL, candidates=_CANDIDATES, ids_per_bag=ids_per_bag(_MODEL), seed=seed)
        for seed in range(_REQUESTS)
    ]
