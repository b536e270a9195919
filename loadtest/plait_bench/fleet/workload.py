"""A definition over worker processes as a `Benchmark`: processes are started when first needed, and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from plait_bench.benchmark import Benchmark, Metric, Reading, ResultRow, Say, Subject, Workload, pairs_of
from plait_bench.errors import SystemUnavailable
from plait_bench.fleet.values import Fleet, FleetDefinition, ItemList, ProcessLayout, RunSample, System

__all__ = ["MEMORY", "READY", "OpenFleet", "layouts", "layouts_for", "on_fleets"]

OpenFleet = Callable[[System, int], Fleet]
"""`(system, processes) -> its workers`."""

READY, MEMORY, PEAK = "ready_s", "memory_gib", "peak_memory_gib"
COSTS: Mapping[str, Metric] = {
    READY: Metric(unit="s", better="lower"),
    MEMORY: Metric(unit="GiB", better="lower"),
    PEAK: Metric(unit="GiB", better="lower"),
}
"""The metrics that every system has beside those of the definition: seconds until its processes were ready, and their
memory after the last round."""

OWN_LAYOUT = ProcessLayout(processes=1, threads=0, variant="its own")
"""The layout of a system that divides the machine itself."""


def on_fleets(definition: FleetDefinition, *, cores: int, open_fleet: OpenFleet) -> Benchmark:
    """Make a benchmark of a definition, on that many cores."""
    pool = _Pool(definition, cores, open_fleet)
    return Benchmark(
        name=definition.name,
        workloads=tuple(_OnFleets(definition, items, pool) for items in definition.workloads),
        session=pool.session,
    )


def layouts(cores: int) -> tuple[ProcessLayout, ...]:
    """List the processes x threads worth trying: one core, and the whole machine as 1, 2 or 4 processes."""
    wide = [ProcessLayout(processes=n, threads=cores // n) for n in (1, 2, 4) if n <= cores]
    return tuple(dict.fromkeys([ProcessLayout(processes=1, threads=1), *wide]))


def layouts_for(items: ItemList, cores: int) -> tuple[ProcessLayout, ...]:
    """List those of `layouts` that the workload admits and in which every process has work."""
    useful = 1 if items.one_by_one else len(items.items)
    return tuple(layout for layout in items.layouts(layouts(cores)) if layout.processes <= useful)


class _Pool:
    """The worker processes, by system; the one that was used last is the last. Only that one runs: the others are
    paused, because a server that idles (Ray's processes do) takes time from whom is measured beside it."""

    def __init__(self, definition: FleetDefinition, cores: int, open_fleet: OpenFleet) -> None:
        self.cores = cores
        self._definition, self._open_fleet = definition, open_fleet
        self._open: dict[str, tuple[str, Fleet]] = {}
        self._missing: dict[str, SystemUnavailable] = {}
        self._say: Say = lambda _: None

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Stop all processes at the end."""
        self._say = say
        try:
            yield
        finally:
            while self._open:
                self._close(next(iter(self._open)))

    def system(self, name: str) -> System:
        """Return the system of that name."""
        return next(system for system in self._definition.systems if system.name == name)

    def layouts(self, name: str, items: ItemList) -> list[ProcessLayout]:
        """List a system's layouts for a workload."""
        system = self.system(name)
        if system.is_own_layout:
            return [OWN_LAYOUT]
        variants = system.variants(items)
        return [replace(layout, variant=variant) for layout in layouts_for(items, self.cores) for variant in variants]

    def fleet(self, name: str, items: ItemList) -> Fleet:
        """Return a system's workers, enough for its widest layout, with the workload's settings.

        Raises `SystemUnavailable`.
        """
        if name in self._missing:
            raise self._missing[name]
        settings = _key(items)
        there = self._open.pop(name, None)
        if there is not None and there[0] != settings:
            there[1].close()
            there = None
        for _, other in self._open.values():
            other.pause()
        self._open[name] = (settings, self._start(name, items)) if there is None else there
        self._open[name][1].resume()
        return self._open[name][1]

    def _start(self, name: str, items: ItemList) -> Fleet:
        while self._definition.max_open and len(self._open) >= self._definition.max_open:
            self._close(next(iter(self._open)))
        alike = [each for each in self._definition.workloads if _key(each) == _key(items)]
        processes = max(
            layout.processes
            for each in alike
            if each.systems is None or name in each.systems
            for layout in self.layouts(name, each)
        )
        self._say(f"starting {name} in {processes} process(es)")
        system = self.system(name)
        try:
            return self._open_fleet(replace(system, settings={**system.settings, **items.settings}), processes)
        except SystemUnavailable as error:
            self._missing[name] = error
            raise

    def _close(self, name: str) -> None:
        self._open.pop(name)[1].close()


def _key(items: ItemList) -> str:
    return json.dumps(items.settings, sort_keys=True)


class _OnFleets(Workload):
    """One list of items as a workload."""

    def __init__(self, definition: FleetDefinition, items: ItemList, pool: _Pool) -> None:
        self._definition, self._items, self._pool = definition, items, pool
        self.name, self.ours = items.name, definition.ours
        self.systems = tuple(
            system.name for system in definition.systems if items.systems is None or system.name in items.systems
        )
        self.metrics = {**definition.metrics, **COSTS}
        self.deciding = next(iter(definition.metrics))
        self.pairs = pairs_of(self.ours, self.systems)
        self._subjects: dict[str, _OnFleet] = {}

    def layouts(self, system: str) -> Sequence[str]:
        return [str(layout) for layout in self._pool.layouts(system, self._items)]

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        offered = self._pool.layouts(system, self._items)
        subject = _OnFleet(
            self._definition, self._items, self._pool, system, next(each for each in offered if str(each) == layout)
        )
        subject.configure()
        self._subjects[system] = subject
        yield subject

    def settle(self, subjects: Mapping[str, Subject]) -> None:
        for system in subjects:
            self._subjects[system].settle()

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        results = {system: self._subjects[system].results() for system in subjects}
        return self._definition.check(self._items, results)

    def conclude(self) -> Sequence[ResultRow]:
        return [row for subject in self._subjects.values() for row in subject.costs()]


class _OnFleet:
    """Implements `Subject`. The system's processes may have been closed, or set to another layout, between rounds."""

    def __init__(
        self, definition: FleetDefinition, items: ItemList, pool: _Pool, system: str, layout: ProcessLayout
    ) -> None:
        self._definition, self._items, self._pool = definition, items, pool
        self._system, self._layout = system, layout
        self._fleet: Fleet | None = None
        self._costs: dict[str, float] = {}

    def configure(self) -> None:
        """Open the system if it is closed, and set its layout. Raises `SystemUnavailable`."""
        fleet = self._pool.fleet(self._system, self._items)
        fleet.configure(self._layout)
        self._fleet = fleet

    def warm_up(self) -> None:
        self._at_hand().run(self._items.warm_up, one_by_one=self._items.one_by_one)

    def settle(self) -> None:
        """Run all items again and again, for as long as the workload says."""
        until_s = time.monotonic() + self._items.settle_s
        while time.monotonic() < until_s:
            self._run(self._at_hand(), self._items)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Run all items; in a trial, as many as the workload says."""
        fleet = self._at_hand()
        items = self._items
        if trial and items.trial_items:
            items = replace(items, items=items.items[: items.trial_items])
        sample = self._run(fleet, items)
        self._note_costs(fleet)
        measured = self._definition.measures(items, sample)
        return [Reading(metric=metric, value=value) for metric, value in measured.items()]

    def results(self) -> Sequence[object]:
        """Run all items and return what they gave."""
        return self._run(self._at_hand(), self._items, keep=True).results

    def costs(self) -> list[ResultRow]:
        """Return the rows of `COSTS`, as they were after the last round."""
        return [
            ResultRow.of(
                [value], system=self._system, workload=self._items.name, metric=metric, unit=COSTS[metric].unit,
                layout=str(self._layout),
            )
            for metric, value in self._costs.items()
        ]  # fmt: skip

    def _at_hand(self) -> Fleet:
        """Return the processes; those that had to be opened again are warm."""
        before, fleet = self._fleet, self._pool.fleet(self._system, self._items)
        if fleet is not before:
            fleet.configure(self._layout)
            fleet.run(self._items.warm_up, one_by_one=self._items.one_by_one)
            self._fleet = fleet
        return fleet

    @staticmethod
    def _run(fleet: Fleet, items: ItemList, *, keep: bool = False) -> RunSample:
        return fleet.run(items.items, one_by_one=items.one_by_one, keep=keep)

    def _note_costs(self, fleet: Fleet) -> None:
        memory = fleet.memory()
        self._costs = {READY: fleet.ready_s, MEMORY: memory.now_bytes / 2**30, PEAK: memory.peak_bytes / 2**30}
