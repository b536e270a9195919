"""The definition of a benchmark over worker processes. Contracts only.

An item is one unit of work as a JSON object; only the benchmark and its systems know its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from plait_bench.benchmark import Metric, ResultRow

Json: TypeAlias = Any
"""What `json` can write and read back unchanged."""

Item: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """`processes` workers with `threads` compute threads each (0: it is the system's own choice); `variant` is one of
    the choices that the system offers."""

    processes: int
    threads: int
    variant: str = ""

    def __str__(self) -> str:
        if not self.threads:
            return self.variant
        return f"{self.processes}x{self.threads}" + (f" {self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The resident memory of all processes of a system together: now, and the sum of each one's peak."""

    now_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemList:
    """A workload: `items` in arrival order, all at once, or `one_by_one` (the next when the last is done).

    `warm_up` are shorter items that touch everything that `items` touch. `systems`: those that take part; None: all.
    `settings`: what the factories of its systems are called with beside their own. `trial_items`: how many items a
    trial of a layout runs; 0: all. `layouts`: chooses from the layouts that the machine offers. `settle_s`: how long
    each system runs the items, uncounted, before the rounds: some adapt to their load.
    """

    name: str
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]
    one_by_one: bool
    systems: frozenset[str] | None = None
    settings: Mapping[str, Json] = field(default_factory=dict)
    trial_items: int = 0
    settle_s: float = 0.0
    layouts: Callable[[Sequence[ProcessLayout]], Sequence[ProcessLayout]] = tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the systems compared. `factory` is `module:function`; it is called with `settings` in each worker.

    `share(items, n)` divides the items' indices into n lists, one for each process, in the order of execution.
    `variants`: choices other than threads and processes (a memory format, a batch size) that make a difference to a
    workload; the best is selected. `is_own_layout`: it divides the machine itself, and has no layouts.
    `interpreter`: returns the Python of its own environment, and may take minutes to make one; raises
    `SystemUnavailable`.
    """

    name: str
    factory: str
    settings: Mapping[str, Json]
    share: Callable[[Sequence[Item], int], list[list[int]]]
    variants: Callable[[ItemList], tuple[str, ...]] = lambda _: ("",)
    is_own_layout: bool = False
    interpreter: Callable[[], Path] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutcome:
    """An item's end: `finished_s` on CLOCK_MONOTONIC, which all processes of a machine share; `result` if kept."""

    finished_s: float
    result: Json = None


class FleetWorker(Protocol):
    """A system inside a worker process."""

    def configure(self, *, threads: int, variant: str) -> None:
        """Apply one process's part of a layout."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Run all items and return their outcomes in item order. `keep`: return results too."""

    def close(self) -> None:
        """Stop the threads. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """One run of a workload: seconds until the last item was done, latencies and (if kept) results in item order."""

    wall_s: float
    latencies_s: tuple[float, ...]
    results: tuple[Json, ...] = ()


@runtime_checkable
class Settles(Protocol):
    """A `FleetWorker` that needs a moment after it was stopped and continued: its processes watch each other."""

    def settle(self) -> None:
        """Wait until it is as before."""


class Fleet(Protocol):
    """A system's worker processes. `ready_s`: how long they took to start."""

    ready_s: float

    def configure(self, layout: ProcessLayout) -> None:
        """Set the layout of the next runs, with at most as many processes as the fleet has."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> RunSample:
        """Run the items in the configured layout. Raises `SystemFailed`."""

    def memory(self) -> MemoryUse:
        """Return the memory of the processes that the layout uses, and of their children."""

    def pause(self) -> None:
        """Take no processor time until `resume`. Idempotent."""

    def resume(self) -> None:
        """Undo `pause`, and wait until all is as before. Idempotent. Raises `SystemFailed`."""

    def close(self) -> None:
        """Stop the processes. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDefinition:
    """A benchmark over worker processes. `ours` is the system whose ratios to the others are taken.

    `measures`: computes the metrics of one run, which are `metrics`; the first of them selects layouts. `check` gets
    each system's results for one workload and returns rows about their agreement, or raises `Disagreement`.
    `max_open`: how many systems the machine can hold at the same time; 0: all. Beyond that, the one that was used
    longest ago is closed, and opened and warmed up again for its next round.
    """

    name: str
    ours: str
    systems: tuple[System, ...]
    workloads: tuple[ItemList, ...]
    metrics: Mapping[str, Metric]
    measures: Callable[[ItemList, RunSample], Mapping[str, float]]
    check: Callable[[ItemList, Mapping[str, Sequence[Json]]], list[ResultRow]]
    max_open: int = 0
