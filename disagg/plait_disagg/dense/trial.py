"""Trying a program beside torch on one bucket's shapes: does it compute the same, and who is faster?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from plait_disagg.graph.program import USER_OF, Port

TOLERANCE = 5e-6
"""The largest difference of a number to torch's, as a share of torch's if that is more than 1. Scores must stay within
1e-5 of the whole model's, and cutting it moves them by 1e-6."""

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
    """Return inputs of the same shapes: normal random numbers in place of floats, and in place of integers any between
    the least and the largest one given. Whose user a candidate has stays."""
    rng = torch.Generator().manual_seed(seed)
    return {name: value if name == USER_OF else _noise(value, rng) for name, value in given.items()}


def _noise(value: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=rng)
    if not value.numel():
        return value
    least, largest = int(value.min()), int(value.max())
    return torch.randint(least, largest + 1, value.shape, generator=rng).to(value.dtype)


def difference(got: Given, wanted: Given) -> float:
    """Return the largest difference of a number, as a share as `TOLERANCE` is; infinite where integers differ, or
    only one of both is NaN. The same infinity, or NaN in both, is no difference."""
    return max(_difference(got[name], value) for name, value in wanted.items())


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if torch.equal(got, wanted):
        return 0.0
    if not wanted.is_floating_point():
        return math.inf
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    shares = (got - wanted).abs() / wanted.abs().clamp(min=1.0)
    # Not NaN: `max` over several outputs would lose it.
    return float(shares.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max())


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
