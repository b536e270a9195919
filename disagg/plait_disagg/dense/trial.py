"""Trying a program beside torch: does it compute the same, who is faster, and from how many rows on?

Batch sizes that share a program are a bucket, filled up to 2^k or 3 * 2^k.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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


_MARGIN = 0.95
"""A program must take at most so much of torch's time: what differs by less is not told apart by a trial."""


def filled_up(rows: int) -> int:
    """Return the smallest of these numbers that is not below `rows`."""
    power = 1 << max(0, rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def fewest(rows: int) -> int:
    """Return the fewest rows that are filled up to `rows`, which is one of these numbers."""
    if rows <= 2:
        return rows
    power = 1 << (rows.bit_length() - 1)
    return (power * 3 // 4 if rows == power else power) + 1


class Bucket(NamedTuple):
    """Batches of up to `users` users (1: of a single one) and `rows` candidates, computed by `threads` threads."""

    users: int
    rows: int
    threads: int

    @property
    def fewest_users(self) -> int:
        """The fewest users of a batch that belongs here."""
        return fewest(self.users)

    @property
    def fewest_rows(self) -> int:
        """The fewest candidates of a batch that belongs here; a user has at least one."""
        return max(fewest(self.rows), self.fewest_users)


def bucket_of(users: int, rows: int, threads: int) -> Bucket:
    """Return the bucket of a batch of so many users and candidates."""
    return Bucket(filled_up(users), filled_up(rows), threads)


def pays_from(bucket: Bucket, *, program_s: float, torch_min_s: float, torch_max_s: float) -> int | None:
    """Return the number of rows from which a bucket's program is faster than torch, or None if it never is.

    A program takes `program_s` however many rows of the bucket there are. torch takes `torch_min_s` for the fewest,
    `torch_max_s` for the most, and linearly more between; more for fewer is noise, and then counts for nothing.
    """
    program_s /= _MARGIN
    torch_min_s = min(torch_min_s, torch_max_s)
    if program_s <= torch_min_s:
        return bucket.fewest_rows
    if program_s > torch_max_s:
        return None
    share = (program_s - torch_min_s) / (torch_max_s - torch_min_s)
    return bucket.fewest_rows + round(share * (bucket.rows - bucket.fewest_rows) + 0.5)
