"""From a scenario to the plan of its run, and each process's share of it: what is sent when, and what is cancelled on
purpose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait_loadtest.arrivals import rate_profile, schedule
from plait_loadtest.errors import ScenarioError
from plait_loadtest.mix import RequestMix
from plait_loadtest.scenario import ClosedLoopCallers, Scenario, TraceArrivals
from plait_loadtest.seeds import Stream, make_rng
from plait_loadtest.validate import validate
from plait_loadtest.values import WHOLE, HostPart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestPlan:
    """What is sent when, drawn before anything is sent.

    `scheduled_ns` int64 (N,), ascending; the first `warm_up` requests are not measured. Closed loop: empty array, the
    callers send without a schedule until the scenario's count is reached or, without one, the time is over.
    `cancelled` bool (N,): requests that are given up on purpose.
    """

    scheduled_ns: npt.NDArray[np.int64]
    warm_up: int
    mix: RequestMix
    cancelled: npt.NDArray[np.bool_]


def make_plan(scenario: Scenario) -> RequestPlan:
    """Draw the whole run. Raises `ScenarioError` if the scenario, or a file that it names, cannot be used."""
    validate(scenario)
    mix = RequestMix(scenario)
    times, warm_up = schedule(
        scenario.arrivals,
        duration_s=scenario.duration_s,
        warm_up_s=scenario.warm_up_s,
        count=scenario.count,
        seed=scenario.seed,
    )
    cancelled = make_rng(scenario.seed, Stream.CANCELLATIONS).random(times.size) < scenario.limits.cancel_rate
    return RequestPlan(scheduled_ns=times, warm_up=warm_up, mix=mix, cancelled=cancelled)


def expected_requests(scenario: Scenario) -> float | None:
    """Return how many requests the measured part of a run will have, on average; None: replies or a trace decide."""
    if scenario.count is not None:
        return float(scenario.count)
    if isinstance(scenario.arrivals, ClosedLoopCallers | TraceArrivals):
        return None
    profile = rate_profile(scenario.arrivals, duration_s=scenario.duration_s, warm_up_s=scenario.warm_up_s)
    return profile.expected(scenario.warm_up_s + scenario.duration_s) - profile.expected(scenario.warm_up_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One process's part of a plan: every `processes`-th request, counted from `rank`, over all hosts. `room`: of the
    host's limit on connections and on requests in flight; `beside`: the host's processes, this one included."""

    rank: int
    processes: int
    room: int
    beside: int
    scenario: Scenario
    mix: RequestMix
    scheduled_ns: npt.NDArray[np.int64]
    cancelled: npt.NDArray[np.bool_]
    warm_up: int
    callers: int
    count: int | None


def shares(plan: RequestPlan, scenario: Scenario, host: HostPart = WHOLE) -> list[Share]:
    """Return one share for each process of a host; no more processes than connections, requests in flight or callers.

    The limits are each host's own; requests, callers and the count are those of all hosts together. Raises
    `ScenarioError` if there are fewer callers than hosts: one without a caller could not send its part.
    """
    callers = scenario.callers
    if 0 < callers < host.hosts:
        raise ScenarioError(f"arrivals.concurrency: {callers} callers cannot be shared by {host.hosts} hosts")
    limits = scenario.limits
    room = min(limits.connections, limits.in_flight)
    here = min(scenario.processes, room, _part(callers, host.rank, host.hosts) or scenario.processes)
    processes = here * host.hosts
    return [
        Share(
            rank=rank,
            processes=processes,
            room=_part(room, position, here),
            beside=here,
            scenario=scenario,
            mix=plan.mix,
            scheduled_ns=plan.scheduled_ns[rank::processes].copy(),
            cancelled=plan.cancelled[rank::processes].copy(),
            warm_up=plan.warm_up,
            callers=_part(callers, rank, processes),
            count=None if scenario.count is None else _part(scenario.count, rank, processes),
        )
        for position in range(here)
        for rank in (host.rank + host.hosts * position,)
    ]


def _part(whole: int, rank: int, processes: int) -> int:
    """Return the part of `whole` for this rank, split among `processes` as evenly as integers allow."""
    return whole // processes + (rank < whole % processes)
