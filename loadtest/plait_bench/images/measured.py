"""Lists of items on systems in worker processes as workloads. Each workload starts its own, so that its peaks of memory
are its own, too.

Only the fleet that is measured runs: the others are paused, because a server that idles (Ray's processes do) takes time
from whom is measured beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from plait_bench.benchmark import Reading, Say, Subject, Workload, cores, readings
from plait_bench.errors import Disagreement
from plait_bench.images.fleet import ItemList, ProcessLayout, System, WorkerFleet
from plait_bench.images.orders import ImageArray, ImageSpec

OpenFleet = Callable[[System, ProcessLayout], WorkerFleet]

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


class OnFleets(Workload):
    """One list of items, on the worker processes of the systems.

    `takes_turns`: a system's processes do not fit into memory beside another's, and are started and warmed up anew
    whenever it is used. `check` compares the systems' images.
    """

    metrics: Mapping[str, str] = {DECIDING: "images/s", **_PEAK}
    compared = frozenset({DECIDING})
    deciding = DECIDING

    def __init__(
        self,
        items: ItemList,
        systems: Sequence[System],
        check: PixelCheck,
        *,
        cores: int,
        takes_turns: bool = False,
        prepare: Callable[[Say], None] = lambda _: None,
        open_fleet: OpenFleet = WorkerFleet,
    ) -> None:
        self._items, self._check, self._write = items, check, prepare
        self._known = {each.name: each.given(items.settings) for each in systems}
        self.name, self.systems = items.name, tuple(self._known)
        self._cores, self._takes_turns, self._open_fleet = cores, takes_turns and len(self.systems) > 1, open_fleet
        self._fleets: list[WorkerFleet] = []
        self._alone: dict[str, Callable[[], AbstractContextManager[WorkerFleet]]] = {}

    def prepare(self, say: Say) -> None:
        """Write the models that are missing."""
        self._write(say)
        self._say = say

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the system's layouts."""
        return list(self._offered(system))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Start the system's processes in a layout, or have them started for each use."""
        start, every = partial(self._started, system, self._offered(system)[layout]), len(self._items.items)
        with nullcontext() if self._takes_turns else start() as fleet:
            self._alone[system] = start if fleet is None else partial(self._resumed, fleet)
            yield Subject(
                lambda _: self._measured(system, every),
                trial=lambda _: self._measured(system, self._items.trial_items or every),
            )

    def settle(self, subjects: Mapping[str, Subject]) -> None:
        """Have each system run all items again and again, for as long as the workload says."""
        for system in subjects:
            with self._alone[system]() as fleet:
                until_s = time.monotonic() + self._items.settle_s
                while time.monotonic() < until_s:
                    self._run(fleet, self._items.items)

    def check(self, subjects: Mapping[str, Subject]) -> None:
        """Compare the systems' images. Raises `Disagreement`."""
        made = {}
        for system in subjects:
            with self._alone[system]() as fleet:
                made[system] = self._run(fleet, self._items.items, keep=True)[1]
        self._check(self._items, made)

    def _measured(self, system: str, count: int) -> list[Reading]:
        """Run the first items."""
        with self._alone[system]() as fleet:
            taken_s, _ = self._run(fleet, self._items.items[:count])
            return readings({DECIDING: count / taken_s, **_peak_gib(fleet)})

    def _run(
        self, fleet: WorkerFleet, items: Sequence[ImageSpec], *, keep: bool = False
    ) -> tuple[float, list[ImageArray]]:
        return fleet.run(items, one_by_one=self._items.one_by_one, keep=keep)

    def _offered(self, name: str) -> dict[str, ProcessLayout]:
        """Return a system's layouts by name."""
        system = self._known[name]
        if system.is_own_layout:
            return {str(OWN_LAYOUT): OWN_LAYOUT}
        plain = self._items.layouts(self._cores)
        found = [replace(layout, variant=variant) for layout in plain for variant in system.variants(self._items)]
        return {str(layout): layout for layout in found}

    @contextmanager
    def _started(self, system: str, layout: ProcessLayout) -> Iterator[WorkerFleet]:
        """Run a system's processes, warmed up; the others are paused meanwhile. Raises `SystemUnavailable`."""
        for other in self._fleets:
            other.pause()
        self._say(f"starting {system} in {layout.processes} process(es)")
        fleet = self._open_fleet(self._known[system], layout)
        self._fleets.append(fleet)
        try:
            self._run(fleet, self._items.warm_up)
            yield fleet
        finally:
            self._fleets.remove(fleet)
            fleet.close()

    @contextmanager
    def _resumed(self, fleet: WorkerFleet) -> Iterator[WorkerFleet]:
        """Let a system's processes, and no others, run on."""
        for other in self._fleets:
            if other is not fleet:
                other.pause()
        fleet.resume()
        yield fleet


def _peak_gib(fleet: WorkerFleet) -> dict[str, float]:
    return {"peak_memory_gib": fleet.peak_bytes() / 2**30}


class StartWorkload(Workload):
    """Seconds from a system's start until its first image, and its memory then.

    A round starts each system twice in a cache folder of its own: the first time it is empty (a conversion, a
    compilation), the second time, which counts, it is what the first start left. Model files are in the page cache.
    """

    metrics: Mapping[str, str] = {"first_image_s": "s", **_PEAK}

    def __init__(
        self,
        name: str,
        systems: Sequence[System],
        item: ImageSpec,
        *,
        prepare: Callable[[Say], None] = lambda _: None,
        open_fleet: OpenFleet = WorkerFleet,
    ) -> None:
        self.name = name
        self._known = {system.name: system for system in systems}
        self.systems = tuple(self._known)
        self._item, self._prepare, self._open_fleet = item, prepare, open_fleet

    def prepare(self, say: Say) -> None:
        """Write the models that are missing."""
        self._prepare(say)

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
        fleet = self._open_fleet(system.given({"cache": cache}), ProcessLayout(processes=1, threads=cores()))
        try:
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
