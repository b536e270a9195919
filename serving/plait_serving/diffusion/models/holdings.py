"""What the models in memory really hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.model import Model

_KEPT_FREE_BYTES = 500_000_000
"""Idle models leave where less can be allocated: what requests and programs take until the next look, and more."""


class Holdings:
    """What resident models really hold: a small model's programs are many times its file.

    Only the whole process can be measured. What it holds beyond all weights is shared out evenly; the sum is right.
    Weights count also where they are a file's.
    """

    def __init__(self, memory: MemoryReader, *, budget_bytes: int, here: Callable[[], Sequence[Model]]) -> None:
        """Take how memory is read, what the process may hold, and what returns the resident models."""
        self._memory, self._here = memory, here
        self._given_bytes = budget_bytes
        self.begin()

    def begin(self) -> None:
        """Measure; what the process holds now is no model's."""
        self._before_bytes = self._memory.held_bytes()
        self._budget_bytes = self._given_bytes - self._before_bytes
        self.look()

    def look(self) -> None:
        """Measure."""
        self._held_bytes = self._memory.held_bytes() - self._before_bytes
        self._left_bytes = self._memory.left_bytes()

    def give_back(self) -> None:
        """Return to the system what was freed, and measure."""
        self._memory.give_back()
        self.look()

    @property
    def all_bytes(self) -> int:
        """What all hold together."""
        return max(self._held_bytes, sum(model.nbytes for model in self._here()))

    @property
    def beyond_bytes(self) -> int:
        """What each holds beyond its weights; another one is expected to do so, too."""
        here = self._here()
        return max(0, self._held_bytes - sum(model.nbytes for model in here)) // max(1, len(here))

    @property
    def budget_bytes(self) -> int:
        """What all may hold together now: less than they were given where the host is short of memory."""
        return max(0, min(self._budget_bytes, self.all_bytes + self._left_bytes - _KEPT_FREE_BYTES))
