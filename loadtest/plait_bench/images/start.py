"""The workload `start`: seconds until a system is ready, and until its first image, and its memory then.

A round starts each system twice in a cache folder of its own: the first time it is empty (a conversion, a
compilation), the second time it is what the first start left. Model files are in the page cache in both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait_bench.benchmark import Metric, Reading, Subject, Workload, pairs_of
from plait_bench.fleet.values import ProcessLayout, System
from plait_bench.fleet.workload import COSTS, OpenFleet
from plait_bench.host import cores
from plait_bench.images.sizes import Variety
from plait_bench.images.workloads import START, workloads

__all__ = ["StartWorkload"]

_SECONDS = Metric(unit="s", better="lower")


class StartWorkload(Workload):
    """Each system started and asked for one image, and stopped."""

    def __init__(
        self, variety: Variety, systems: Sequence[System], settings: Mapping[str, Any], open_fleet: OpenFleet
    ) -> None:
        self.name = variety.row_name(START)
        self.systems = tuple(system.name for system in systems)
        self.ours = self.systems[0] if self.systems else ""
        self.pairs = pairs_of(self.ours, self.systems)
        self.metrics = {**COSTS, "first_image_s": _SECONDS, "cold_ready_s": _SECONDS, "cold_first_image_s": _SECONDS}
        self._known = {system.name: replace(system, settings={**system.settings, **settings}) for system in systems}
        self._item = workloads(["single"], variety)[0].items[0]
        self._open_fleet = open_fleet

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make what the system needs to be started."""
        known = self._known[system]
        if known.interpreter is not None:
            known.interpreter()  # an installation is no start
        yield _Starts(known, self._item, self._open_fleet)


@dataclass(frozen=True)
class _Starts:
    """Implements `Subject`."""

    system: System
    item: Mapping[str, Any]
    open_fleet: OpenFleet

    def warm_up(self) -> None:
        """Do nothing: starting cold is what is measured."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Start it with an empty cache, and again."""
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as cache:
            cold = self._start(cache)
            again = self._start(cache)
        taken = {f"cold_{name}": cold[name] for name in ("ready_s", "first_image_s")} | again
        return [Reading(metric=name, value=value) for name, value in taken.items()]

    def _start(self, cache: str) -> dict[str, float]:
        system = replace(self.system, settings={**self.system.settings, "cache": str(Path(cache))})
        started_s = time.monotonic()
        fleet = self.open_fleet(system, 1)
        try:
            if not system.is_own_layout:
                fleet.configure(ProcessLayout(processes=1, threads=cores(), variant=""))
            asked_s = time.monotonic()
            first_image_s = asked_s - started_s + fleet.run([self.item], one_by_one=True).wall_s
            memory = fleet.memory()
        finally:
            fleet.close()
        return {
            "ready_s": fleet.ready_s,
            "first_image_s": first_image_s,
            "memory_gib": memory.now_bytes / 2**30,
            "peak_memory_gib": memory.peak_bytes / 2**30,
        }
