"""Our own measurements as workloads: searches are replayed on what `python -m plait_bench.cells` has recorded.

The runs are those of the starter library, or of files in the same format. A service whose every cell was measured
becomes a service to tune, with all others of its space as the library; for the others a sample is enough. A search
sees a cell's trials one after the other; the truth by which searches are judged is their mean, and cells that the
trials cannot tell from the best one tie with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from plait_autoconfig.confidence import log_loss
from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.errors import TunerError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective, parse_objective
from plait_autoconfig.rows import load_lines
from plait_autoconfig.space import Space
from plait_autoconfig.values import TrialOutcome, cells_of, pooled
from plait_bench.autoconfig.tasks import Service, Suite, TuningTask
from plait_bench.errors import BenchError

__all__ = ["recorded_runs", "recorded_suites"]

_TRIALS = 60
_SURE = 1.96  # standard deviations, 95 %


def recorded_suites(recorded: Sequence[LibraryRun], spaces: Mapping[str, Space]) -> list[Suite]:
    """Make one workload, `own-SERVICE`, for each service with a complete run. `spaces`: by run id.

    Raises `BenchError` naming the run and what is wrong with it.
    """
    runs = {run.run_id: run for run in recorded}
    unknown = sorted(runs.keys() - spaces.keys())
    if unknown:
        msg = f"no space is known for the recorded run {unknown[0]!r}; there are {', '.join(sorted(spaces))}"
        raise BenchError(msg)
    suites = []
    for service in sorted({run.service for run in runs.values()}):
        mine = {run_id: run for run_id, run in runs.items() if run.service == service}
        tasks = []
        for run_id, run in mine.items():
            known = _service(run, spaces[run_id])
            if known is not None:
                library = tuple(other for other_id, other in mine.items() if other_id != run_id)
                tasks.append(TuningTask(name=run_id, service=known, library=library))
        if tasks:
            trials = min(_TRIALS, *(len(task.service.truth) for task in tasks))
            marks = tuple(mark for mark in (1, 3, 5, 10, 20, 30) if mark <= trials)
            suites.append(Suite(name=f"own-{service}", tasks=tuple(tasks), trials=trials, marks=marks))
    return suites


def recorded_runs(paths: Sequence[Path]) -> list[LibraryRun]:
    """Read the runs of the files. Raises `BenchError` naming the file."""
    runs: list[LibraryRun] = []
    for path in paths:
        try:
            loaded = load_lines(path.read_text(encoding="utf-8").splitlines()).runs
        except (OSError, UnicodeDecodeError, TunerError) as error:
            raise BenchError(f"{path} is no library of trials: {error}") from error
        runs += loaded
    return runs


def _service(run: LibraryRun, space: Space) -> Service | None:
    """Return the run as a service, or None unless every cell was measured. Raises `BenchError`."""
    try:
        objective = parse_objective(next(iter(run.goals), ""))
        outcomes = {
            space.key(space.check(cell.config)): tuple(trial.outcome for trial in cell.trials)
            for cell in cells_of(run.trials)
        }
    except TunerError as error:
        raise BenchError(f"the recorded run {run.run_id!r} cannot be read: {error}") from error
    keys = [space.key(cell) for cell in space.cells()]
    shown = {at: outcomes[key] for at, key in enumerate(keys) if key in outcomes}
    truth = [known for at in shown if (known := pooled(shown[at])) is not None]
    if len(truth) < len(keys):
        return None
    context = ServiceContext(
        service=run.run_id, workload=run.workload, hardware=run.hardware, versions=run.versions
    )  # fmt: skip
    tie = _tie(list(shown.values()), objective)
    return Service(space=space, objective=objective, truth=tuple(truth), context=context, tie=tie, shown=shown)


def _tie(shown: Sequence[Sequence[TrialOutcome]], objective: Objective) -> float:
    """Return by which share two cells must differ to differ with 95 % certainty; 0 unless cells have repeats.

    Trials scatter by a factor; its variance is estimated from the median of the cells' own, which one glitch does not
    move (of n trials it is that of chi-squared with n - 1 degrees of freedom, over n - 1).
    """
    logs = [
        each
        for outcomes in shown
        if len(each := np.array([log_loss(objective, outcome) for outcome in outcomes])) > 1 and np.isfinite(each).all()
    ]
    if not logs:
        return 0.0
    count = min(map(len, logs))
    variance = float(np.median([each[:count].var(ddof=1) for each in logs])) * (count - 1) / chi2.median(count - 1)
    return 1.0 - math.exp(-_SURE * math.sqrt(2.0 * variance / count))
