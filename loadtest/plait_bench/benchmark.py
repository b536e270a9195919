"""The protocol that every benchmark implements. Contracts only; rounds, their order, pairs and ratios are the runner's.
Standard library only: systems in other environments import it.

A *benchmark* is a list of workloads. A *workload* opens each of its systems, in one of the layouts that the system
offers; an open system is a *subject*, which is measured once in each round. What a subject measures is a list of
*readings*.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self, TypeAlias

from plait_bench.errors import BenchError, SystemFailed, SystemUnavailable

Say: TypeAlias = Callable[[str], None]
"""Receives progress messages, one line each."""

RATIO = "ratio"
"""The unit of a row that compares two systems, round by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One metric's value in one round.

    `system` and `workload`: whose row it is, if not the subject's; `layout`: a remark in place of the layout's name.
    """

    metric: str
    value: float
    system: str = ""
    workload: str = ""
    layout: str = ""
    kind: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One metric of one system and workload: median, 20th and 80th percentile over `n` rounds, and the `rounds`
    themselves. A ratio is a row whose system is `ours/theirs` and whose unit is `RATIO`.

    `load`: the load average of the last minute before each round; `wake_us`: the slowest wake-up of another process
    before a round; `busy`: whether the host was busy with other work (`host.BUSY_LOAD`, `host.SLOW_WAKE_US`).
    """

    system: str
    workload: str
    metric: str
    unit: str
    value: float
    p20: float
    p80: float
    n: int
    layout: str = ""
    kind: str = "measured"
    rounds: tuple[float, ...] = ()
    load: tuple[float, ...] = ()
    wake_us: float = 0.0
    busy: bool = False

    @classmethod
    def of(cls, values: Sequence[float], **of: str) -> Self:
        """Summarise one value per round. `of`: what and whose it is. Raises ValueError if there are none."""
        p20, median, p80 = (percentile(values, share) for share in (0.2, 0.5, 0.8))
        given: dict[str, Any] = {**of, "rounds": tuple(values)}
        return cls(value=median, p20=p20, p80=p80, n=len(values), **given)

    @property
    def key(self) -> tuple[str, str, str]:
        """What the row is of: workload, system, metric."""
        return self.workload, self.system, self.metric


@dataclass(frozen=True)
class Subject:
    """A system opened for a workload, in one layout.

    `measure(number)` measures a round (from 1). `warm_up` touches everything that a round touches: called once before
    trials and again before rounds. `trial`: measures less, but the deciding metric; None: a trial is a round.
    """

    measure: Callable[[int], Sequence[Reading]]
    warm_up: Callable[[], object] = lambda: None
    trial: Callable[[int], Sequence[Reading]] | None = None


class Workload:
    """The same task for all `systems`, and how they are opened for it; without the first there is nothing to compare.

    `metrics`: the units by metric; `untimed`: those that a busy host does not change. `compared`: the metrics whose
    ratios are taken; None: all. `deciding`: the metric that selects a layout, the largest. `most_rounds`: more would
    add nothing.
    """

    name: str
    systems: tuple[str, ...]
    metrics: Mapping[str, str]
    untimed: Collection[str] = ()
    compared: frozenset[str] | None = None
    deciding: str = ""
    most_rounds: int | None = None

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The systems whose ratio is taken, round by round: the first beside each of the others."""
        return tuple((self.systems[0], other) for other in self.systems[1:])

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Hold what all systems share: a package, a server. Raises `SystemUnavailable` if it is not available here."""
        self.prepare(say)
        yield

    def prepare(self, say: Say) -> None:
        """Make what all systems share and nobody has to close; raises as `session`."""

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the layouts that the system offers."""
        return ("",)

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open a system. Raises `SystemUnavailable` if it cannot run here, else `BenchError`."""
        yield Subject(lambda number: self.take(system, number))

    def take(self, system: str, number: int) -> Sequence[Reading]:
        """Measure a round of a system that holds nothing from one to the next."""
        raise NotImplementedError

    def check(self, subjects: Mapping[str, Subject]) -> None:
        """Compare the systems' answers before any measurement. Raises `Disagreement`."""

    def settle(self, subjects: Mapping[str, Subject]) -> None:
        """Let systems that adapt to their load do so: called once, after `check` and before the rounds."""

    def conclude(self) -> Sequence[ResultRow]:
        """Return the rows that are known only after the last round."""
        return ()

    def row(self, system: str, metric: str, *values: float) -> ResultRow:
        """Summarise values of a metric."""
        return ResultRow.of(values, system=system, workload=self.name, metric=metric, unit=self.metrics[metric])

    def judge(self, rows: Sequence[ResultRow]) -> Sequence[str]:
        """Return what was promised and is not so, in words; called with all rows, if all systems took part, once they
        are closed."""
        return ()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie, linear between neighbours. Raises ValueError if
    there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:  # of two that are infinite nothing can be subtracted
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def readings(values: Mapping[str, float], **more: str) -> list[Reading]:
    """Return the readings of a round, by metric; `more`: what they have in common."""
    return [Reading(metric=metric, value=float(value), **more) for metric, value in values.items()]


def chosen(asked: Sequence[str], there: Sequence[str], what: str) -> tuple[str, ...]:
    """Return those of `there` that were asked for, or all. Raises `BenchError` naming any that do not exist."""
    if unknown := sorted(set(asked) - set(there)):
        raise BenchError(f"there is no {what} {unknown[0]!r}; there are {', '.join(there)}")
    return tuple(name for name in there if not asked or name in asked)


def selected(workloads: Iterable[Workload], only: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads that were asked for, or all. Raises `BenchError` for unknown ones."""
    there = {workload.name: workload for workload in workloads}
    return tuple(there[name] for name in chosen(only, tuple(there), "workload"))


def cache_folder() -> Path:
    """Return the folder in the user's cache where models, packages and peers with environments of their own are
    kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait" / "bench"


def published(data: Path | None, name: str) -> Path:
    """Return a file or folder of the published data. Raises `SystemUnavailable` without it."""
    if data is None or not (found := data / name).exists():
        why = "give --data FOLDER, which has it" if data is None else f"not in {data}"
        raise SystemUnavailable(f"{name}: {why}")
    return found


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


_SILENT_S = 180.0  # a model of a gigabyte is built or mapped, and warmed up

_CHILD = (
    "import sys; from multiprocessing.connection import Connection; "
    "function, arguments = Connection(int(sys.argv[1])).recv(); function(*arguments)"
)


@contextmanager
def started(
    function: Callable[..., object],
    *arguments: object,
    pass_fds: Sequence[int] = (),
    python: str | Path = sys.executable,
    paths: Sequence[str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that calls a function, whose module is imported under its own name; it may end with its standard
    input, and is killed (-9) at the end. `python`: another interpreter, which has `paths` only."""
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send((function, arguments))
        process = subprocess.Popen(
            [str(python), "-c", _CHILD, str(theirs.fileno())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[*pass_fds, theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path if paths is None else paths)},
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[bytes]) -> str:
    """Return the next line that a process prints. Raises `SystemFailed` if it ends, or says nothing for minutes."""
    assert process.stdout is not None
    line = process.stdout.readline() if select.select([process.stdout], [], [], _SILENT_S)[0] else b""
    if not line:
        raise SystemFailed("a process of the benchmark has ended or says nothing: its message is above")
    return line.decode().strip()
