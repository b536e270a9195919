"""Configurations of the diffusion engine and the ranker, measured cell by cell: the data of the tuner's shipped
library, and tables whose optimum is known.

`python -m plait_bench.autoconfig.cells WORKLOAD --out FILE` measures every cell of the workload's space `--times`
times, in rounds, as far as the file (in the library's own format) lacks them: it can be stopped and started again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import parse_objective
from plait_autoconfig.rows import run_line, trial_line
from plait_autoconfig.space import Space
from plait_autoconfig.store import read_library
from plait_autoconfig.values import Config, Hardware, Trial
from plait_bench.autoconfig.cell_services import engine_cells, rank_cells
from plait_bench.autoconfig.services import ENGINE, RANK, MeasureCell
from plait_bench.benchmark import Say, cores
from plait_bench.host import host_facts

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
