"""What joins plan, run and measure: trials of a capacity search."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from plait_loadtest import session as sessions
from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import load_scenario
from plait_loadtest.run.coordinator import is_slow_alone
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


@contextmanager
def one_at_a_time(service_s):
    """A server that computes for those that have gone, too: its address, its gate, and the number of its answers."""
    gate, answered = threading.Event(), []

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            gate.wait()
            threading.Event().wait(service_s)
            answered.append(self.path)
            try:
                self.send_response(200)
                self.end_headers()
            except OSError:
                pass

        def log_message(self, *arguments):
            """Nothing."""

    class Server(HTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address, gate, answered
        finally:
            gate.set()
            server.shutdown()
            thread.join()


def test_a_server_has_settled_once_nothing_of_an_earlier_load_is_waited_for():
    """Forty requests of 50 ms each, whose callers have gone: until they are answered it has not."""
    with one_at_a_time(0.05) as (address, gate, answered):
        target = {"url": "http://{}:{}".format(*address), "api": "raw"}
        chosen = load_scenario({"target": target, "slo": {"latency_ms": 500}}, {})
        for _ in range(40):
            with socket.create_connection(address) as gone:
                gone.sendall(b"GET /gone HTTP/1.0\r\n\r\n")
        assert not sessions.settles(chosen, limit_s=0.5)
        gate.set()
        assert sessions.settles(chosen, limit_s=60.0)
        assert answered.count("/gone") == 40


@pytest.mark.parametrize(("limit_ms", "slow"), [(1e-6, True), (60_000.0, False)])
def test_control_requests_without_a_load_say_whether_a_host_is_slow(limit_ms, slow):
    """They take more than a nanosecond and less than a minute."""
    assert is_slow_alone(limit_ms) == slow
