"""Requests per second in time, over HTTP: plain PyTorch behind FastAPI, plait, and plait cut in two."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait_bench.benchmark import Metric, Reading, ResultRow, Say, Subject, Workload, pairs_of
from plait_bench.disagg.load.bodies import HEADER_BYTES, write_bodies
from plait_bench.disagg.load.goodput import LIMIT_MS, load_on, search_goodput, throughput_per_s
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.load.scores import compare
from plait_bench.disagg.systems.serving import BenchServer, serving
from plait_bench.errors import SystemFailed
from plait_bench.host import cores

__all__ = ["GOODPUTS", "SCALES", "SYSTEMS", "DisaggLoad", "Goodput", "ServerLayout", "layouts_of"]

OURS = "plait"
SYSTEMS = ("pytorch", "plait", "plait_split")
METRIC = "goodput_per_s"

_BEGIN = 0.75
"""The first rate tried, as a share of a closed loop's throughput: open-loop arrivals come in bursts, and p99 misses
the limit well below that throughput."""

SCALES: Mapping[str, float] = {"rm1": 0.125, "rm2": 0.125, "criteo-kaggle": 0.25}
"""Scales that make half a gigabyte of tables each: far beyond every cache, and four of them fit on a small machine."""

_LIMITS_MS: Mapping[str, float] = {"rm2-512": 100.0}
"""Limits that differ from the default: one such request takes plain PyTorch tens of milliseconds on two cores, so at
50 ms it could hold no rate at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggLoad:
    """Requests of `candidates` for a configuration whose tables have `scale` of their published rows. `limit_ms`: the
    p99 limit."""

    model: str
    scale: float
    candidates: int
    limit_ms: float = LIMIT_MS

    @property
    def name(self) -> str:
        """The name used in the document: `rm1-64`."""
        return f"{self.model}-{self.candidates}"


GOODPUTS: Mapping[str, DisaggLoad] = {
    f"{model}-{candidates}": DisaggLoad(
        model=model, scale=scale, candidates=candidates, limit_ms=_LIMITS_MS.get(f"{model}-{candidates}", LIMIT_MS)
    )
    for model, scale in SCALES.items()
    for candidates in (1, 64, 512)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """One way to run a system: its name in the table, and the arguments of its server."""

    name: str
    arguments: tuple[str, ...]


class Goodput(Workload):
    """The goodput of all systems under one load."""

    systems = SYSTEMS
    ours = OURS
    pairs = pairs_of(OURS, SYSTEMS)
    deciding = METRIC
    metrics: Mapping[str, Metric] = {METRIC: Metric(unit="requests/s", better="higher")}

    def __init__(self, load: DisaggLoad) -> None:
        self.name, self.load = load.name, load
        self.known_per_s: dict[tuple[str, str], float] = {}
        """By (system, layout): the rate that was held the last time, which is where the next search begins."""

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once, and write the bodies."""
        self.say = say
        self._package = packaged(self.load.model, self.load.scale, say=say)
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
            self.bodies = write_bodies(Path(folder), self._package, self.load.model, self.load.candidates, seed=1)
            yield

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names from `layouts_of`."""
        return [layout.name for layout in layouts_of(self.load, system, self._package)]

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Start the system's server."""
        offered = {each.name: each for each in layouts_of(self.load, system, self._package)}
        with serving(offered[layout].arguments, self.bodies[0].read_bytes()) as server:
            yield _Loaded(self, (system, layout), server)

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare the scores of the first bodies."""
        compare({name: each.server for name, each in subjects.items() if isinstance(each, _Loaded)}, self.bodies)
        return ()


@dataclass(frozen=True)
class _Loaded:
    """A `Subject`: a server under load."""

    workload: Goodput
    key: tuple[str, str]
    server: BenchServer

    def warm_up(self) -> None:
        closed_per_s = throughput_per_s(self.server.url, self.workload.bodies, HEADER_BYTES)
        self.workload.known_per_s.setdefault(self.key, _BEGIN * closed_per_s)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Search for the highest rate that holds; a trial in which none holds reads 0."""
        workload = self.workload
        limit_ms = workload.load.limit_ms
        content = workload.bodies[0].read_bytes()
        load = load_on(
            self.server.url,
            workload.bodies,
            HEADER_BYTES,
            limit_ms=limit_ms,
            seed=1000 * number,
            settle=lambda: self.server.ask(content),
        )
        first_per_s = workload.known_per_s[self.key]
        try:
            held = search_goodput(load, first_per_s=first_per_s, limit_ms=limit_ms, trial=trial, say=workload.say)
        except SystemFailed:
            if not trial:
                raise
            return [Reading(metric=METRIC, value=0.0)]
        workload.known_per_s[self.key] = held.rate_per_s
        remark = "" if held.confirmed or trial else f"{self.key[1]}, not confirmed"
        return [Reading(metric=METRIC, value=held.goodput_per_s, layout=remark)]


def layouts_of(load: DisaggLoad, system: str, package: Path) -> tuple[ServerLayout, ...]:
    """List the layouts to try: as many threads as cores and one thread, HTTP in the model's process or in one of its
    own; for the split also one thread for the CN and all cores for the HN, or one HN per core."""
    threads = tuple(dict.fromkeys([1, cores()]))
    if system == "pytorch":
        whole = ("plait_bench.disagg.systems.baseline", load.model, str(load.scale))
        return tuple(
            ServerLayout(name=f"{count} threads, {where}", arguments=(*whole, str(count), where))
            for count in threads
            for where in ("inline", "worker")
        )
    is_split = system == "plait_split"
    counts = list(map(str, threads)) + [f"{threads[0]}+{each}" for each in threads[1:] if is_split]
    ours = "plait_bench.disagg.systems.ours", str(package)
    mode = "split" if is_split else "whole"
    found = [
        ServerLayout(name=f"{count} threads{where}", arguments=(*ours, count, mode, *rest))
        for count in counts
        for where, rest in (("", ()), (", model apart", ("in_children",)))
    ]
    if is_split and cores() > 1:
        each = "+".join(["1"] * (1 + cores()))
        found.append(ServerLayout(name=f"{each} threads", arguments=(*ours, each, mode)))
    return tuple(found)
