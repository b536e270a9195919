"""Where a ControlNet runs: in the base replica's process or as a service. A pure choice from measured times.

The part of a step before the decoder half, by place (e encoder half, c ControlNet, t transfer both ways):

* local: one after the other on one device, `e + c`;
* remote: side by side, `max(e, c + t)`, or the time measured with both running, which also includes what they take
  from each other when they share cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient

__all__ = ["PlacementChoice", "StepTimes", "choose_placement", "measure", "time_step_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured seconds of the parts of one step. `overlapped_s`: service and encoder half together, if known."""

    encoder_s: float
    controlnet_s: float
    transfer_s: float
    overlapped_s: float | None = None

    @property
    def local_s(self) -> float:
        """The seconds until the decoder half can start when the ControlNet runs here."""
        return self.encoder_s + self.controlnet_s

    @property
    def remote_s(self) -> float:
        """The seconds until the decoder half can start when the ControlNet runs as a service."""
        if self.overlapped_s is not None:
            return self.overlapped_s
        return max(self.encoder_s, self.controlnet_s + self.transfer_s)


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


def measure(
    *,
    local: tuple[ControlNetClient, ControlCall],
    remote: tuple[ControlNetClient, ControlCall],
    encoder: Callable[[], object],
    repeats: int = 5,
    budget_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Return the medians of `repeats` steps after one warm-up step; fewer where a part takes longer than `budget_s`.

    Both clients get equivalent calls. `encoder` runs the encoder half for as many rows; on a GPU it must wait for
    the device. Raises the error of a client that does not answer.
    """

    def median_s(run: Callable[[], float]) -> float:
        return _median_s(run, repeats=repeats, budget_s=budget_s)

    encoder_s = median_s(lambda: _timed_s(encoder, clock))
    controlnet_s = median_s(lambda: time_step_s(*local, clock=clock))
    alone_s = median_s(lambda: time_step_s(*remote, clock=clock))
    overlapped_s = median_s(lambda: time_step_s(*remote, encoder=encoder, clock=clock))
    return StepTimes(
        encoder_s=encoder_s,
        controlnet_s=controlnet_s,
        transfer_s=max(0.0, alone_s - controlnet_s),
        overlapped_s=overlapped_s,
    )


def time_step_s(
    client: ControlNetClient,
    call: ControlCall,
    *,
    encoder: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds from the call to its answer, with `encoder` run in between. Raises the call's error."""
    started_s = clock()
    pending = client.start([call])
    if encoder is not None:
        encoder()
    answer = pending.wait()[0]
    if isinstance(answer, EngineError):
        raise answer
    float(answer.mid.flatten()[0])  # waits for the device
    return clock() - started_s


def _timed_s(run: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    run()
    return clock() - started_s


def _median_s(sample_s: Callable[[], float], *, repeats: int, budget_s: float) -> float:
    """Return the median sample. The first one warms up; it counts only if it leaves no budget for another."""
    warm_up_s = sample_s()
    if warm_up_s > budget_s:
        return warm_up_s
    samples_s: list[float] = []
    while len(samples_s) < repeats and (not samples_s or sum(samples_s) < budget_s):
        samples_s.append(sample_s())
    return statistics.median(samples_s)
