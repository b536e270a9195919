"""From a scenario to the plan of its run: what is sent when, and what is cancelled on purpose."""

from __future__ import annotations

import numpy as np

from plait_loadtest.arrivals import rate_profile, schedule
from plait_loadtest.mix import RequestMix
from plait_loadtest.scenario import ClosedLoopCallers, Scenario, TraceArrivals
from plait_loadtest.seeds import Stream, make_rng
from plait_loadtest.validate import validate
from plait_loadtest.values import RequestPlan


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
