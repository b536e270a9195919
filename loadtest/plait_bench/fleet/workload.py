"""A definition over worker processes as a `Benchmark`: processes are started when first needed, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plait_bench.benchmark import Benchmark, Reading, ResultRow, Say, Subject, Workload, pairs_of
from plait_bench.errors import SystemUnavailable
from plait_bench.fleet.values import Fleet, FleetDefinition, ItemList, ProcessLayout, System

__all__ = ["OpenFleet", "layouts", "layouts_for", "on_fleets"]

OpenFleet = Callable[[System, int], Fleet]
"""`(system, processes) -> its workers`."""


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
    """List those of `layouts` in which every process has work."""
    useful = 1 if items.one_by_one else len(items.items)
    return tuple(layout for layout in layouts(cores) if layout.processes <= useful)


class _Pool:
    """The worker processes, by system."""

    def __init__(self, definition: FleetDefinition, cores: int, open_fleet: OpenFleet) -> None:
        self.cores = cores
        self._definition, self._open_fleet = definition, open_fleet
        self._open: dict[str, Fleet] = {}
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
                self._open.popitem()[1].close()

    def system(self, name: str) -> System:
        """Return the system of that name."""
        return next(system for system in self._definition.systems if system.name == name)

    def fleet(self, name: str) -> Fleet:
        """Return a system's workers, enough for its widest layout. Raises `SystemUnavailable`."""
        if name in self._missing:
            raise self._missing[name]
        if name not in self._open:
            processes = max(
                layout.processes
                for items in self._definition.workloads
                if items.systems is None or name in items.systems
                for layout in layouts_for(items, self.cores)
            )
            self._say(f"starting {name} in {processes} process(es)")
            try:
                self._open[name] = self._open_fleet(self.system(name), processes)
            except SystemUnavailable as error:
                self._missing[name] = error
                raise
        return self._open[name]


class _OnFleets(Workload):
    """One list of items as a workload."""

    def __init__(self, definition: FleetDefinition, items: ItemList, pool: _Pool) -> None:
        self._definition, self._items, self._pool = definition, items, pool
        self.name, self.ours = items.name, definition.ours
        self.systems = tuple(
            system.name for system in definition.systems if items.systems is None or system.name in items.systems
        )
        self.metrics = definition.metrics
        self.deciding = next(iter(definition.metrics))
        self.pairs = pairs_of(self.ours, self.systems)

    def layouts(self, system: str) -> Sequence[str]:
        return [str(layout) for layout in self._layouts(system)]

    def _layouts(self, system: str) -> list[ProcessLayout]:
        variants = self._pool.system(system).variants(self._items)
        return [
            replace(layout, variant=variant)
            for layout in layouts_for(self._items, self._pool.cores)
            for variant in variants
        ]

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        fleet = self._pool.fleet(system)
        fleet.configure(next(each for each in self._layouts(system) if str(each) == layout))
        yield _OnFleet(self._definition, self._items, fleet)

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        results = {
            system: self._pool.fleet(system)
            .run(self._items.items, one_by_one=self._items.one_by_one, keep=True)
            .results
            for system in subjects
        }
        return self._definition.check(self._items, results)


@dataclass(frozen=True)
class _OnFleet:
    """Implements `Subject`."""

    definition: FleetDefinition
    items: ItemList
    fleet: Fleet

    def warm_up(self) -> None:
        self.fleet.run(self.items.warm_up, one_by_one=self.items.one_by_one)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Run all items, in a trial too."""
        sample = self.fleet.run(self.items.items, one_by_one=self.items.one_by_one)
        measured = self.definition.measures(self.items, sample)
        return [Reading(metric=metric, value=value) for metric, value in measured.items()]
