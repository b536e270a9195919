"""Independent RNG streams from one seed, so that changing one distribution never changes the draws of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Row = TypeVar("Row")

CHUNK = 1024
"""The number of requests drawn together. Part of what a seed means: another value gives other requests."""

_KEPT = 4  # chunks held: neighbours of the one that is being sent


class Stream(IntEnum):
    """The purpose of a stream; the number is the spawn key of numpy's SeedSequence and never changes."""

    ARRIVALS = 0
    MIX = 1
    CANCELLATIONS = 2


def make_rng(seed: int, *stream: int) -> np.random.Generator:
    """Return the generator of a stream (and of a stream within it)."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)))


class Numbered:
    """A stream cut into numbered pieces that never overlap: piece i is a pure function of (seed, stream, i).

    Philox is counter-based: the number is the upper part of its counter, which leaves 2^128 blocks to each piece,
    and constructing a piece is its only cost.
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._key = np.random.SeedSequence(seed, spawn_key=stream).generate_state(2, np.uint64)

    def piece(self, number: int) -> np.random.Generator:
        """Return the generator of piece `number`, from its beginning."""
        return np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, number, 0]))


class Chunks(Generic[Row]):
    """What is drawn for each request, for many at once: request i has row i mod CHUNK of chunk i div CHUNK, in any
    process. `draw(uniforms)` of a chunk is computed on first access; uniforms are float64 (CHUNK, columns) in [0, 1).
    """

    def __init__(
        self, numbered: Numbered, columns: int, draw: Callable[[npt.NDArray[np.float64]], Sequence[Row]]
    ) -> None:
        self._given = numbered, columns, draw
        self._drawn = lru_cache(_KEPT)(lambda chunk: draw(numbered.piece(chunk).random((CHUNK, columns))))

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the draws out: another process draws them again."""
        return Chunks, self._given

    def __getitem__(self, request: int) -> Row:
        return self._drawn(request // CHUNK)[request % CHUNK]
