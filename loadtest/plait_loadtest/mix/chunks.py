"""Draws of many requests at once: request i uses row i mod CHUNK of chunk i div CHUNK, in any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from plait_loadtest.distributions import Floats, cumulative, pick
from plait_loadtest.seeds import Numbered

CHUNK = 1024
"""The number of requests drawn together. Part of what a seed means: another value gives other requests."""

_KEPT = 4  # chunks held: neighbours of the one that is being sent

Drawn = TypeVar("Drawn")


class Chunks(Generic[Drawn]):
    """`draw(uniforms)` of each chunk, computed on first access; uniforms are float64 (CHUNK, columns) in [0, 1)."""

    def __init__(self, numbered: Numbered, columns: int, draw: Callable[[Floats], Drawn]) -> None:
        self._given = numbered, columns, draw
        self._drawn = lru_cache(_KEPT)(lambda chunk: draw(numbered.piece(chunk).random((CHUNK, columns))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the draws out: another process draws them again."""
        return Chunks, self._given

    def __getitem__(self, chunk: int) -> Drawn:
        return self._drawn(chunk)


class WeightedChoice(Generic[Drawn]):
    """Weighted choice: values and their cumulative weights."""

    def __init__(self, weights: Mapping[Drawn, float]) -> None:
        self._values = list(weights)
        self._sums = cumulative(list(weights.values()))

    def pick(self, uniforms: Floats) -> list[Drawn]:
        """Return a value for each uniform."""
        return [self._values[index] for index in pick(self._sums, uniforms).tolist()]


def pick_texts(texts: Sequence[str], uniforms: Floats) -> list[str]:
    """Return one of `texts` for each uniform, all equally likely."""
    return [texts[index] for index in (uniforms * len(texts)).astype(np.int64).tolist()]
