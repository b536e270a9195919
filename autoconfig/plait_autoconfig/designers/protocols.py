"""What every designer is: it proposes configurations (`ask`) and learns from what they showed (`tell`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Hardware, Trial, WorkloadFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What is known of the service before its first trial."""

    service: str = ""
    workload: WorkloadFeatures = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)
    versions: Mapping[str, str] = field(default_factory=dict)
    at: str = ""
    """The date, ISO 8601; empty: the age of library runs plays no role."""
    costs: tuple[float, ...] = ()
    """What each of ``Space.cells()`` costs an hour, as far as that is known before it runs (what it reserves); empty:
    it is not known. Only their ratios matter; trials then should measure ``cost_per_hour``."""


class Designer(Protocol):
    """One search in one space. It is a state machine without clock or files; a seed fixes everything it does."""

    @property
    def name(self) -> str:
        """How users call it, such as ``optuna-tpe``."""

    def ask(self) -> Config:
        """The next configuration to measure: a cell that was neither told nor asked for before, unless invalid.

        May be called several times before `tell`. A cell whose trial was `FailureKind.INVALID` may come once more.
        Raises `Exhausted` when every cell was proposed.
        """

    def tell(self, trial: Trial) -> None:
        """Learns from a trial, asked for or not. Several trials of one cell are repeats, and are averaged.

        Raises `OutsideSpace` for a configuration of another space, `ObjectiveError` for a missing metric; either
        changes nothing.
        """

    def drop(self, config: Config) -> None:
        """Gives back a configuration that was asked for and will not be measured. It may be proposed again."""


class MakesDesigner(Protocol):
    """The constructor that all designers have."""

    def __call__(
        self,
        space: Space,
        objective: Objective,
        *,
        seed: int,
        library: Sequence[LibraryRun] = (),
        context: ServiceContext | None = None,
    ) -> Designer:
        """A fresh search. ``library``: past runs of other services, usable or not (`usable_for`)."""
