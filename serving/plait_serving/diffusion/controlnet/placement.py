"""Where a ControlNet runs faster: in the base replica's process or as a service. A pure choice by what steps cost.

Here the encoder half and the ControlNet run one after the other on the same device; a service runs beside the encoder
half, at the price of the transfer and, on the same host, of the cores that the two take from each other. No formula
knows that price, and no probe knows the sizes that are asked for. So sessions of users are put at both places in turn
until steps alike have run often enough at both, and later again: a host changes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from plait_serving.diffusion.knobs import Placement

_FIRST_STEPS = 2
"""Of a kind at a place: they may compile, allocate, or be captured."""
_STEPS = 4
_KEPT_STEPS = 9
_KINDS = 64
_MAX_SESSIONS = 8
"""Sessions after which a trial ends without steps that compare."""
_SLOWER = 1.5
_LOOK_AGAIN_S = 1800.0
"""A trial begins again where steps have become so many times slower than when it was decided, and after so long: of a
few hundred requests two are then slower."""


class StepTimes(NamedTuple):
    """The seconds of steps alike: with the ControlNet here, and as a service."""

    local_s: float
    remote_s: float


@dataclass(slots=True)
class _Steps:
    """The newest seconds of steps of a kind at a place; the first are not among them."""

    seen: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def record(self, seconds: float) -> None:
        self.seen += 1
        if self.seen > _FIRST_STEPS:
            self.seconds.append(seconds)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if len(self.seconds) >= _STEPS else None


class PlacementTrial:
    """Puts sessions at both places in turn until steps of one kind have run often enough at both, and begins again when
    that may no longer hold. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._sessions = {Placement.LOCAL: 0, Placement.REMOTE: 0}
        self._steps: dict[Hashable, dict[Placement, _Steps]] = {}
        self._kind: Hashable = None
        self._decided_s = math.inf
        self.times: StepTimes | None = None
        """What was decided by; None: nothing compared, or not yet."""

    @property
    def is_over(self) -> bool:
        """Whether sessions go to one place; it is asked before each."""
        if self._clock() - self._decided_s > _LOOK_AGAIN_S:
            self._begin()
        if self._decided_s == math.inf and sum(self._sessions.values()) >= _MAX_SESSIONS:
            self._decided_s = self._clock()
        return self._decided_s < math.inf

    def next_place(self) -> Placement:
        """Return where the next session goes: where fewer have been."""
        return min(self._sessions, key=lambda place: self._sessions[place])

    def opened(self, place: Placement) -> None:
        """Count a session."""
        self._sessions[place] += 1

    def record(self, place: Placement, kind: Hashable, seconds: float) -> None:
        """Take the seconds of one step. `kind`: equal for steps that cost the same wherever the ControlNet runs."""
        steps = self._steps.setdefault(kind, {Placement.LOCAL: _Steps(), Placement.REMOTE: _Steps()})
        if len(self._steps) > _KINDS:
            del self._steps[next(iter(self._steps))]
        steps[place].record(seconds)
        local_s, remote_s = steps[Placement.LOCAL].median_s, steps[Placement.REMOTE].median_s
        if local_s is None or remote_s is None:
            return
        if self.times is None:
            self.times, self._kind, self._decided_s = StepTimes(local_s, remote_s), kind, self._clock()
        elif kind == self._kind:
            now_s, then_s = min(local_s, remote_s), min(self.times)
            chosen = Placement.LOCAL if self.times.local_s <= self.times.remote_s else Placement.REMOTE
            if place is chosen and now_s > _SLOWER * then_s:
                self._begin()
