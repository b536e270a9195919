"""The protocol that every benchmark implements. Contracts only; rounds, turns, pairs and ratios are the runner's.

A *benchmark* has workloads. A *workload* opens each of its systems, in one of the layouts that the system offers; what
is open is a *subject*, which is measured once in each round. What a subject measures is a list of *readings*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, Self, TypeAlias

from plait_bench.errors import BenchError
from plait_bench.summary import summarise

Say: TypeAlias = Callable[[str], None]
"""Takes progress, a line at a time."""

WHOLE = ("",)
"""The layouts of a system that offers no choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """``better``: which direction is; None where it is neither (a count, a cost of another kind)."""

    unit: str
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One metric's value in one round.

    ``system`` and ``workload``: whose row it is, if not that of the subject; ``layout``: a remark in place of the
    layout's name.
    """

    metric: str
    value: float
    system: str = ""
    workload: str = ""
    layout: str = ""
    kind: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A line of the document: median, 20th and 80th percentile over ``n`` rounds, and the ``rounds`` themselves.

    ``load``: the load average of the last minute before each round; ``wake_us``: the slowest wake-up of another process
    before a round; ``busy``: whether the host had other work to do (`host.BUSY_LOAD`, `host.SLOW_WAKE_US`).
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
    def of(
        cls, values: Sequence[float], *, system: str, workload: str, metric: str, unit: str, layout: str = "",
        kind: str = "measured",
    ) -> Self:  # fmt: skip
        """Summarise one value per round."""
        summary = summarise(values)
        return cls(
            system=system, workload=workload, metric=metric, unit=unit, value=summary.value, p20=summary.p20,
            p80=summary.p80, n=summary.n, layout=layout, kind=kind, rounds=tuple(values),
        )  # fmt: skip


class Subject(Protocol):
    """A system that is open for a workload, in one layout."""

    def warm_up(self) -> None:
        """Touch all that a round touches. Called once, before trials and again before rounds."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Take round ``number`` (from 1). A trial of the layout may be shorter; it must read the deciding metric."""


class Workload(ABC):
    """What is asked of all ``systems``, and how they are opened for it.

    ``ours``: the system without which there is nothing to compare. ``pairs``: the systems whose ratio is taken, round
    by round, in each metric that both have (or each of ``compared``). ``deciding``: the metric by which a layout is
    chosen. ``rounds``: at most so many, by system, where more would say nothing.
    """

    name: str
    systems: tuple[str, ...]
    metrics: Mapping[str, Metric]
    ours: str = ""
    pairs: tuple[tuple[str, str], ...] = ()
    compared: frozenset[str] | None = None
    deciding: str = ""
    rounds: ClassVar[Mapping[str, int]] = {}

    def session(self, say: Say) -> AbstractContextManager[None]:
        """Hold what all systems share: a package, a server. Raises `SystemUnavailable` if it can not be had here."""
        return nullcontext()

    def layouts(self, system: str) -> Sequence[str]:
        """Name the layouts that the system offers."""
        return WHOLE

    @abstractmethod
    def open(self, system: str, layout: str) -> AbstractContextManager[Subject]:
        """Open a system. Raises `SystemUnavailable` if it can not run here, else `BenchError`."""

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare what the systems answer, before anything counts. Raises `Disagreement`."""
        return ()

    def derive(self, readings: Mapping[str, Sequence[Reading]]) -> Sequence[Reading]:
        """Read what follows from all systems' readings of one round; each reading names its system."""
        return ()

    def conclude(self) -> Sequence[ResultRow]:
        """Return what is known only after the last round."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """``session``: holds what all workloads share. ``rounds`` and ``quick_rounds``: if nobody asks for a number."""

    name: str
    workloads: tuple[Workload, ...]
    session: Callable[[Say], AbstractContextManager[None]] = field(default=lambda _: nullcontext())


def pairs_of(ours: str, systems: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Ours against each of the others."""
    return tuple((ours, system) for system in systems if system != ours)


def chosen(asked: Sequence[str], there: Sequence[str], what: str) -> tuple[str, ...]:
    """Those of ``there`` that were asked for, or all. Raises `BenchError` naming what is not there."""
    if unknown := sorted(set(asked) - set(there)):
        verb = "is" if len(there) == 1 else "are"
        raise BenchError(f"there is no {what} {unknown[0]!r}; there {verb} {', '.join(there)}")
    return tuple(name for name in there if not asked or name in asked)
