"""What a benchmark defines; everything else is the runner's. Contracts only.

An item is one unit of work as a JSON object; only the benchmark and its systems know what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

from plait_bench.summary import summarise

Json: TypeAlias = Any
"""What ``json`` can write and read back unchanged."""

Item: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``items`` in arrival order: all at once, or ``one_by_one`` (the next when the last is done).

    ``warm_up`` are items that touch all that ``items`` touch, only shorter. ``systems``: who takes part; None: all.
    """

    name: str
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]
    one_by_one: bool
    systems: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """``processes`` workers with ``threads`` compute threads each; ``variant`` is a choice that the system offers."""

    processes: int
    threads: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.processes}x{self.threads}" + (f" {self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the things compared. ``factory`` is ``module:function``; it is called with ``settings`` in each worker.

    ``share(items, n)`` cuts the items' indices into n lists, one for each process, in the order they are to be run.
    ``variants``: other choices than threads and processes (a memory format, a batch size) that make a difference to a
    workload; the best is found.
    """

    name: str
    factory: str
    settings: Mapping[str, Json]
    share: Callable[[Sequence[Item], int], list[list[int]]]
    variants: Callable[[Workload], tuple[str, ...]] = lambda _: ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutcome:
    """An item's end: ``finished_s`` on CLOCK_MONOTONIC, which all processes of a machine share; ``result`` if kept."""

    finished_s: float
    result: Json = None


class Subject(Protocol):
    """A system inside a worker process."""

    def configure(self, *, threads: int, variant: str) -> None:
        """Applies a layout's share of one process."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Does all items; outcomes in item order. ``keep`` asks for results."""

    def close(self) -> None:
        """Releases threads. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """One run of a workload: seconds until the last item was done, latencies and (if kept) results in item order."""

    wall_s: float
    latencies_s: tuple[float, ...]
    results: tuple[Json, ...] = ()


class Fleet(Protocol):
    """A system's worker processes."""

    def configure(self, layout: ProcessLayout) -> None:
        """What the next runs use; at most as many processes as the fleet has."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> RunSample:
        """Runs the items in the configured layout. Raises `SystemFailed`."""

    def close(self) -> None:
        """Stops the processes. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One metric's value in one round."""

    unit: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A line of the document: median, 20th and 80th percentile over ``n`` rounds."""

    system: str
    workload: str
    metric: str
    unit: str
    value: float
    p20: float
    p80: float
    n: int
    layout: str = ""
    kind: str = "measured"

    @classmethod
    def of(
        cls, values: Sequence[float], *, system: str, workload: str, metric: str, unit: str, layout: str = "",
        kind: str = "measured",
    ) -> Self:  # fmt: skip
        """Of one value per round."""
        summary = summarise(values)
        return cls(
            system=system, workload=workload, metric=metric, unit=unit, value=summary.value, p20=summary.p20,
            p80=summary.p80, n=summary.n, layout=layout, kind=kind,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """``ours`` is the system whose ratios to the others are taken; it must be available.

    ``check`` gets each system's results for one workload and returns rows about their agreement, or raises
    `Disagreement`.
    """

    name: str
    ours: str
    systems: tuple[System, ...]
    workloads: tuple[Workload, ...]
    measures: Callable[[Workload, RunSample], Mapping[str, MetricValue]]
    check: Callable[[Workload, Mapping[str, Sequence[Json]]], list[ResultRow]]
