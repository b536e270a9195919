"""When a search ends before its budget is spent. A rule is a pure function from trials to a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from plait_autoconfig.objective import Objective
from plait_autoconfig.values import Trial


@runtime_checkable
class PredictsRegret(Protocol):
    """A designer that can estimate how much is left to gain."""

    def expected_regret(self) -> float:
        """Return how much worse the best known cell is expected to be than the best of all, as a share of its loss."""


@dataclass(frozen=True, slots=True)
class NoImprovement:
    """Stop when the best of the last `patience` trials is not `least_gain` (relative) better than the best before them.

    With several goals: when none of them is on the front. Never stops before a feasible configuration was found.
    """

    patience: int
    least_gain: float = 0.01

    def why_stop(self, objective: Objective, trials: Sequence[Trial]) -> str:
        """Return a sentence that says why to stop; empty to continue."""
        before = trials[: -self.patience] if self.patience else ()
        if not before or not self._has_stalled(objective, before, trials):
            return ""
        return f"the last {self.patience} trials brought no improvement of {100.0 * self.least_gain:g} %"

    def _has_stalled(self, objective: Objective, before: Sequence[Trial], trials: Sequence[Trial]) -> bool:
        if len(objective.goals) > 1:
            old = {tuple(sorted(cell.config.items())) for cell in objective.front(before)}
            new = {tuple(sorted(cell.config.items())) for cell in objective.front(trials)}
            return bool(old) and new <= old
        old_best, new_best = objective.best(before), objective.best(trials)
        if old_best is None or new_best is None:
            return False
        old_loss, new_loss = objective.loss(old_best.outcome), objective.loss(new_best.outcome)
        assert old_loss is not None
        assert new_loss is not None
        return old_loss - new_loss < self.least_gain * abs(old_loss)


def why_nothing_is_left(designer: object, *, expected_gain: float) -> str:
    """Return a sentence if the designer expects less than `expected_gain` to be left; empty if not, or if unknown."""
    if expected_gain <= 0.0 or not isinstance(designer, PredictsRegret):
        return ""
    regret = designer.expected_regret()
    if regret >= expected_gain:
        return ""
    return f"the designer expects no more than {100.0 * regret:.2g} % to be left to gain"
