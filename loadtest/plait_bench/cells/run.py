"""Measures the cells of a workload into a file in the library's format; cells already there are skipped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
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


def measure(workload: CellWorkload, path: Path, *, sample: int | None, again: int, times: int, say: Say) -> None:
    """Measure every cell, or `sample` of them; then the `again` best `times` more, with other requests, in turn."""
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

        done = {workload.space.key(trial.config) for trial in trials}
        left = [config for config in _chosen(workload, sample) if workload.space.key(config) not in done]
        for config in left:
            take(config, 0)
        for config, repeat in _best_again(trials, again, times):
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


def _chosen(workload: CellWorkload, sample: int | None) -> list[Config]:
    """Return the cells in a fixed random order, so that a run that was stopped early is a sample too."""
    cells = list(workload.space.cells())
    random.Random(workload.name).shuffle(cells)
    return cells if sample is None else cells[:sample]


def _best_again(trials: Sequence[Trial], count: int, times: int) -> list[tuple[Config, int]]:
    """Return the best cells by first trial, `times` repeats each, interleaved so that a slow minute hits all alike."""
    firsts = [trial for trial in trials if trial.repeat == 0 and OBJECTIVE.loss(trial.outcome) is not None]
    best = sorted(firsts, key=lambda trial: OBJECTIVE.loss(trial.outcome) or 0.0)[:count]
    done = {(tuple(sorted(trial.config.items())), trial.repeat) for trial in trials}
    wanted = [(trial.config, repeat) for repeat in range(1, times + 1) for trial in best]
    return [each for each in wanted if (tuple(sorted(each[0].items())), each[1]) not in done]
