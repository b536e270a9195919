"""Asking, telling and giving back in any order: the bookkeeping against a naive model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait_autoconfig.designers.uninformed import RandomDesigner
from plait_autoconfig.errors import Exhausted
from plait_autoconfig.objective import Objective, maximise
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome
from support.autoconfig import GRID

OUTCOMES = {
    "ran": TrialOutcome.measured(rate=1.0),
    "crash": TrialOutcome.failed(FailureKind.CRASH),
    "invalid": TrialOutcome.failed(FailureKind.INVALID),
}


class Bookkeeping(RuleBasedStateMachine):
    """The model: per cell how often it was measured validly and invalidly, and whether it is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.designer = RandomDesigner(GRID, Objective((maximise("rate"),)), seed=0)
        self.valid = [0] * 12
        self.invalid = [0] * 12
        self.pending: list[int] = []
        self.told = 0

    def is_open(self, cell: int) -> bool:
        """The promise in one line."""
        return cell not in self.pending and self.valid[cell] == 0 and self.invalid[cell] < 2

    @rule()
    def ask(self) -> None:
        """Gives an open cell, or says that there is none."""
        try:
            cell = GRID.cells().index(self.designer.ask())
        except Exhausted:
            assert not any(self.is_open(cell) for cell in range(12))
        else:
            assert self.is_open(cell)
            self.pending.append(cell)

    @rule(pick=st.integers(0, 99), ended=st.sampled_from(sorted(OUTCOMES)))
    def tell(self, pick: int, ended: str) -> None:
        """A pending cell was measured, or some other one, perhaps again."""
        cell = self.pending[pick % len(self.pending)] if self.pending and pick < 80 else pick % 12
        self.designer.tell(Trial(number=self.told, config=GRID.cells()[cell], outcome=OUTCOMES[ended]))
        self.told += 1
        self.pending = [each for each in self.pending if each != cell]
        if ended == "invalid":
            self.invalid[cell] += 1
        else:
            self.valid[cell] += 1

    @rule(pick=st.integers(0, 11))
    def drop(self, pick: int) -> None:
        """A cell is given back; if it was not in flight, nothing happens."""
        self.designer.drop(GRID.cells()[pick])
        self.pending = [each for each in self.pending if each != pick]

    @invariant()
    def agrees(self) -> None:
        """Pending cells and averages are those of the model."""
        assert self.designer.pending() == tuple(sorted(self.pending))
        assert len(self.designer.observed()) == sum(count > 0 for count in self.valid)
        assert len(self.designer.trials) == self.told


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=30, stateful_step_count=30)
