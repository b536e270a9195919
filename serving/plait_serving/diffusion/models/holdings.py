"""What the models in memory really hold."""

from __future__ import annotations

from collections.abc import Sequence

from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.model import Model

_KEPT_FREE_BYTES = 500_000_000
"""Idle models leave where less can be allocated: what requests and programs take until the next look, and more."""


class Holdings:
    """What resident models really hold: a small model's programs are many times its file.

    Only the whole process can be measured. What it holds beyond all weights is shared out evenly; the sum is right.
    `here`: the resident models. Their weights count also where they are a file's.
    """

    def __init__(self, memory: MemoryReader, *, budget_bytes: int) -> None:
        """Take how memory is read, and what the process may hold."""
        self._memory = memory
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

    def all_bytes(self, here: Sequence[Model]) -> int:
        """Return what all hold together."""
        return max(self._held_bytes, sum(model.nbytes for model in here))

    def beyond_bytes(self, here: Sequence[Model]) -> int:
        """Return what each holds beyond its weights; another one is expected to do so, too."""
        return (self.all_bytes(here) - sum(model.nbytes for model in here)) // max(1, len(here))

    def budget_bytes(self, here: Sequence[Model]) -> int:
        """Return what all may hold together now: less than they were given where the host is short of memory."""
        return max(0, min(self._budget_bytes, self.all_bytes(here) + self._left_bytes - _KEPT_FREE_BYTES))
