"""From a scenario to the plan of its run: what is sent when, and what is cancelled on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait_loadtest.arrivals import rate_profile, schedule
from plait_loadtest.mix import RequestMix
from plait_loadtest.scenario import ClosedLoopCallers, Scenario, TraceArrivals
from plait_loadtest.seeds import Stream, make_rng
from plait_loadtest.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestPlan:
    """What is sent when, drawn before anything is sent.

    `scheduled_ns` int64 (N,), ascending; the first `warm_up` requests are not measured. Closed loop: empty array,
    `concurrency` callers send without a schedule until `count` requests are done or, without it, the time is over.
    `cancelled` bool (N,): requests that are given up on purpose.
    """

    scheduled_ns: npt.NDArray[np.int64]
    warm_up: int
    mix: RequestMix
    cancelled: npt.NDArray[np.bool_]
    concurrency: int = 0
    count: int | None = None


def make_plan(scenario: Scenario) -> RequestPlan:
    """Draw the whole run. Raises `ScenarioError` if the scenario, or a file that it names, cannot be used."""
    validate(scenario)
    mix = RequestMix(scenario)
    if isinstance(scenario.arrivals, ClosedLoopCallers):
        times, warm_up, concurrency = np.empty(0, dtype=np.int64), 0, scenario.arrivals.concurrency
    else:
        concurrency = 0
        times, warm_up = schedule(
            scenario.arrivals,
            duration_s=scenario.duration_s,
            warm_up_s=scenario.warm_up_s,
            count=scenario.count,
            seed=scenario.seed,
        )
    cancelled = make_rng(scenario.seed, Stream.CANCELLATIONS).random(times.size) < scenario.limits.cancel_rate
    return RequestPlan(
        scheduled_ns=times,
        warm_up=warm_up,
        mix=mix,
        cancelled=cancelled,
        concurrency=concurrency,
        count=scenario.count,
    )


def expected_requests(scenario: Scenario) -> float | None:
    """Return how many requests the measured part of a run will have, on average; None: replies or a trace decide."""
    if scenario.count is not None:
        return float(scenario.count)
    if isinstance(scenario.arrivals, ClosedLoopCallers | TraceArrivals):
        return None
    profile = rate_profile(scenario.arrivals, duration_s=scenario.duration_s, warm_up_s=scenario.warm_up_s)
    return profile.expected(scenario.warm_up_s + scenario.duration_s) - profile.expected(scenario.warm_up_s)
