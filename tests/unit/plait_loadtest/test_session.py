"""What joins plan, run and measure: trials of a capacity search."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fakes.bad_server import BEHAVIOURS, OK, bad_server
from plait_loadtest import session as sessions
from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import load_scenario
from plait_loadtest.run import echo
from plait_loadtest.scenario import ClosedLoopCallers, GammaArrivals, ImageClass, PoissonArrivals, RampArrivals, Slo
from support.loadtest_records import records, scenario, session


def test_a_trial_is_the_scenario_at_another_rate():
    """The rate and the duration change; count and thresholds go; nobody waits long for what is late anyway."""
    chosen = scenario(arrivals=GammaArrivals(rate_per_s=3.0, burstiness=0.5), count=10, thresholds=("p95_ms < 1",))
    trial = sessions.at_rate(chosen, 8.0, 12.0)
    assert trial.arrivals == GammaArrivals(rate_per_s=8.0, burstiness=0.5)
    assert (trial.duration_s, trial.count, trial.thresholds, trial.limits.drain_s) == (12.0, None, (), 5.0)
    slow = scenario(slo=Slo(latency_ms=10_000.0))
    assert sessions.at_rate(slow, 8.0, 12.0).limits.drain_s == 30.0


@pytest.mark.parametrize(
    "arrivals", [ClosedLoopCallers(concurrency=3), RampArrivals(rate_per_s=1.0, to_rate_per_s=2.0)]
)
def test_arrivals_without_one_rate_can_not_be_searched(arrivals):
    """The message names the field and what could be used."""
    with pytest.raises(ScenarioError, match=r"arrivals\.kind.*poisson"):
        sessions.search_of(scenario(arrivals=arrivals))


def test_a_search_needs_an_slo_and_takes_each_class_share():
    """Weights become shares, images default to p95, the scenario's rate and duration begin the search."""
    with pytest.raises(ScenarioError, match="slo"):
        sessions.search_of(scenario(slo=None))
    mix = (ImageClass(name="often", weight=3.0), ImageClass(name="rare"))
    search = sessions.search_of(scenario(mix=mix, slo=Slo(latency_ms=200.0)), beyond=1.3)
    wanted = [(need.share, need.percentile, need.latency_ms) for need in search.needs]
    assert wanted == [(0.75, 95.0, 200.0), (0.25, 95.0, 200.0)]
    assert (search.first_per_s, search.min_trial_s, search.beyond) == (100.0, 10.0, 1.3)


def test_each_trial_has_arrivals_of_its_own(monkeypatch):
    """Seeds differ, so that a lucky schedule is not repeated; every session is kept."""
    asked, kept = [], []

    def run_scenario(chosen, **_):
        asked.append(chosen)
        return session(records(np.arange(1000) / 100.0, 20.0), chosen)

    monkeypatch.setattr(sessions, "run_scenario", run_scenario)
    measure = sessions.measure_at(scenario(seed=7), keep=kept.append)
    observed = [measure(50.0, 10.0), measure(50.0, 10.0)]
    assert len({chosen.seed for chosen in asked}) == 2
    assert [chosen.arrivals for chosen in asked] == [PoissonArrivals(rate_per_s=50.0)] * 2
    assert len(kept) == 2
    assert [(each.classes[0].good, each.classes[0].judged) for each in observed] == [(1000, 1000)] * 2


def test_a_server_has_settled_once_an_answer_comes_in_time(monkeypatch):
    """Neither while it says nothing, nor while answers take longer than the SLO, as they do behind an earlier load."""
    waits_s = [0.6, 0.7]

    def behind_a_queue(_server, connection, _served):
        time.sleep(waits_s.pop() if waits_s else 0.0)
        connection.sendall(OK)
        return True

    monkeypatch.setitem(BEHAVIOURS, "queue", behind_a_queue)
    with bad_server() as server:
        target = {"url": server.url, "api": "raw"}
        dead, queue = (
            load_scenario({"target": {**target, "path": path}, "slo": {"latency_ms": 500}}, {})
            for path in ("/dead", "/queue")
        )
        assert not sessions.settles(dead, limit_s=0.5)
        assert sessions.settles(queue, limit_s=60.0)
    assert waits_s == []


def test_control_requests_without_a_load_say_whether_a_host_is_slow(monkeypatch):
    """They take more than a nanosecond and less than a minute."""
    monkeypatch.setattr(echo, "_ALONE_S", 0.5)
    assert echo.is_slow_alone(1e-6)
    assert not echo.is_slow_alone(60_000.0)
