"""The services whose cells are measured: the diffusion engine in this process, built as the server builds it, and a
ranking model cut in two, the CN in this process and the HN in another. Both under a closed loop of callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from plait_autoconfig.values import Config, TrialOutcome
from plait_bench.autoconfig.services import MeasureCell, outcome_of
from plait_bench.disagg.goodput import packaged, requests_of
from plait_bench.disagg.ours import start_child
from plait_bench.images.orders import (
    CONTROLNETS,
    LORA_SETS,
    PROMPTS,
    SCHEDULERS,
    SIZES,
    ImageSpec,
    ModelFolder,
)
from plait_bench.images.ours import InProcessEngine
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.ranker import CoreRanker
from plait_serving.diffusion.knobs import EngineKnobs, Exact, Placement
from plait_serving.images.config import STARTER_FOLDER

_PREPARED_S = 180.0
_WARM_UP = 16
_RESERVED_CORES = 0.5
"""What Ray reserves for an ingress, a CN and an HN, whatever their threads: what a job pays for."""


@contextmanager
def engine_cells(
    *, callers: int, images: int, steps: int, slo_ms: float, loras: int, controlled: int
) -> Iterator[MeasureCell]:
    """Build the engine over the starter models, and wait until it runs on what it converts behind its first images;
    stop it at the end.

    `callers` ask for `images` in all, the same for every configuration; their steps vary around the mean, as users' do.
    `loras`: LoRA sets in the mix (0: none); `controlled`: the share of images with a ControlNet, in quarters.
    """

    def orders(seed: int) -> list[ImageSpec]:
        return [
            ImageSpec(
                prompt=PROMPTS[i % len(PROMPTS)],
                seed=1000 * seed + i,
                steps=steps + (-1, 0, 1, 0)[i % 4],
                scheduler=SCHEDULERS[i % len(SCHEDULERS)],
                loras=LORA_SETS[i % loras] if loras else (),
                control=(CONTROLNETS[i % 2], i) if i % 4 < controlled else None,
            )
            for i in range(images)
        ]

    models = ModelFolder.of(STARTER_FOLDER, SIZES["starter"], orders(0))
    worker = InProcessEngine({"models": models, "dtype": "float32", "device": "cpu"})
    engine, compiled = worker.engine, [0]

    def asked(orders: Sequence[ImageSpec]) -> list[float]:
        """Run the closed loop: each caller asks for its next image once it has one. Returns latencies in
        milliseconds."""

        def one(order: ImageSpec) -> float:
            began_s = time.monotonic()
            worker.image(order)
            return (time.monotonic() - began_s) * 1e3

        with ThreadPoolExecutor(callers) as pool:
            return list(pool.map(one, orders))

    def measured(config: Config, seed: int) -> TrialOutcome:
        """Paid is the processor time that this process used. The first images warm up: a change of knobs may start
        threads, merge LoRAs anew, or compile for new shapes."""
        given: dict[str, Any] = dict(config)
        placement = Placement(given.pop("placement"))
        engine.reconfigure(EngineKnobs(controlnet_placement=placement, **{**given, "exact": Exact(given["exact"])}))
        if given["threads"] != compiled[0]:
            compiled[0] = given["threads"]
            asked(orders(0))
        asked(orders(seed)[:callers])
        started_s, used_s = time.monotonic(), time.process_time()
        latencies_ms = asked(orders(seed))
        wall_s, used_s = time.monotonic() - started_s, time.process_time() - used_s
        return outcome_of(latencies_ms, wall_s, slo_ms=slo_ms, cores=used_s / wall_s)

    try:
        asked(orders(0))
        until_s = time.monotonic() + _PREPARED_S
        while not engine.pool.prepared >= {"unet", "vae"} and time.monotonic() < until_s:
            time.sleep(0.5)
        asked(orders(0))
        yield measured
    finally:
        worker.close()


@contextmanager
def rank_cells(*, model: str, candidates: int, callers: int, requests: int, slo_ms: float) -> Iterator[MeasureCell]:
    """Open the package of a named configuration, with one CN for each number of HN threads, which is fixed when an HN
    starts; only one works at a time. Close them at the end.

    `requests` of `candidates` each by `callers`.
    """
    package = packaged(model, say=lambda _: None)
    cores = {
        threads: CnCore(package.card(), package.sparse(), start_child(package, threads, "hn")) for threads in (1, 2)
    }

    @lru_cache(maxsize=1)  # making the requests of a round takes as long as ranking them
    def made(seed: int) -> list[RankRequest]:
        return requests_of(package, model, candidates=candidates, count=requests, first_seed=10_000 * seed)

    def measured(config: Config, seed: int) -> TrialOutcome:
        given: dict[str, Any] = dict(config)
        threads, hn_threads = given.pop("cn_threads"), given.pop("hn_threads")
        assert given.pop("cns") == 1
        core = cores[hn_threads]
        core.reconfigure(WorkerKnobs(threads=threads, **given))
        _ask_ranker(core, made(seed)[:_WARM_UP], callers)
        started_s = time.monotonic()
        latencies_ms = _ask_ranker(core, made(seed), callers)
        return outcome_of(
            latencies_ms, time.monotonic() - started_s, slo_ms=slo_ms, cores=_RESERVED_CORES
        )  # fmt: skip

    try:
        yield measured
    finally:
        for core in cores.values():
            core.stop(drain_s=0.0)


def _ask_ranker(core: CnCore, requests: Sequence[RankRequest], callers: int) -> list[float]:
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
