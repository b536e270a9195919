"""What a worker receives and what it reports: plain values that cross a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait_loadtest.errors import ScenarioError
from plait_loadtest.mix import RequestMix
from plait_loadtest.plan import RequestPlan
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import WHOLE, HostPart, RequestCounts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress(RequestCounts):
    """The progress of a worker. `recent_ns`: latencies of requests that ended last."""

    recent_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """The result of a worker: its records as bytes of `RECORD`, what their `why` counts, and the resources used.
    `limits`: how many requests each held up."""

    records: bytes
    whys: tuple[str, ...]
    cpu_s: float
    reconnects: int
    limits: Mapping[str, int]


def part(whole: int, rank: int, processes: int) -> int:
    """Return the part of `whole` for this rank, split among `processes` as evenly as integers allow."""
    return whole // processes + (rank < whole % processes)


def shares(plan: RequestPlan, scenario: Scenario, host: HostPart = WHOLE) -> list[Share]:
    """Return one share for each process of a host; no more processes than connections, requests in flight or callers.

    The limits are each host's own; requests, callers and the count are those of all hosts together. Raises
    `ScenarioError` if there are fewer callers than hosts: one without a caller could not send its part.
    """
    if 0 < plan.concurrency < host.hosts:
        raise ScenarioError(f"arrivals.concurrency: {plan.concurrency} callers cannot be shared by {host.hosts} hosts")
    limits = scenario.limits
    room = min(limits.connections, limits.in_flight)
    here = min(scenario.processes, room, part(plan.concurrency, host.rank, host.hosts) or scenario.processes)
    processes = here * host.hosts
    return [
        Share(
            rank=rank,
            processes=processes,
            room=part(room, position, here),
            beside=here,
            scenario=scenario,
            mix=plan.mix,
            scheduled_ns=plan.scheduled_ns[rank::processes].copy(),
            cancelled=plan.cancelled[rank::processes].copy(),
            warm_up=plan.warm_up,
            callers=part(plan.concurrency, rank, processes),
            count=None if plan.count is None else part(plan.count, rank, processes),
        )
        for position in range(here)
        for rank in (host.rank + host.hosts * position,)
    ]
