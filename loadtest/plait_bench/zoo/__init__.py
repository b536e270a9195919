"""Models of other libraries, as their users have them: does the cutter take them, and how much crosses?

The libraries are installed beside nothing else, without their dependencies, in a folder of the cache; torch and numpy
stay those of this environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from plait_bench.benchmark import Benchmark, Metric, Reading, Say, Subject, Workload, chosen
from plait_bench.cache import cache_folder
from plait_bench.zoo import libraries

__all__ = ["NAME", "benchmark"]

NAME = "zoo"


class Zoo(Workload):
    """For each variant: bytes that cross for 100 candidates and those of a cut made by hand, seconds to package it, and
    the max difference of a score; `refused` is 1 for those that are not taken."""

    name = "zoo"
    systems = ("plait",)
    rounds: ClassVar[Mapping[str, int]] = {"plait": 1}
    metrics: Mapping[str, Metric] = {
        "crossing_bytes": Metric(unit="bytes", better="lower"),
        "by_hand_bytes": Metric(unit="bytes"),
        "package_s": Metric(unit="s", better="lower"),
        "millionths": Metric(unit="1e-6 of a score", better="lower"),
        "refused": Metric(unit="models", better="lower"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Install the libraries, unless they are there."""
        self.folder, self.say = cache_folder() / "zoo-2", say
        libraries.install(self.folder, say)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the cutter."""
        yield _Judging(self)


@dataclass(frozen=True)
class _Judging:
    """Implements `Subject`."""

    workload: Zoo

    def warm_up(self) -> None:
        """Do nothing: bytes are the same when cold."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Package and compare all variants."""
        return [reading for found in libraries.judge(self.workload.folder) for reading in self._readings(found)]

    def _readings(self, found: Mapping[str, Any]) -> list[Reading]:
        if "refused" in found:
            self.workload.say(f"{found['variant']}: {found['refused']}")
        values = {name: float(found[name]) for name in self.workload.metrics if name != "refused" and name in found}
        values["refused"] = float("refused" in found)
        return [Reading(workload=found["variant"], metric=name, value=value) for name, value in values.items()]


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark. Raises `BenchError` for an unknown workload."""
    chosen(only, (Zoo.name,), "workload")
    return Benchmark(name=NAME, workloads=(Zoo(),))
