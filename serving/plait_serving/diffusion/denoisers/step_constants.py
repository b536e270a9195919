"""What steps of a batch have in common: its stacked texts, and time embeddings, which recur from request to request."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from plait_serving.diffusion.denoisers.batch import BatchLayout, stack_conditionings
from plait_serving.diffusion.protocols import Conditioning, StepCall

__all__ = ["StepConstants"]

_KEPT_ROWS = 1024
"""Time embeddings that are kept: 5 MB of Stable Diffusion 1.5, whose schedules have up to 1,000 timesteps."""


class StepConstants:
    """Remembers them while the weights that make them do not change. Compute thread only."""

    def __init__(self) -> None:
        self._conditionings: list[Conditioning] = []
        self._text = torch.empty(0)
        self._rows: OrderedDict[float, torch.Tensor] = OrderedDict()

    def text(self, calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor:
        """Return the stacked texts `(R, L, C)`."""
        now = [call.conditioning for call in calls]
        if len(now) != len(self._conditionings) or not all(map(operator.is_, now, self._conditionings)):
            self._text = stack_conditionings([conditioning.text for conditioning in now], layout)
            self._conditionings = now
        return self._text

    def embedding(
        self, calls: Sequence[StepCall], layout: BatchLayout, compute: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the time embeddings `(R, E)`; `compute` makes `(1, E)` of a timestep `(1,)`."""
        rows = [self._row(call.timestep, compute) for call in calls]
        parts = [row.expand(count, -1) for row, count in zip(rows, layout.counts, strict=True)]
        return torch.cat(parts * layout.branches)

    def _row(self, timestep: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        key = float(timestep)
        found = self._rows.pop(key, None)
        if found is None:
            found = compute(timestep.reshape(1))
        self._rows[key] = found
        if len(self._rows) > _KEPT_ROWS:
            self._rows.popitem(last=False)
        return found
