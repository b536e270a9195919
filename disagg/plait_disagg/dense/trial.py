"""Trying a program beside torch on one bucket's shapes: does it compute the same, and who is faster?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from plait_disagg.dense.buckets import Bucket
from plait_disagg.graph.program import USER_OF, Port

__all__ = ["TOLERANCE", "Given", "difference", "medians", "noise_like", "resized", "sizes"]

TOLERANCE = 5e-6
"""The largest difference to torch's outputs, as a share of the largest output if that is more than 1. Scores must stay
within 1e-5 of the whole model's, and cutting it moves them by 1e-6."""

_TURNS, _CALLS = 20, 4
_FEWEST_TURNS, _MAX_S = 2, 0.15
"""The time after which a trial has seen enough, if there were so many turns."""

Given = Mapping[str, torch.Tensor]
"""The inputs of an HN program by name."""


def resized(ports: Sequence[Port], given: Given, users: int, rows: int) -> dict[str, torch.Tensor]:
    """Return inputs for other numbers of users and candidates: the rows of `given` again and again."""
    made: dict[str, torch.Tensor] = {}
    for port in ports:
        if port.name == USER_OF:
            made[port.name] = torch.arange(rows) * users // rows
        else:
            count, value = (users if port.rows == "user" else rows), given[port.name]
            made[port.name] = value.detach()[torch.arange(count) % len(value)]
    return made


def noise_like(given: Given, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return inputs of the same shapes with normal random numbers in place of floats."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=rng) if value.is_floating_point() else value
        for name, value in given.items()
    }


def difference(got: Given, wanted: Given) -> float:
    """Return the largest difference between outputs, as a share as `TOLERANCE` is. It may be NaN."""
    shares = [
        (got[name] - expected).abs().max() / expected.abs().max().clamp(min=1.0) for name, expected in wanted.items()
    ]
    return float(torch.stack(shares).max())


def medians(
    runs: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each, measured in turn.

    A turn is a few calls in a row, of which the first does not count: it finds the caches full of the others' weights.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in runs}
    began_s = clock()
    for number in range(_TURNS):
        if number >= _FEWEST_TURNS and clock() - began_s > _MAX_S:
            break
        for name, run in runs.items():
            run()
            for _ in range(_CALLS):
                started_s = clock()
                run()
                taken_s[name].append(clock() - started_s)
    return {name: statistics.median(each) for name, each in taken_s.items()}


def sizes(bucket: Bucket) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return users and rows of the smallest and of the largest batch of a bucket."""
    return (bucket.fewest_users, bucket.fewest_rows), (bucket.users, bucket.rows)
