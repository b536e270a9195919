"""Lists of items on systems in worker processes as workloads: processes are started when first needed, and kept.

Only the fleet that is measured runs: the others are paused, because a server that idles (Ray's processes do) takes time
from whom is measured beside it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from plait_bench.benchmark import Metric, Reading, ResultRow, Rounds, Say, Subject, Workload, cores, pairs_of
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_bench.images.fleet import ItemList, Json, ProcessLayout, RunSample, System, WorkerFleet
from plait_bench.images.orders import decode
from plait_bench.summary import percentile

OpenFleet = Callable[[System, int], WorkerFleet]
"""`(system, processes) -> its workers`."""

_SECONDS, _GIB = Metric(unit="s", better="lower"), Metric(unit="GiB", better="lower")
COSTS: Mapping[str, Metric] = {"ready_s": _SECONDS, "memory_gib": _GIB, "peak_memory_gib": _GIB}
"""What every system has beside speed: seconds until its processes were ready, and their memory after the last round."""

METRICS: Mapping[str, Metric] = {
    "images_per_s": Metric(unit="images/s", better="higher"),
    "seconds_per_image": _SECONDS,
    "mean_latency_s": _SECONDS,
    "largest_pixel_difference": Metric(unit="levels of 255", is_timed=False),
    "mean_pixel_difference": Metric(unit="levels of 255", is_timed=False),
    **COSTS,
}
DECIDING = "images_per_s"

OWN_LAYOUT = ProcessLayout(processes=1, threads=0, variant="its own")
"""The layout of a system that divides the machine itself."""

# In fp32 the systems differ by rounding (batching, merged weights instead of a LoRA branch), which an image shows as
# a level here or there. A wrong scale, seed, scheduler or ControlNet shows as tens of levels in most images.
MAX_DIFFERENCE_LEVELS = 8

# In bf16 rounding alone is tens of levels at an edge: the mean over an image is judged.
MAX_MEAN_LEVELS = 8.0

_REFERENCES = ("diffusers", "diffusers_fair", "diffusers_batched")
"""Whose images the others must equal: that of the first that takes part."""


def measures(items: ItemList, sample: RunSample) -> Mapping[str, float]:
    """Compute the throughput of the whole workload, and latency: of a single image, or the mean of concurrent ones."""
    per_s = len(items.items) / sample.wall_s
    found = {"images_per_s": per_s, "seconds_per_image": 1 / per_s}
    return found if items.one_by_one else {**found, "mean_latency_s": mean(sample.latencies_s)}


def layouts(cores: int) -> tuple[ProcessLayout, ...]:
    """List the processes x threads worth trying: one core, and the whole machine as 1, 2 or 4 processes."""
    wide = [ProcessLayout(processes=n, threads=cores // n) for n in (1, 2, 4) if n <= cores]
    return tuple(dict.fromkeys([ProcessLayout(processes=1, threads=1), *wide]))


def layouts_for(items: ItemList, cores: int) -> tuple[ProcessLayout, ...]:
    """List those of `layouts` that the workload admits and in which every process has work."""
    useful = 1 if items.one_by_one else len(items.items)
    return tuple(layout for layout in items.layouts(layouts(cores)) if layout.processes <= useful)


class FleetPool:
    """The worker processes of the `systems`, the one that was used last the last. At most `max_open` (0: all) are open:
    beyond that, the one that was used longest ago is closed, and opened and warmed up again for its next round."""

    def __init__(
        self,
        systems: Sequence[System],
        workloads: Sequence[ItemList],
        *,
        cores: int,
        max_open: int = 0,
        open_fleet: OpenFleet = WorkerFleet,
    ) -> None:
        self.systems = {system.name: system for system in systems}
        self._workloads, self._cores, self._max_open = workloads, cores, max_open
        self._open_fleet = open_fleet
        self._open: dict[str, tuple[str, WorkerFleet]] = {}
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

    def layouts(self, name: str, items: ItemList) -> list[ProcessLayout]:
        """List a system's layouts for a workload."""
        system = self.systems[name]
        if system.is_own_layout:
            return [OWN_LAYOUT]
        variants = system.variants(items)
        return [replace(layout, variant=variant) for layout in layouts_for(items, self._cores) for variant in variants]

    def fleet(self, name: str, items: ItemList) -> WorkerFleet:
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

    def _start(self, name: str, items: ItemList) -> WorkerFleet:
        while self._max_open and len(self._open) >= self._max_open:
            self._close(next(iter(self._open)))
        alike = [each for each in self._workloads if _key(each) == _key(items) and name in each.systems]
        processes = max(layout.processes for each in alike for layout in self.layouts(name, each))
        self._say(f"starting {name} in {processes} process(es)")
        system = self.systems[name]
        try:
            return self._open_fleet(replace(system, settings={**system.settings, **items.settings}), processes)
        except SystemUnavailable as error:
            self._missing[name] = error
            raise

    def _close(self, name: str) -> None:
        self._open.pop(name)[1].close()


def _key(items: ItemList) -> str:
    return json.dumps(items.settings, sort_keys=True)


class OnFleets(Workload):
    """One list of items. `check` compares the systems' images."""

    metrics = METRICS
    deciding = DECIDING

    def __init__(self, items: ItemList, pool: FleetPool, check: PixelCheck) -> None:
        self._items, self._pool, self._check = items, pool, check
        self.name = items.name
        self.systems = tuple(name for name in pool.systems if name in items.systems)
        self.ours = next(iter(self.systems), "")
        self.pairs = pairs_of(self.ours, self.systems)
        self._subjects: dict[str, _OnFleet] = {}

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the system's layouts."""
        return [str(layout) for layout in self._pool.layouts(system, self._items)]

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the system's processes in a layout."""
        offered = self._pool.layouts(system, self._items)
        chosen = next(each for each in offered if str(each) == layout)
        subject = self._subjects[system] = _OnFleet(self._items, self._pool, system, chosen)
        subject.configure()
        yield subject

    def settle(self, subjects: Mapping[str, Subject]) -> None:
        """Have each system run all items again and again, for as long as the workload says."""
        for system in subjects:
            until_s = time.monotonic() + self._items.settle_s
            while time.monotonic() < until_s:
                self._subjects[system].run(self._items)

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare the systems' images. Raises `Disagreement`."""
        kept = {system: self._subjects[system].run(self._items, keep=True).results for system in subjects}
        return self._check(self._items, kept)

    def conclude(self) -> Sequence[ResultRow]:
        """Return the rows of `COSTS`, as they were after the last round."""
        return [
            ResultRow.of(
                [value], system=system, workload=self.name, metric=metric, unit=COSTS[metric].unit,
                layout=str(subject.layout),
            )
            for system, subject in self._subjects.items()
            for metric, value in subject.costs.items()
        ]  # fmt: skip


@dataclass
class _OnFleet:
    """Implements `Subject`. The system's processes may have been closed, or set to another layout, between rounds."""

    items: ItemList
    pool: FleetPool
    system: str
    layout: ProcessLayout

    def __post_init__(self) -> None:
        self._fleet: WorkerFleet | None = None
        self.costs: dict[str, float] = {}

    def configure(self) -> None:
        """Open the system if it is closed, and set its layout. Raises `SystemUnavailable`."""
        fleet = self.pool.fleet(self.system, self.items)
        fleet.configure(self.layout)
        self._fleet = fleet

    def warm_up(self) -> None:
        """Run the short items."""
        self._at_hand().run(self.items.warm_up, one_by_one=self.items.one_by_one)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Run all items; in a trial, as many as the workload says."""
        items = self.items
        if trial and items.trial_items:
            items = replace(items, items=items.items[: items.trial_items])
        sample = self.run(items)
        assert self._fleet is not None
        self.costs = {"ready_s": self._fleet.ready_s, **_gib(self._fleet)}
        return [Reading(metric=metric, value=value) for metric, value in measures(items, sample).items()]

    def run(self, items: ItemList, *, keep: bool = False) -> RunSample:
        """Run items on the processes at hand."""
        return self._at_hand().run(items.items, one_by_one=items.one_by_one, keep=keep)

    def _at_hand(self) -> WorkerFleet:
        """Return the processes; those that had to be opened again are warm."""
        before, fleet = self._fleet, self.pool.fleet(self.system, self.items)
        if fleet is not before:
            fleet.configure(self.layout)
            fleet.run(self.items.warm_up, one_by_one=self.items.one_by_one)
            self._fleet = fleet
        return fleet


def _gib(fleet: WorkerFleet) -> dict[str, float]:
    now, peak = fleet.memory_bytes()
    return {"memory_gib": now / 2**30, "peak_memory_gib": peak / 2**30}


class StartWorkload(Workload):
    """Seconds until a system is ready, and until its first image, and its memory then.

    A round starts each system twice in a cache folder of its own: the first time it is empty (a conversion, a
    compilation), the second time it is what the first start left. Model files are in the page cache in both.
    """

    metrics: Mapping[str, Metric] = {
        **COSTS, "first_image_s": _SECONDS, "cold_ready_s": _SECONDS, "cold_first_image_s": _SECONDS
    }  # fmt: skip

    def __init__(self, name: str, systems: Sequence[System], item: Mapping[str, Any], open_fleet: OpenFleet) -> None:
        self.name = name
        self._known = {system.name: system for system in systems}
        self.systems = tuple(self._known)
        self.ours = self.systems[0] if self.systems else ""
        self.pairs = pairs_of(self.ours, self.systems)
        self._item, self._open_fleet = item, open_fleet

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make what the system needs to be started. Starting cold is what is measured."""
        known = self._known[system]
        if known.interpreter is not None:
            known.interpreter()  # an installation is no start
        yield Rounds(lambda _: self._started_twice(known))

    def _started_twice(self, system: System) -> list[Reading]:
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as cache:
            cold = self._start(system, cache)
            again = self._start(system, cache)
        taken = {f"cold_{name}": cold[name] for name in ("ready_s", "first_image_s")} | again
        return [Reading(metric=name, value=value) for name, value in taken.items()]

    def _start(self, system: System, cache: str) -> dict[str, float]:
        started_s = time.monotonic()
        fleet = self._open_fleet(replace(system, settings={**system.settings, "cache": cache}), 1)
        try:
            if not system.is_own_layout:
                fleet.configure(ProcessLayout(processes=1, threads=cores(), variant=""))
            asked_s = time.monotonic()
            first_image_s = asked_s - started_s + fleet.run([self._item], one_by_one=True).wall_s
            return {"ready_s": fleet.ready_s, "first_image_s": first_image_s, **_gib(fleet)}
        finally:
            fleet.close()


class PixelCheck:
    """Compares images within a dtype. A workload that is measured in several parts keeps its reference images."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Sequence[Json]]] = {}

    def __call__(self, workload: ItemList, results: Mapping[str, Sequence[Json]]) -> list[ResultRow]:
        """Return each system's largest difference to the reference by image, in levels of 255; in bf16 the mean
        difference.

        Raises `Disagreement` if an image differs by more than rounding, or if all the reference's images are one flat
        colour.
        """
        reference = next((name for name in _REFERENCES if name in results), "")
        if reference:
            self._kept.setdefault(workload.name, (reference, results[reference]))
        elif workload.name not in self._kept:
            reference = list(results)[-1]
        name, values = self._kept.get(workload.name) or (reference, results[reference])
        expected = [decode(value) for value in values]
        if all(int(image.max()) == int(image.min()) for image in expected):
            raise Disagreement(f"{workload.name}: {name} made flat images only; comparing them proves nothing")
        others = {system: images for system, images in results.items() if system != name}
        return [self._row(workload, system, name, images, expected) for system, images in others.items()]

    @staticmethod
    def _row(
        workload: ItemList,
        system: str,
        reference: str,
        images: Sequence[Json],
        expected: Sequence[npt.NDArray[np.uint8]],
    ) -> ResultRow:
        is_exact = workload.settings.get("dtype", "float32") == "float32"
        limit = MAX_DIFFERENCE_LEVELS if is_exact else MAX_MEAN_LEVELS
        levels = []
        for value, image in zip(images, expected, strict=True):
            difference = np.abs(decode(value).astype(np.int16) - image.astype(np.int16))
            levels.append(float(difference.max() if is_exact else difference.mean()))
        if max(levels) > limit:
            raise Disagreement(
                f"{workload.name}: image {levels.index(max(levels))} of {system} differs from {reference}'s "
                f"by {max(levels):.0f} levels of 255 (at most {limit:g} are rounding)"
            )
        return ResultRow(
            system=system, workload=workload.name,
            metric="largest_pixel_difference" if is_exact else "mean_pixel_difference", unit="levels of 255",
            value=max(levels), p20=percentile(levels, 0.2), p80=percentile(levels, 0.8), n=len(levels),
        )  # fmt: skip
