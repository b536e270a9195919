"""Lists of items on systems in worker processes as workloads: processes are started when first needed, and kept.

Only the fleet that is measured runs: the others are paused, because a server that idles (Ray's processes do) takes time
from whom is measured beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from plait_bench.benchmark import Reading, Say, Subject, Workload, cores, readings
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_bench.images.fleet import ItemList, ProcessLayout, System, WorkerFleet
from plait_bench.images.orders import ImageArray, ImageSpec

OpenFleet = Callable[[System, int], WorkerFleet]

_PEAK = {"peak_memory_gib": "GiB"}
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
        self._open: dict[str, tuple[Mapping[str, object], WorkerFleet]] = {}
        self._ready: dict[WorkerFleet, tuple[ItemList, ProcessLayout]] = {}
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

    def layouts(self, name: str, items: ItemList) -> dict[str, ProcessLayout]:
        """Return a system's layouts for a workload, by name."""
        system, plain = self.systems[name], items.layouts(self._cores)
        if system.is_own_layout:
            return {str(OWN_LAYOUT): OWN_LAYOUT}
        found = [replace(layout, variant=variant) for layout in plain for variant in system.variants(items)]
        return {str(layout): layout for layout in found}

    def fleet(self, name: str, items: ItemList) -> WorkerFleet:
        """Return a system's workers, enough for its widest layout, with the workload's settings.

        Raises `SystemUnavailable`.
        """
        if name in self._missing:
            raise self._missing[name]
        there = self._open.pop(name, None)
        if there is not None and there[0] != items.settings:
            there[1].close()
            there = None
        for _, other in self._open.values():
            other.pause()
        self._open[name] = (items.settings, self._start(name, items)) if there is None else there
        self._open[name][1].resume()
        return self._open[name][1]

    def at_hand(self, name: str, items: ItemList, layout: ProcessLayout) -> WorkerFleet:
        """Return a system's workers in a layout; those that are new to it, or to the workload, are warmed up."""
        fleet = self.fleet(name, items)
        if self._ready.get(fleet) != (items, layout):
            fleet.configure(layout)
            fleet.run(items.warm_up, one_by_one=items.one_by_one)
            self._ready[fleet] = items, layout
        return fleet

    def _start(self, name: str, items: ItemList) -> WorkerFleet:
        while self._max_open and len(self._open) >= self._max_open:
            self._close(next(iter(self._open)))
        alike = [each for each in self._workloads if each.settings == items.settings and name in each.systems]
        processes = max(layout.processes for each in alike for layout in self.layouts(name, each).values())
        self._say(f"starting {name} in {processes} process(es)")
        try:
            return self._open_fleet(self.systems[name].given(items.settings), processes)
        except SystemUnavailable as error:
            self._missing[name] = error
            raise

    def _close(self, name: str) -> None:
        self._open.pop(name)[1].close()


class OnFleets(Workload):
    """One list of items. `check` compares the systems' images."""

    metrics: Mapping[str, str] = {DECIDING: "images/s", **_PEAK}
    compared = frozenset({DECIDING})
    deciding = DECIDING

    def __init__(self, items: ItemList, pool: FleetPool, check: PixelCheck) -> None:
        self._items, self._pool, self._check = items, pool, check
        self.name = items.name
        self.systems = tuple(name for name in pool.systems if name in items.systems)
        self._chosen: dict[str, ProcessLayout] = {}

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the system's layouts."""
        return list(self._pool.layouts(system, self._items))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the system's processes, for a layout."""
        self._pool.fleet(system, self._items)
        self._chosen[system] = self._pool.layouts(system, self._items)[layout]
        yield Subject(
            lambda _: self._measured(system, len(self._items.items)),
            warm_up=lambda: self._at_hand(system),
            trial=lambda _: self._measured(system, self._items.trial_items or len(self._items.items)),
        )

    def settle(self, subjects: Mapping[str, Subject]) -> None:
        """Have each system run all items again and again, for as long as the workload says."""
        for system in subjects:
            until_s = time.monotonic() + self._items.settle_s
            while time.monotonic() < until_s:
                self._run(system, self._items.items)

    def check(self, subjects: Mapping[str, Subject]) -> None:
        """Compare the systems' images. Raises `Disagreement`."""
        every = self._items.items
        self._check(self._items, {system: self._run(system, every, keep=True)[1] for system in subjects})

    def _measured(self, system: str, count: int) -> list[Reading]:
        """Run the first items."""
        taken_s, _ = self._run(system, self._items.items[:count])
        return readings({DECIDING: count / taken_s, **_peak_gib(self._at_hand(system))})

    def _run(self, system: str, items: Sequence[ImageSpec], *, keep: bool = False) -> tuple[float, list[ImageArray]]:
        return self._at_hand(system).run(items, one_by_one=self._items.one_by_one, keep=keep)

    def _at_hand(self, system: str) -> WorkerFleet:
        """Return the system's processes, which may have been closed, or set to another layout, between rounds."""
        return self._pool.at_hand(system, self._items, self._chosen[system])


def _peak_gib(fleet: WorkerFleet) -> dict[str, float]:
    return {"peak_memory_gib": fleet.peak_bytes() / 2**30}


class StartWorkload(Workload):
    """Seconds from a system's start until its first image, and its memory then.

    A round starts each system twice in a cache folder of its own: the first time it is empty (a conversion, a
    compilation), the second time, which counts, it is what the first start left. Model files are in the page cache.
    """

    metrics: Mapping[str, str] = {"first_image_s": "s", **_PEAK}

    def __init__(
        self, name: str, systems: Sequence[System], item: ImageSpec, open_fleet: OpenFleet = WorkerFleet
    ) -> None:
        self.name = name
        self._known = {system.name: system for system in systems}
        self.systems = tuple(self._known)
        self._item, self._open_fleet = item, open_fleet

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make what the system needs to be started. Starting cold is what is measured."""
        known = self._known[system]
        if known.interpreter is not None:
            known.interpreter()  # an installation is no start
        yield Subject(lambda _: self._started_twice(known))

    def _started_twice(self, system: System) -> list[Reading]:
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as cache:
            self._start(system, cache)
            return readings(self._start(system, cache))

    def _start(self, system: System, cache: str) -> dict[str, float]:
        started_s = time.monotonic()
        fleet = self._open_fleet(system.given({"cache": cache}), 1)
        try:
            if not system.is_own_layout:
                fleet.configure(ProcessLayout(processes=1, threads=cores(), variant=""))
            asked_s = time.monotonic()
            taken_s, _ = fleet.run([self._item], one_by_one=True)
            return {"first_image_s": asked_s - started_s + taken_s, **_peak_gib(fleet)}
        finally:
            fleet.close()


class PixelCheck:
    """Compares images within a dtype. A workload that is measured in several parts keeps its reference images."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Sequence[ImageArray]]] = {}

    def __call__(self, workload: ItemList, results: Mapping[str, Sequence[ImageArray]]) -> None:
        """Compare each system's images with the reference's: the largest difference, in bf16 the mean one.

        Raises `Disagreement` if an image differs by more than rounding, or if all the reference's images are one flat
        colour.
        """
        for reference in [name for name in _REFERENCES if name in results][:1]:
            self._kept.setdefault(workload.name, (reference, results[reference]))
        name, expected = self._kept.get(workload.name) or list(results.items())[-1]
        if all(int(image.max()) == int(image.min()) for image in expected):
            raise Disagreement(f"{workload.name}: {name} made flat images only; comparing them proves nothing")
        is_exact = workload.settings.get("dtype", "float32") == "float32"
        limit = MAX_DIFFERENCE_LEVELS if is_exact else MAX_MEAN_LEVELS
        for system, images in results.items():
            for number, (image, wanted) in enumerate(zip(images, expected, strict=True)):
                difference = np.abs(image.astype(np.int16) - wanted.astype(np.int16))
                levels = float(difference.max() if is_exact else difference.mean())
                if levels > limit:
                    raise Disagreement(
                        f"{workload.name}: image {number} of {system} differs from {name}'s "
                        f"by {levels:.0f} levels of 255 (at most {limit:g} are rounding)"
                    )
