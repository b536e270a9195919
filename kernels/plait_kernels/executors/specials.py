"""What models for single shapes are made for, and the accounts of what they would save. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

_SAVED_BY_ONE_CALL = 0.1
"""The share of a call that is computed in turns, a few rows each, which its own model would save. At the starter's size
a thread takes 1.8 ms for half a UNet of one row, 1.65 for each of 4 and 1.45 for each of 16 (2.2 on the dynamic model,
there 4.6 for one)."""

Shapes = tuple[tuple[int, ...], ...]
"""The inputs' shapes, then the factors' rows, then every layer's rank."""


@dataclass(frozen=True, slots=True)
class Special:
    """What a model is made for: shapes, and the name of the factors that are merged into it (`RowFactors.name`).
    `mergeable`: it takes as inputs what another could have merged."""

    shapes: Shapes
    merged: Hashable = None
    mergeable: bool = field(default=False, compare=False)

    @property
    def rows(self) -> int:
        """The rows of the inputs."""
        return self.shapes[0][0]

    @property
    def takes_factors(self) -> bool:
        """Whether a layer has factors that are inputs."""
        return any(self.shapes[-1])

    def with_rows(self, rows: int) -> Special:
        """Return the same for other rows."""
        return replace(self, shapes=with_rows(self.shapes, rows))


@dataclass(slots=True, eq=False)
class Seen:
    """How often a shape ran without a model of its own, and the seconds that one could have saved since a call, before
    which the program had computed for `since_s`."""

    since: int
    since_s: float
    calls: int = 0
    seconds: float = 0.0

    def restart(self, call: int, busy_s: float) -> None:
        """Count the seconds from now on."""
        self.since, self.since_s, self.seconds = call, busy_s, 0.0


def needless_share(rows: int, computed: int, *, in_turns: bool) -> float:
    """Return the share of a call's time that a model of its own would save, where `computed` rows were computed."""
    return max(0.0, 1 - rows / computed) + (_SAVED_BY_ONE_CALL if in_turns else 0.0)


def with_rows(shapes: Shapes, rows: int) -> Shapes:
    """Return the shapes of a call with other rows."""
    *inputs, (given,), ranks = shapes
    return (*((rows, *size[1:]) for size in inputs), (1 if given == 1 else rows,), ranks)
