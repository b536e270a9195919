"""A ranking model cut in two, the CN in this process and the HN in another, under a closed loop of callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from plait_autoconfig.knobs import ChoiceKnob
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, TrialOutcome
from plait_bench.cells.values import CellSubject, CellWorkload, outcome_of
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.systems.ours import start_dense
from plait_disagg.models.configs import ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import Package, open_package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.ranker import CoreRanker

__all__ = ["RankWorkload"]

SPACE = Space(
    (
        ChoiceKnob(name="cn_threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="hn_threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="largest_batch_rows", values=(64, 256, 4096), ordered=True, unit="candidates"),
        ChoiceKnob(name="window", values=(1, 4), ordered=True, unit="batches"),
        ChoiceKnob(name="wire", values=("float32", "float16")),
        ChoiceKnob(name="cns", values=(1,), unit="replicas"),
    )
)
"""The space of 48 cells. There is only one CN; their number is a knob because other services have more."""

SETS = {
    "cn_threads": "cn.threads", "hn_threads": "hn.threads", "largest_batch_rows": "cn.largest_batch_rows",
    "window": "cn.window", "wire": "cn.wire", "cns": "cn.replicas",
}  # fmt: skip
"""What its knobs set in a served model."""

_WARM_UP = 16
_RESERVED_CORES = 0.5
"""What Ray reserves for an ingress, a CN and an HN, whatever their threads: what a job pays for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorkload(CellWorkload):
    """`requests` of `candidates` each by `callers`, for a named configuration with `scale` of its rows."""

    model: str
    scale: float
    candidates: int
    callers: int
    requests: int

    @contextmanager
    def open(self) -> Iterator[CellSubject]:
        """Open the package with one CN for each number of HN threads; close them at the end."""
        package = open_package(packaged(self.model, self.scale, say=lambda _: None))
        subject = _RankSubject(self, package)
        try:
            yield subject
        finally:
            subject.close()


class _RankSubject:
    """One CN for each number of HN threads, which is fixed when an HN starts; only one works at a time."""

    def __init__(self, workload: RankWorkload, package: Package) -> None:
        self._workload = workload
        self._package = package
        self._cores = {
            threads: CnCore(package.card(), package.sparse(), start_dense(package, threads)) for threads in (1, 2)
        }
        self._made: tuple[int, list[RankRequest]] = -1, []

    def measure(self, config: Config, *, seed: int) -> TrialOutcome:
        """Apply the knobs, warm up, and measure one closed loop."""
        given: dict[str, Any] = dict(config)
        cn_threads, hn_threads = given.pop("cn_threads"), given.pop("hn_threads")
        assert given.pop("cns") == 1
        core = self._cores[hn_threads]
        core.reconfigure(WorkerKnobs(threads=cn_threads, **given))
        requests = self._requests(seed)
        _run(core, requests[:_WARM_UP], self._workload.callers)
        started_s = time.monotonic()
        latencies_ms = _run(core, requests, self._workload.callers)
        wall_s = time.monotonic() - started_s
        return outcome_of(latencies_ms, wall_s, slo_ms=self._workload.slo_ms, cores=_RESERVED_CORES)

    def close(self) -> None:
        for core in self._cores.values():
            core.stop(drain_s=0.0)

    def _requests(self, seed: int) -> list[RankRequest]:
        """Make the requests of a round once: making them takes as long as ranking them."""
        if seed != self._made[0]:
            self._made = seed, self._make(seed)
        return self._made[1]

    def _make(self, seed: int) -> list[RankRequest]:
        manifest, workload = self._package.manifest, self._workload
        return [
            random_request(
                manifest.inputs, manifest.bounds, model="model", candidates=workload.candidates,
                ids_per_bag=ids_per_bag(workload.model), seed=10_000 * seed + i,
            )
            for i in range(workload.requests)
        ]  # fmt: skip


def _run(core: CnCore, requests: Sequence[RankRequest], callers: int) -> list[float]:
    """Run the closed loop: each caller sends its next request once it has an answer. Returns latencies in
    milliseconds."""
    ranker, left, latencies_ms = CoreRanker(core), list(reversed(requests)), list[float]()

    async def call() -> None:
        while left:
            request = left.pop()
            asked_s = time.monotonic()
            await ranker.rank(request)
            latencies_ms.append((time.monotonic() - asked_s) * 1e3)

    async def all_of_them() -> None:
        await asyncio.gather(*(call() for _ in range(callers)))

    asyncio.run(all_of_them())
    return latencies_ms
