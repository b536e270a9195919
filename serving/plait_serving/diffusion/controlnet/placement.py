"""Where a ControlNet runs: in the base replica's process or as a service. A pure choice from measured times.

`StepTimes` come from `measure` at the start; where they are close, from a `PlacementTrial` with requests of users.

What counts is the part of a step before the decoder half, since all else is the same at both places: here the encoder
half and the ControlNet run one after the other on the same cores; a service runs beside the encoder half, at the price
of the transfer and, on the same host, of the cores that the two take from each other. No formula knows that price, so
both are run as in a real step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient

Size = tuple[int, int]

_MAX_REPEATS = 5
_QUICK = 0.1
"""The share of the budget within which calls are repeated: milliseconds need a median, seconds do not."""
_CLOSE = 0.8
_TRIAL_STEPS = 4
_MAX_TRIAL_SESSIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured seconds until the decoder half can start: with the ControlNet here, and as a service."""

    local_s: float
    remote_s: float

    @property
    def is_close(self) -> bool:
        """Whether the difference could be one of the moment: a busy start, a size that nobody asks for."""
        return min(self.local_s, self.remote_s) >= _CLOSE * max(self.local_s, self.remote_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """LOCAL or REMOTE, and the reason, for the log."""

    placement: Placement
    why: str


def choose_placement(
    wanted: Placement, *, local_possible: bool, remote_possible: bool, times: StepTimes | None = None
) -> PlacementChoice:
    """Return LOCAL or REMOTE. AUTO takes the faster one; an explicit choice that cannot be met raises
    `ControlNetUnavailable`.

    AUTO without `times` prefers LOCAL, which depends on no other process.
    """
    possible = {Placement.LOCAL: local_possible, Placement.REMOTE: remote_possible}
    if wanted is not Placement.AUTO:
        if not possible[wanted]:
            raise ControlNetUnavailable(f"controlnet_placement is {wanted.value}, which is not possible here")
        return PlacementChoice(placement=wanted, why="as configured")
    open_to = [placement for placement, can in possible.items() if can]
    if not open_to:
        raise ControlNetUnavailable("the ControlNet can run neither here nor as a service")
    if len(open_to) == 1:
        return PlacementChoice(placement=open_to[0], why="nothing else is possible")
    if times is None:
        return PlacementChoice(placement=Placement.LOCAL, why="nothing was measured")
    faster = Placement.REMOTE if times.remote_s < times.local_s else Placement.LOCAL
    return PlacementChoice(
        placement=faster,
        why=f"measured {times.local_s * 1e3:.1f} ms local, {times.remote_s * 1e3:.1f} ms remote until the decoder half",
    )


class PlacementTrial:
    """Puts sessions of users at both places in turn until steps of the same shape have run often enough at both.

    Close as the places are, the slower one costs a request little. `outcome` is the medians of those steps; of the
    measurement that left the doubt, if after eight sessions there still are none.
    """

    def __init__(self, doubtful: StepTimes) -> None:
        self._doubtful = doubtful
        self._sessions = {Placement.LOCAL: 0, Placement.REMOTE: 0}
        self._seconds: dict[Hashable, dict[Placement, list[float]]] = {}

    def next_place(self) -> Placement:
        """Return where the next session goes: where fewer have been."""
        return min(self._sessions, key=lambda place: self._sessions[place])

    def opened(self, place: Placement) -> None:
        """Count a session."""
        self._sessions[place] += 1

    def record(self, place: Placement, shape: Hashable, seconds: float) -> None:
        """Take the seconds of one step until the decoder half could start."""
        self._seconds.setdefault(shape, {Placement.LOCAL: [], Placement.REMOTE: []})[place].append(seconds)

    @property
    def outcome(self) -> StepTimes | None:
        """The times to choose by; None while the trial goes on."""
        for seen in self._seconds.values():
            if min(map(len, seen.values())) >= _TRIAL_STEPS:
                return StepTimes(
                    local_s=statistics.median(seen[Placement.LOCAL]), remote_s=statistics.median(seen[Placement.REMOTE])
                )
        return self._doubtful if sum(self._sessions.values()) >= _MAX_TRIAL_SESSIONS else None


def probe_sizes(width: int, height: int, *, multiple: int) -> tuple[Size, ...]:
    """Return the sizes at which to measure a model of this size, ascending: a quarter and a half of its edges, and its
    own; without duplicates."""

    def edge(full: int, parts: int) -> int:
        return max(multiple, full // parts // multiple * multiple)

    return tuple(dict.fromkeys((edge(width, parts), edge(height, parts)) for parts in (4, 2, 1)))


def measure(
    times_at: Callable[[Size], StepTimes],
    sizes: Sequence[Size],
    *,
    budget_s: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Return the times at the last of `sizes` (ascending) that the budget allows.

    `times_at` runs one step at both places. Its first call, at the first size, warms up; its result counts only if
    not even a second call there fits the budget. A call is expected to take as long as the first, times the pixels.
    Only calls that are quick beside the budget are repeated, for the median.
    """
    started_s = clock()
    warm_up = times_at(sizes[0])
    spent_s = clock() - started_s
    pixels = sizes[0][0] * sizes[0][1]
    fitting = [size for size in sizes if spent_s + spent_s * size[0] * size[1] / pixels <= budget_s]
    if not fitting:
        return warm_up
    samples = [times_at(fitting[-1])]
    while len(samples) < _MAX_REPEATS and clock() - started_s < _QUICK * budget_s:
        samples.append(times_at(fitting[-1]))
    return StepTimes(
        local_s=statistics.median(sample.local_s for sample in samples),
        remote_s=statistics.median(sample.remote_s for sample in samples),
    )


def time_step_s(
    client: ControlNetClient,
    call: ControlCall,
    *,
    encoder: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds from the call to its answer, with the encoder half run in between, as in a step.

    On a GPU `encoder` must wait for the device. Raises the call's error.
    """
    started_s = clock()
    pending = client.start([call])
    encoder()
    answer = pending.wait()[0]
    if isinstance(answer, EngineError):
        raise answer
    float(answer.mid.flatten()[0])  # waits for the device
    return clock() - started_s
