"""Many base models on few replicas: the public trace of an image service in virtual time, and a few models measured.

`sd15-switches` is measured (`switching.py`), all others are modelled: a round is a window of the trace, and both
systems play the same one with equal memory. Time is in steps of one image, and a workload's name says how many of them
a load takes: few where steps are slow, as on a CPU (`load8`), many where they are fast and files come from a disk
(`load100`). Both numbers are assumptions; `sd15-switches` measures what a load takes here.
A request is good if it ends within five times its own work and two loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait_bench.benchmark import Benchmark, Metric, Reading, Say, Subject, Workload, chosen
from plait_bench.models.replay import ModelFleet, replay
from plait_bench.models.switching import Switching
from plait_bench.models.trace import TracedRequest, read_trace, window

__all__ = ["NAME", "benchmark"]

NAME = "models"
_COUNT = 1000
_BUSY = 0.4
"""The share of the time that the work takes: the trace's own peaks are two to three times its mean."""
_PATIENCE = 5.0

FLEETS: Mapping[str, ModelFleet] = {
    "load8-1x2": ModelFleet(replicas=1, room=2, load=8.0),
    "load8-4x2": ModelFleet(replicas=4, room=2, load=8.0),
    "load100-1x2": ModelFleet(replicas=1, room=2, load=100.0),
    "load100-4x2": ModelFleet(replicas=4, room=2, load=100.0),
}
"""Workloads by name: what a load takes, the replicas, and the models that each has memory for."""


class Replayed(Workload):
    """One fleet."""

    systems = ("plait", "lru")
    ours = "plait"
    pairs = (("plait", "lru"),)
    metrics: Mapping[str, Metric] = {
        "p50_steps": Metric(unit="steps", better="lower"),
        "p99_steps": Metric(unit="steps", better="lower"),
        "goodput_per_1000_steps": Metric(unit="requests", better="higher"),
        "loads": Metric(unit="loads", better="lower"),
    }

    def __init__(self, name: str, fleet: ModelFleet, data: Path | None) -> None:
        self.name, self._fleet, self._data = name, fleet, data
        self.trace: Sequence[TracedRequest] = ()

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Read the trace. Raises `SystemUnavailable` without it."""
        self.trace = read_trace(self._data)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make a subject; each round is a fresh fleet."""
        yield _PlayedSystem(self, system)

    def readings(self, system: str, number: int) -> list[Reading]:
        """Play a window and summarise it."""
        fleet = self._fleet
        asked = window(self.trace, number, count=_COUNT, replicas=fleet.replicas, busy=_BUSY)
        outcome = replay(system, asked, fleet)
        latencies = sorted(latency for latency, _ in outcome.latencies)
        good = sum(latency <= _PATIENCE * work + 2 * fleet.load for latency, work in outcome.latencies)
        values = {
            "p50_steps": latencies[len(latencies) // 2],
            "p99_steps": latencies[int(0.99 * len(latencies))],
            "goodput_per_1000_steps": 1000.0 * good / outcome.ended,
            "loads": float(outcome.loads),
        }
        return [Reading(metric=metric, value=value, kind="modelled") for metric, value in values.items()]


class _PlayedSystem:
    """Implements `Subject`."""

    def __init__(self, workload: Replayed, system: str) -> None:
        self._workload, self._system = workload, system

    def warm_up(self) -> None:
        """Do nothing: a run's own start is part of it."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Play the window of round `number`."""
        return self._workload.readings(self._system, number)


def benchmark(root: Path, *, only: Sequence[str] = (), data: Path | None = None) -> Benchmark:
    """Make the benchmark; `root`: where models are, or are written; `data`: the folder that holds `genai-v2026`. Raises
    `BenchError`."""
    workloads: dict[str, Workload] = {name: Replayed(name, fleet, data) for name, fleet in FLEETS.items()}
    workloads["sd15-switches"] = Switching("sd15-switches", root, family="sd15", edge=256)
    return Benchmark(name=NAME, workloads=tuple(workloads[name] for name in chosen(only, tuple(workloads), "workload")))
