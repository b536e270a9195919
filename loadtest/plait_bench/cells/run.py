"""Measures the cells of a workload into a file in the library's format; cells already there are skipped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import max_goodput_per_cost
from plait_autoconfig.rows import load_lines, run_line, trial_line
from plait_autoconfig.values import Config, Hardware, Trial
from plait_bench.cells.values import CellWorkload
from plait_bench.host import cores, host_facts

__all__ = ["measure"]

OBJECTIVE = max_goodput_per_cost()
Say = Callable[[str], None]


def measure(workload: CellWorkload, path: Path, *, times: int, say: Say) -> None:
    """Measure every cell once in each of `times` rounds, which differ in their requests and the order of cells: a slow
    minute hits others of them each time."""
    run = _begin(workload, path)
    trials = list(run.trials)
    with workload.open() as subject, path.open("a", encoding="utf-8") as file:

        def take(config: Config, repeat: int) -> None:
            began_s = time.monotonic()
            outcome = subject.measure(config, seed=repeat)
            trial = Trial(
                number=len(trials), config=config, outcome=outcome, duration_s=time.monotonic() - began_s,
                seed=repeat, repeat=repeat,
            )  # fmt: skip
            trials.append(trial)
            file.write(trial_line(run.run_id, trial) + "\n")
            file.flush()
            say(f"{workload.name} {len(trials)}: {dict(config)} {outcome.metrics.get('goodput_per_cost', 0):.1f}")

        done = {(workload.space.key(trial.config), trial.repeat) for trial in trials}
        for repeat in range(times):
            for config in _in_order(workload, repeat):
                if (workload.space.key(config), repeat) not in done:
                    take(config, repeat)


def _begin(workload: CellWorkload, path: Path) -> LibraryRun:
    """Return the run that the file holds, or start a new one."""
    if path.is_file():
        return load_lines(path.read_text(encoding="utf-8").splitlines()).runs[0]
    facts = host_facts()
    memory_bytes = int(float(facts["ram_gib"]) * 2**30)
    run = LibraryRun(
        run_id=workload.name,
        service=workload.service,
        trials=(),
        units={knob.name: knob.unit for knob in workload.space.knobs},
        sets=workload.sets,
        workload=workload.features,
        hardware=Hardware(name=str(facts["cpu"]), cpus=cores(), memory_bytes=memory_bytes, price_per_hour=cores()),
        versions={name: version(name) for name in ("plait", "torch", "diffusers")},
        goals=(str(OBJECTIVE),),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_line(run) + "\n", encoding="utf-8")
    return run


def _in_order(workload: CellWorkload, repeat: int) -> list[Config]:
    """Return the cells in an order that is random, but the same for everyone; a knob that is slow to change changes
    once."""
    cells = list(workload.space.cells())
    random.Random(f"{workload.name} {repeat}").shuffle(cells)
    return sorted(cells, key=lambda cell: cell[workload.slow_knob]) if workload.slow_knob else cells
