"""Independent RNG streams from one seed, so that changing one distribution never changes the draws of another."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


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
