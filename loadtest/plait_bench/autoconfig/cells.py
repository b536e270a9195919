"""Configurations of the diffusion engine and the ranker, measured cell by cell: the data of the tuner's shipped
library, and tables whose optimum is known.

`python -m plait_bench.autoconfig.cells WORKLOAD --out FILE` measures every cell of the workload's space `--times`
times, in rounds, as far as the file (in the library's own format) lacks them: it can be stopped and started again.

The engine is in this process, built as the server builds it; the ranking model is cut in two, the CN in this process
and the HN in another. Both are under a closed loop of callers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import parse_objective
from plait_autoconfig.rows import run_line, trial_line
from plait_autoconfig.space import Space
from plait_autoconfig.store import read_library
from plait_autoconfig.values import Config, Hardware, Trial, TrialOutcome
from plait_bench.autoconfig.services import ENGINE, RANK, MeasureCell, outcome_of
from plait_bench.benchmark import Say, cores
from plait_bench.disagg.goodput import packaged, requests_of
from plait_bench.disagg.ours import start_child
from plait_bench.host import host_facts
from plait_bench.images.orders import CONTROLNETS, LORA_SETS, PROMPTS, SCHEDULERS, SIZES, ImageSpec, ModelFolder
from plait_bench.images.ours import InProcessEngine
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.ranker import CoreRanker
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.images.config import STARTER_FOLDER

OBJECTIVE = parse_objective("max goodput_per_cost")

_SETS: Mapping[str, Mapping[str, str]] = {
    "images": {
        "largest_batch": "engine.largest_batch", "batch_wait_ms": "engine.batch_wait_ms", "threads": "engine.threads",
        "exact": "engine.exact", "placement": "engine.controlnet_placement",
    },
    "recommend": {
        "cn_threads": "cn.threads", "hn_threads": "hn.threads", "largest_batch_rows": "cn.largest_batch_rows",
        "window": "cn.window", "wire": "cn.wire", "cns": "cn.replicas",
    },
}  # fmt: skip
"""What a space's knobs set in a served application."""

_PREPARED_S = 180.0
_WARM_UP = 16
_RESERVED_CORES = 0.5
"""What Ray reserves for an ingress, a CN and an HN, whatever their threads: what a job pays for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellWorkload:
    """A service and its load, which `features` describe (`LibraryRun`). `opened`: opens the service, warm."""

    name: str
    service: str
    space: Space
    features: Mapping[str, float]
    opened: Callable[[], AbstractContextManager[MeasureCell]]

    def in_order(self, repeat: int) -> list[Config]:
        """Return the cells in an order that is random, but the same for everyone; threads, whose change compiles anew,
        change once."""
        cells = list(self.space.cells())
        random.Random(f"{self.name} {repeat}").shuffle(cells)
        return sorted(cells, key=lambda cell: cell["threads"]) if "threads" in self.space.by_name else cells


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
        engine.reconfigure(EngineKnobs(controlnet_placement=given.pop("placement"), **given))
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
        return outcome_of(latencies_ms, time.monotonic() - started_s, slo_ms=slo_ms, cores=_RESERVED_CORES)

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


def _images(name: str, **load: Any) -> CellWorkload:
    """`load`: see `engine_cells`."""
    load = {"loras": 0, "controlled": 0, **load}
    features = {"lora_sets": load["loras"], "controlled_share": load["controlled"] / 4}
    features |= {each: load[each] for each in ("callers", "steps", "slo_ms")}
    opened = partial(engine_cells, **load)
    return CellWorkload(name=name, service="images", space=ENGINE, features=features, opened=opened)


def _rank(name: str, model: str, **load: Any) -> CellWorkload:
    """`load`: see `rank_cells`."""
    features = {each: load[each] for each in ("callers", "candidates", "slo_ms")}
    opened = partial(rank_cells, model=model, **load)
    return CellWorkload(name=name, service="recommend", space=RANK, features=features, opened=opened)


WORKLOADS: Mapping[str, CellWorkload] = {
    workload.name: workload
    for workload in (
        _images("images-mixed", callers=6, images=18, steps=6, slo_ms=1500.0, loras=2, controlled=1),
        _images("images-plain", callers=4, images=12, steps=8, slo_ms=1000.0),
        _images("images-loras", callers=8, images=16, steps=4, slo_ms=1500.0, loras=4),
        _images("images-controlled", callers=4, images=8, steps=6, slo_ms=1500.0, controlled=4),
        _rank("rm1-64", "rm1", candidates=64, callers=8, requests=2400, slo_ms=20.0),
        _rank("rm1-512", "rm1", candidates=512, callers=4, requests=600, slo_ms=50.0),
        _rank("criteo-64", "criteo-kaggle", candidates=64, callers=8, requests=1800, slo_ms=10.0),
        _rank("rm2-64", "rm2", candidates=64, callers=8, requests=800, slo_ms=50.0),
    )
}


def measure(workload: CellWorkload, path: Path, *, times: int, say: Say) -> None:
    """Measure every cell once in each of `times` rounds, which differ in their requests and the order of cells: a slow
    minute hits others of them each time."""
    run = _begin(workload, path)
    trials = list(run.trials)
    done = {(workload.space.key(trial.config), trial.repeat) for trial in trials}
    with workload.opened() as measured, path.open("a", encoding="utf-8") as file:
        for repeat in range(times):
            for config in workload.in_order(repeat):
                if (workload.space.key(config), repeat) in done:
                    continue
                began_s = time.monotonic()
                outcome = measured(config, repeat)
                trials.append(
                    Trial(
                        number=len(trials), config=config, outcome=outcome, duration_s=time.monotonic() - began_s,
                        seed=repeat, repeat=repeat,
                    )
                )  # fmt: skip
                file.write(trial_line(run.run_id, trials[-1]) + "\n")
                file.flush()
                goodput = outcome.metrics.get("goodput_per_cost", 0)
                say(f"{workload.name} {len(trials)}: {dict(config)} {goodput:.1f}")


def _begin(workload: CellWorkload, path: Path) -> LibraryRun:
    """Return the run that the file holds, or start a new one."""
    if path.is_file():
        return read_library(path)[0]
    facts = host_facts()
    memory_bytes = int(float(facts["ram_gib"]) * 2**30)
    run = LibraryRun(
        run_id=workload.name,
        service=workload.service,
        trials=(),
        units={knob.name: knob.unit for knob in workload.space.knobs},
        sets=_SETS.get(workload.service, {}),
        workload=workload.features,
        hardware=Hardware(name=str(facts["cpu"]), cpus=cores(), memory_bytes=memory_bytes, price_per_hour=cores()),
        versions={name: version(name) for name in ("plait", "torch", "diffusers")},
        goals=(str(OBJECTIVE),),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_line(run) + "\n", encoding="utf-8")
    return run


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.autoconfig.cells")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3, help="how often each cell is measured")
    given = parser.parse_args()
    chosen = WORKLOADS[given.workload]
    measure(chosen, given.out, times=given.times, say=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
