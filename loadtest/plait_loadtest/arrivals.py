"""When requests are sent: drawn before the run, from a seed of their own, independent of every reply.

All synthetic arrivals share one construction. A renewal process of mean gap 1 (constant, exponential or gamma gaps)
is drawn in unit time; the inverse of the cumulative rate maps it to seconds. Legend: t seconds since the start of
the warm-up; r(t) requests per second, piecewise linear; L(t) its integral, requests expected until t.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import (
    Arrivals,
    ClosedLoopCallers,
    ConstantArrivals,
    GammaArrivals,
    RampArrivals,
    RatedArrivals,
    StepArrivals,
    TraceArrivals,
)
from plait_loadtest.seeds import Stream, make_rng

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]

MAX_REQUESTS = 50_000_000
"""A plan and its records are held in memory: some 4 GB at this bound."""

_NEVER_S = 4e9  # 127 years: what a rate of 0 needs; its nanoseconds fit into int64
_BLOCK = 1 << 14  # gaps drawn at once; fixed, so that a longer run starts with the arrivals of a shorter one


def schedule(
    arrivals: Arrivals, *, duration_s: float, warm_up_s: float, count: int | None, seed: int
) -> tuple[Times, int]:
    """Return nanoseconds since the start of the warm-up, int64 (N,) ascending, and how many of them are warm-up; none
    for a closed loop, which has no schedule.

    The warm-up is the same load before the measured part; ramps and steps begin after it, at their first rate.
    Without `count` the measured part is `duration_s` long, otherwise it ends with its `count`-th request. Raises
    `ScenarioError` if the trace cannot be read or is too short, or if the plan would be too large.
    """
    if isinstance(arrivals, ClosedLoopCallers):
        return np.empty(0, dtype=np.int64), 0
    if isinstance(arrivals, TraceArrivals):
        times_s = (read_times(arrivals.file, arrivals.column) - arrivals.offset_s) / arrivals.speed
        times_s = times_s[times_s >= 0]
    else:
        profile = rate_profile(arrivals, duration_s=duration_s, warm_up_s=warm_up_s)
        warm, end = profile.expected(warm_up_s), profile.expected(warm_up_s + duration_s)
        times_s = profile.inverse(_unit_times(arrivals, warm, end, count, seed))
    times_ns = np.rint(np.minimum(times_s, _NEVER_S) * 1e9).astype(np.int64)
    warm_up = int(np.searchsorted(times_ns, round(warm_up_s * 1e9), side="left"))
    if count is None:
        times_ns = times_ns[: np.searchsorted(times_ns, round((warm_up_s + duration_s) * 1e9), side="left")]
    else:
        times_ns = times_ns[: warm_up + count]
    _check_enough(arrivals, times_ns, warm_up, count)
    return times_ns, warm_up


def _check_enough(arrivals: Arrivals, times_ns: Times, warm_up: int, count: int | None) -> None:
    """Raise `ScenarioError` if a trace leaves nothing to measure, or if `count` is never reached."""
    check_size(times_ns.size)
    source = f"arrivals.file: {arrivals.file}" if isinstance(arrivals, TraceArrivals) else "arrivals"
    measured = times_ns.size - warm_up
    if count is not None and (measured < count or times_ns[-1] >= _NEVER_S * 1e9):
        raise ScenarioError(f"{source}: fewer than count = {count} requests ever arrive after the warm-up")
    if isinstance(arrivals, TraceArrivals) and measured <= 0:
        raise ScenarioError(
            f"{source} has no arrival in the part that is measured; change arrivals.offset_s, arrivals.speed or "
            "duration_s"
        )


def check_size(expected: float) -> None:
    """Raise `ScenarioError` if that many requests do not fit into a plan."""
    if expected > MAX_REQUESTS:
        raise ScenarioError(
            f"arrivals: some {expected:.3g} requests are more than {MAX_REQUESTS:,}; lower the rate or the duration"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RateProfile:
    """r(t) as segments: from `start_s[i]` the rate is `rate[i]` and grows by `slope[i]` each second.

    The last segment has slope 0 and never ends. All float64 (S,); `start_s[0]` is 0.
    """

    start_s: Floats
    rate: Floats
    slope: Floats

    @property
    def sums(self) -> Floats:
        """L at the start of each segment."""
        lengths = np.diff(self.start_s)
        return np.concatenate([[0.0], np.cumsum(self.rate[:-1] * lengths + self.slope[:-1] * lengths**2 / 2)])

    def expected(self, time_s: float) -> float:
        """Return L(t): requests expected until `time_s`."""
        i = int(np.searchsorted(self.start_s, time_s, side="right")) - 1
        inside = time_s - self.start_s[i]
        return float(self.sums[i] + self.rate[i] * inside + self.slope[i] * inside**2 / 2)

    def inverse(self, expected: Floats) -> Floats:
        """Return the t at which L(t) reaches each of `expected`; infinite if it never does."""
        sums = self.sums
        # A segment of rate 0 has no width in L: "right" steps over it.
        i = np.searchsorted(sums, expected, side="right") - 1
        rate, slope = self.rate[i], self.slope[i]
        inside = expected - sums[i]
        root = np.sqrt(np.maximum(rate**2 + 2 * slope * inside, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            # The usual root formula turned over: it stays exact for slope 0.
            later = np.where(inside > 0, 2 * inside / (rate + root), 0.0)
        return np.asarray(self.start_s[i] + later)


def rate_profile(arrivals: RatedArrivals, *, duration_s: float, warm_up_s: float) -> RateProfile:
    """Return the rate that `arrivals` describes over the run, warm-up included."""
    if isinstance(arrivals, RampArrivals):
        slope = (arrivals.to_rate_per_s - arrivals.rate_per_s) / duration_s
        rows = [(0.0, arrivals.rate_per_s, 0.0), (warm_up_s, arrivals.rate_per_s, slope)]
        rows.append((warm_up_s + duration_s, arrivals.to_rate_per_s, 0.0))
    elif isinstance(arrivals, StepArrivals):
        lengths = [0.0, *(seconds for seconds, _ in arrivals.stages[:-1])]
        starts = warm_up_s + np.cumsum(lengths)
        rows = [(0.0, arrivals.stages[0][1], 0.0)]
        rows += [(float(start), rate, 0.0) for start, (_, rate) in zip(starts, arrivals.stages, strict=True)]
    else:
        rows = [(0.0, arrivals.rate_per_s, 0.0)]
    start_s, rate, slope_of = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    return RateProfile(start_s, rate, slope_of)


def _gaps(arrivals: RatedArrivals, rng: np.random.Generator) -> Callable[[int], Floats]:
    """Return a function that draws a number of gaps of mean 1."""
    if isinstance(arrivals, ConstantArrivals):
        return np.ones
    if isinstance(arrivals, GammaArrivals):
        shape = arrivals.burstiness
        return lambda size: rng.standard_gamma(shape, size) / shape
    return rng.standard_exponential


def _unit_times(arrivals: RatedArrivals, warm_up: float, end: float, count: int | None, seed: int) -> Floats:
    """Return arrivals in unit time, ascending: at least those of the run, and at most a few more than it needs.

    `warm_up`, `end`: requests expected until the end of the warm-up and of the run.
    """
    check_size(end if count is None else warm_up + count)
    draw = _gaps(arrivals, make_rng(seed, Stream.ARRIVALS))
    # Equal gaps start with a request at once; a random process starts with a gap.
    last = -1.0 if isinstance(arrivals, ConstantArrivals) else 0.0
    blocks: list[Floats] = []
    measured = 0
    while True:
        times = last + np.cumsum(draw(_BLOCK))
        blocks.append(times)
        last = float(times[-1])
        measured += times.size - int(np.searchsorted(times, warm_up, side="left"))
        if last > end if count is None else measured > count:
            break
        check_size(len(blocks) * _BLOCK)
    unit = np.concatenate(blocks)
    # One more than needed: rounding to nanoseconds may move a request over the edge of the warm-up.
    needed = np.searchsorted(unit, end) if count is None else np.searchsorted(unit, warm_up) + count
    return unit[: needed + 1]


def read_times(path: Path, column: str) -> Floats:
    """Return seconds since the earliest entry of `column`, ascending, float64 (N,), N > 0.

    The file is CSV with a header line, optionally compressed (.gz). Entries are all numbers of seconds, or all dates
    in ISO 8601 (no zone: UTC). Raises `ScenarioError` naming file and line.
    """
    try:
        with _open(path) as file:
            values = np.array(list(_values(path, column, file)), dtype=np.float64)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError(f"arrivals.file: {path} cannot be read: {reason}") from error
    except (UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ScenarioError(f"arrivals.file: {path} is not a CSV file: {error}") from error
    if values.size == 0:
        raise ScenarioError(f"arrivals.file: {path} has no row below its header")
    values.sort()
    return np.asarray(values - values[0])


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _values(path: Path, column: str, file: TextIO) -> Iterator[float]:
    rows = csv.reader(file)
    header = next(rows, [])
    if column not in header:
        raise ScenarioError(f"arrivals.column: {path} has no column {column!r}; its columns are {', '.join(header)}")
    position = header.index(column)
    forms: dict[str, Callable[[str], float]] = {"a number of seconds": _number, "a date": _date}
    for row in rows:
        if not row:
            continue
        text = row[position].strip() if position < len(row) else ""
        for what, read in forms.items():
            with suppress(ValueError):
                value = read(text)
                forms = {what: read}  # of the first entry, which all must have
                break
        else:
            what = " or ".join(forms)
            raise ScenarioError(f"arrivals.file: {path}, line {rows.line_num}: {text!r} is not {what}")
        yield value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _date(text: str) -> float:
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
