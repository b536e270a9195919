"""Many base models on few replicas: the public trace of an image service in virtual time, and a few models measured.

`sd15-switches` is measured: four models of real size in one engine that has memory for two. `plait` gets all requests
at once and orders them itself; `fifo` is the same engine asked for one request after another, as a server works that
loads what the next request wants.

All others are modelled: a round is a window of the trace (alibaba/clusterdata, cluster-trace-v2026-GenAI), and both
systems play the same one with equal memory, `plait` by the server's own policies (a request goes where it begins
first, `models/switching.py` switches), `lru` as servers do that load what the next request wants: the shortest queue,
first come first served, and the model that was used least lately makes room. A replica runs a request to its end; a
load runs beside it. Time is in steps of one image, and a workload's name says how many of them a load takes: few where
steps are slow, as on a CPU (`load8`), many where they are fast and files come from a disk (`load100`). Both numbers are
assumptions. A request is good if it ends within five times its own work and two loads.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from plait_bench.benchmark import Reading, Say, Workload, cache_folder, published, readings, selected
from plait_bench.commands import write_random_model
from plait_serving.diffusion.models.switching import ModelDemand, Switch, next_switch
from plait_serving.images.routing import ReplicaState, begins_in_s

if TYPE_CHECKING:
    from plait_serving.diffusion.engine import Engine

_COUNT = 1000
_BUSY = 0.4
"""The share of the time that the work takes: the trace's own peaks are two to three times its mean."""
_PATIENCE = 5.0
FILE = "genai-v2026/lora_request_trace.csv.gz"
_USUAL_STEPS = 30.0
"""For the few rows without a number: what nine of ten requests ask for."""

_MODELS, _ROOM = 4, 2
_REQUESTS, _STEPS = 8, 2
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request: when it came, and its work in steps of one image."""

    at: float
    model: str
    work: float


def read_trace(data: Path | None) -> list[TracedRequest]:
    """Return the requests in the order of their arrival. Raises `SystemUnavailable` without the file."""
    with gzip.open(published(data, FILE), "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["predict_status"] == "SUCCEED"]
    requests = [
        TracedRequest(
            at=datetime.fromisoformat(row["gmt_create"]).timestamp(),
            model=row["checkpoint_model_version_id"],
            work=float(row["num_images_per_prompt"] or 1.0) * float(row["num_inference_steps"] or _USUAL_STEPS),
        )
        for row in rows
    ]
    return sorted(requests, key=lambda asked: asked.at)


def window(
    trace: Sequence[TracedRequest], number: int, *, count: int, replicas: int, busy: float
) -> list[TracedRequest]:
    """Return `count` requests, of which `number` says where they begin, stretched until their work takes a share `busy`
    of the time of all replicas: the trace's times were scaled by who published it. Time is in steps of one image."""
    first = (number - 1) * count % max(1, len(trace) - count)
    part = trace[first : first + count]
    span = max(part[-1].at - part[0].at, 1.0)
    scale = sum(asked.work for asked in part) / (busy * replicas * span)
    return [TracedRequest(at=(asked.at - part[0].at) * scale, model=asked.model, work=asked.work) for asked in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFleet:
    """`room`: the models that each replica has memory for; `load`: what loading one takes."""

    replicas: int
    room: int
    load: float


FLEETS: Mapping[str, ModelFleet] = {
    f"load{load}-{replicas}x2": ModelFleet(replicas=replicas, room=2, load=load)
    for load in (8, 100)
    for replicas in (1, 4)
}
"""Workloads by name: what a load takes, the replicas, and the models that each has memory for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedWindow:
    """The latency of each request with its work, the loads of all replicas, and when the last request ended."""

    latencies: tuple[tuple[float, float], ...]
    loads: int
    ended: float


@dataclass(slots=True)
class _Lru:
    """A replica that loads what its oldest request wants. `latencies` are those of the requests that ended."""

    fleet: ModelFleet
    now: float = 0.0
    waiting: list[TracedRequest] = field(default_factory=list)
    running: tuple[TracedRequest, float] | None = None
    loading: tuple[str, float] | None = None  # beside what runs
    resident: dict[str, float] = field(default_factory=dict)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    loads: int = 0

    @property
    def queued(self) -> float:
        """The work that waits or runs."""
        left = 0.0 if self.running is None else self.running[1] - self.now
        return left + sum(asked.work for asked in self.waiting)

    def begins(self, model: str) -> float:
        """Return when a request for a model would begin, as far as this kind of replica looks."""
        return self.queued

    def run_until(self, until: float) -> None:
        """Play what happens before a time."""
        while (event := self.next_event()) <= until:
            self.now = event
            self.take()
        self.now = max(self.now, until)

    def next_event(self) -> float:
        """Return when a request or a load ends next."""
        ends = [event[1] for event in (self.running, self.loading) if event is not None]
        return min(ends, default=float("inf"))

    def take(self) -> None:
        """Take in what has ended; run the oldest request, and load its model first if it is not here."""
        self._end()
        if self.running is not None or not self.waiting:
            return
        asked, taken = self.waiting.pop(0), 0.0
        if asked.model not in self.resident:
            if len(self.resident) >= self.fleet.room:
                del self.resident[min(self.resident, key=lambda model: self.resident[model])]
            taken, self.loads = self.fleet.load, self.loads + 1
        self.resident[asked.model] = self.now
        self.running = asked, self.now + taken + asked.work

    def _end(self) -> None:
        if self.running is not None and self.running[1] <= self.now:
            asked = self.running[0]
            self.latencies.append((self.now - asked.at, asked.work))
            self.resident[asked.model] = self.now
            self.running = None


@dataclass(slots=True)
class _Plait(_Lru):
    """A replica that switches models by the server's policy."""

    switch: Switch | None = None
    overtaken: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def begins(self, model: str) -> float:
        """Return when a request would begin, as the ingress reckons."""
        wanted = {asked.model for asked in self.waiting}
        state = ReplicaState(
            queued_s=self.queued + self.fleet.load * len(wanted - self.resident.keys()),
            models=frozenset(wanted | self.resident.keys()),
            load_s={model: self.fleet.load},
        )
        return begins_in_s(state, model, ())

    def take(self) -> None:
        """Switch if that is due, and run the oldest request whose model is here."""
        self._end()
        if self.loading is not None and self.loading[1] <= self.now:
            self.resident[self.loading[0]] = self.now
            self.overtaken.pop(self.loading[0], None)
            self.loading = self.switch = None
        if self.switch is None:
            self.switch = next_switch(self._demands(), budget_bytes=self.fleet.room, now_s=self.now)
        leaves = self.switch.leave if self.switch is not None else ()
        is_busy = self.running is not None and self.running[0].model in leaves  # it ends before its model leaves
        if self.switch is not None and self.loading is None and not is_busy:
            for name in leaves:
                self.resident.pop(name, None)
            self.loading, self.loads = (self.switch.load, self.now + self.fleet.load), self.loads + 1
        runnable = [asked for asked in self.waiting if asked.model in self.resident and asked.model not in leaves]
        if self.running is None and runnable:
            asked = runnable[0]
            self.waiting.remove(asked)
            self.running = asked, self.now + asked.work
            earlier = {other.model for other in self.waiting if other.at < asked.at}
            for name in earlier - self.resident.keys():
                self.overtaken[name] += asked.work

    def _demands(self) -> list[ModelDemand]:
        jobs = [*([] if self.running is None else [self.running[0]]), *self.waiting]
        oldest = {asked.model: asked.at for asked in reversed(jobs)}
        return [
            ModelDemand(
                name=name,
                nbytes=1,
                load_s=self.fleet.load,
                is_resident=name in self.resident,
                oldest_s=oldest.get(name),
                overtaken_s=self.overtaken[name],
                used_s=self.resident.get(name, 0.0),
            )
            for name in sorted(oldest.keys() | self.resident.keys())
        ]


def replay(system: str, asked: Sequence[TracedRequest], fleet: ModelFleet) -> PlayedWindow:
    """Play a window with a system, `plait` or `lru`."""
    replicas = [_Plait(fleet) if system == "plait" else _Lru(fleet) for _ in range(fleet.replicas)]
    for one in asked:
        for replica in replicas:
            replica.run_until(one.at)
        best = min(replicas, key=lambda replica: replica.begins(one.model))
        best.waiting.append(one)
        best.take()
    for replica in replicas:
        while replica.running is not None or replica.waiting:
            replica.run_until(replica.next_event())
    return PlayedWindow(
        latencies=tuple(latency for replica in replicas for latency in replica.latencies),
        loads=sum(replica.loads for replica in replicas),
        ended=max(replica.now for replica in replicas),
    )


class Replayed(Workload):
    """One fleet."""

    systems = ("plait", "lru")
    metrics: Mapping[str, str] = {"p99_steps": "steps", "goodput_per_1000_steps": "requests", "loads": "loads"}

    def __init__(self, name: str, fleet: ModelFleet, data: Path | None) -> None:
        self.name, self._fleet, self._data = name, fleet, data
        self._trace: Sequence[TracedRequest] = ()

    def prepare(self, say: Say) -> None:
        """Read the trace. Raises `SystemUnavailable` without it."""
        self._trace = read_trace(self._data)

    def take(self, system: str, number: int) -> list[Reading]:
        """Play the window of that number on a fresh fleet, and summarise it."""
        fleet = self._fleet
        asked = window(self._trace, number, count=_COUNT, replicas=fleet.replicas, busy=_BUSY)
        outcome = replay(system, asked, fleet)
        latencies = sorted(latency for latency, _ in outcome.latencies)
        good = sum(latency <= _PATIENCE * work + 2 * fleet.load for latency, work in outcome.latencies)
        values = {
            "p99_steps": latencies[int(0.99 * len(latencies))],
            "goodput_per_1000_steps": 1000.0 * good / outcome.ended,
            "loads": outcome.loads,
        }
        return readings(values, kind="modelled")


class Switching(Workload):
    """Random models of an architecture, written once into `root`; images of `edge` pixels."""

    systems = ("plait", "fifo")
    metrics: Mapping[str, str] = {"images_per_s": "images/s", "loads": "loads"}

    def __init__(self, name: str, root: Path, *, family: str, edge: int) -> None:
        self.name, self._root, self._family, self._edge = name, root, family, edge

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Write the models that are missing, and open the engine that both systems use. Raises `BenchError`."""
        folders = {f"model{seed}": self._root / f"{self._family}-{seed}" for seed in range(_MODELS)}
        for seed, folder in enumerate(folders.values()):
            if not (folder / "model_index.json").is_file():
                say(f"writing {folder} (once)")
                write_random_model(folder, self._family, "--seed", str(seed))
        self._engine = _opened(folders)
        try:
            yield
        finally:
            self._engine.stop(drain_s=0.0)

    def take(self, system: str, number: int) -> list[Reading]:
        """Make the images of a round."""
        from plait_serving.diffusion.values import ImageRequest, Scheduler

        engine, names = self._engine, list(self._engine.pool.models)
        requests = [
            ImageRequest(
                request_id=f"{number}-{i}", prompt="a photo", width=self._edge, height=self._edge, steps=_STEPS,
                guidance_scale=5.0, seed=1000 * number + i, scheduler=Scheduler.EULER, model=names[i % len(names)],
            )
            for i in range(_REQUESTS)
        ]  # fmt: skip
        before, started_s = engine.pool.statistics().loads, time.perf_counter()
        with ThreadPoolExecutor(len(requests) if system == "plait" else 1) as callers:
            list(callers.map(lambda request: engine.generate(request, timeout_s=_TIMEOUT_S), requests))
        per_s = len(requests) / (time.perf_counter() - started_s)
        return readings({"images_per_s": per_s, "loads": engine.pool.statistics().loads - before})


def _opened(folders: Mapping[str, Path]) -> Engine:
    """Open the engine with room for some of the models; torch runs them, so that nothing is converted beside."""
    import torch

    from plait_serving.diffusion.assemble import EngineSettings, build_engine_of
    from plait_serving.diffusion.knobs import ExecutorName
    from plait_serving.diffusion.memory import memory_of
    from plait_serving.diffusion.weight_files import find_weights

    settings = {
        name: EngineSettings(model=folder, dtype="float32", device="cpu", executor=ExecutorName.TORCH, converts=False)
        for name, folder in folders.items()
    }
    parts = (next(iter(folders.values())) / part for part in ("unet", "vae", "text_encoder"))
    one = sum(find_weights(part).nbytes_as(torch.float32) for part in parts)
    process = memory_of(torch.device("cpu"), excluded=lambda: 0).held_bytes()
    return build_engine_of(settings, memory_bytes=process + int((_ROOM + 0.5) * one))


def benchmark(
    *, only: Sequence[str] = (), models: Path | None = None, data: Path | None = None
) -> tuple[Workload, ...]:
    """Make the benchmark; `models`: where they are, or are written; `data`: the folder that holds `genai-v2026`. Raises
    `BenchError`."""
    switching = Switching("sd15-switches", models or cache_folder() / "models", family="sd15", edge=256)
    return selected([*(Replayed(name, fleet, data) for name, fleet in FLEETS.items()), switching], only)
