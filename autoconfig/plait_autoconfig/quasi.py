"""Low-discrepancy points in a cube, from a seed."""

from __future__ import annotations

from collections.abc import Iterator

_BATCH = 512


def sobol_points(dimensions: int, *, seed: int) -> Iterator[list[float]]:
    """Yield an endless scrambled Sobol sequence in [0, 1)^dimensions (Owen scrambling, `scipy.stats.qmc`)."""
    from scipy.stats import qmc  # takes most of a second to import

    sequence = qmc.Sobol(dimensions, scramble=True, rng=seed)
    while True:
        yield from sequence.random(_BATCH).clip(0.0, 1.0 - 1e-12).tolist()
