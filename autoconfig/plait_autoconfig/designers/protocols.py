"""The designer interface: a designer proposes configurations (`ask`) and learns from their results (`tell`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from plait_autoconfig.values import Config, Trial, TuningSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext(TuningSubject):
    """What is known about the service before its first trial."""

    at: str = ""
    """The date (ISO 8601); if empty, the age of library runs is ignored."""


class Designer(Protocol):
    """A search in one space. It is a state machine without clock or files; a seed makes it fully deterministic."""

    def ask(self) -> Config:
        """Return the next configuration to measure: a cell that was never asked for or told before, unless invalid.

        May be called several times before `tell`. A cell whose trial was `FailureKind.INVALID` may be proposed once
        more. Raises `Exhausted` when every cell has been proposed.
        """

    def tell(self, trial: Trial) -> None:
        """Learn from a trial, asked for or not. Several trials of one cell are repeats and are averaged.

        Raises `OutsideSpace` for a configuration of another space, `ObjectiveError` for a missing metric; neither
        changes any state.
        """

    def drop(self, config: Config) -> None:
        """Give back a configuration that was asked for and will not be measured. It may be proposed again."""

    def expected_regret(self) -> float:
        """Return how much worse the best known cell is expected to be than the best of all, as a share of its loss;
        infinite if that is unknown."""


MakesDesigner: TypeAlias = Callable[..., Designer]
"""The constructor of a designer: of space and objective, `seed`, `library` (past runs of other services, usable or not)
and `context`, as `CellDesigner` has them."""
