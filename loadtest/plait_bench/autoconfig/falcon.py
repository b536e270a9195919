"""The table of the Falcon paper (SoCC 2022): 30 models x 1,440 configurations, with Morphling's five knobs.

Its structure matters for reading the results: all models share one surface and differ only by unstructured noise. So
the mean of the sources, in a fixed order, is nearly optimal, and learning from trials cannot help.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.objective import Objective, maximise
from plait_autoconfig.space import Space
from plait_autoconfig.values import TrialOutcome, Value
from plait_bench.autoconfig.tasks import Service, Suite, leave_one_out
from plait_bench.errors import BenchError

METRIC = "goodput_per_cost"
_COLUMN = "norm.(rps/budget)"
_READ: dict[str, Callable[[str], Value]] = {
    "batchsize": int, "cpus": int, "gpumem": float, "gpupower": int, "gputype": str
}  # fmt: skip
SPACE = Space(
    (
        ChoiceKnob(name="batchsize", values=(4, 8, 16, 32, 64, 128), ordered=True),
        IntKnob(name="cpus", low=1, high=5),
        ChoiceKnob(name="gpumem", values=(0.8, 1.2, 1.6, 2.4), ordered=True, unit="GB"),
        ChoiceKnob(name="gpupower", values=(50, 75, 100), ordered=True, unit="%"),
        ChoiceKnob(name="gputype", values=("M60", "K80", "T4", "V100")),
    )
)


def suite(folder: Path) -> Suite:
    """Return all 30 models, each with the 29 others as its library. Raises `BenchError` if the files are not as
    published."""
    services = {each.context.service: each for part in ("sources", "targets") for each in _services(folder / part)}
    return Suite(name="falcon", tasks=leave_one_out(services), trials=30, marks=(1, 3, 5, 10, 20, 30))


def _services(folder: Path) -> list[Service]:
    paths = sorted(folder.glob("reg-*.csv"))
    if not paths:
        raise BenchError(f"{folder} has no reg-*.csv")
    return [_service(path) for path in paths]


def _service(path: Path) -> Service:
    found = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            config = {name: read(row[name]) for name, read in _READ.items()}
            found[SPACE.key(config)] = TrialOutcome.measured(**{METRIC: float(row[_COLUMN])})
    cells = [SPACE.key(cell) for cell in SPACE.cells()]
    if set(found) != set(cells):
        raise BenchError(f"{path} does not have each of the {len(cells)} configurations once")
    return Service(
        space=SPACE,
        objective=Objective((maximise(METRIC),)),
        truth=tuple(found[cell] for cell in cells),
        context=ServiceContext(service=path.stem.removeprefix("reg-")),
    )
