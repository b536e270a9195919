"""Runs through the coordinator: on time, complete, honest about overload, and never without results."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fakes.bad_server import bad_server
from plait_loadtest.errors import LoadtestError, ScenarioError
from plait_loadtest.plan import make_plan
from plait_loadtest.run.coordinator import run
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import RECORD, RequestOutcome


class BrokenMix:
    """A `RequestMix`, badly."""

    kinds = ("broken",)

    def kind(self, index):
        """The only one."""
        return 0

    def build(self, index):
        """Never works."""
        raise ScenarioError("mix.0.controlnets.images: no such picture")


def scenario_of(url, path="/ok", **settings):
    """A scenario of plain GETs."""
    target = {"url": url, "api": "raw", **settings.pop("target", {})}
    mix = settings.pop("mix", [{"api": "raw", "path": path}])
    return Scenario.model_validate({"target": target, "mix": mix, **settings})


def go(scenario, **options):
    """Plans and runs."""
    return run(make_plan(scenario), scenario, **options)


def outcomes(records):
    """How many requests ended how."""
    return {
        RequestOutcome(outcome): int((records["outcome"] == outcome).sum()) for outcome in np.unique(records["outcome"])
    }


@pytest.fixture(scope="module")
def server():
    """One bad server for all; its good side is used here too."""
    with bad_server() as running:
        yield running


def test_the_records_of_all_processes_are_the_plan(server):
    """Two processes send exactly the planned requests, each once, none before its time, and all times are in order."""
    scenario = scenario_of(
        server.url,
        arrivals={"kind": "poisson", "rate_per_s": 150},
        duration_s=1.0,
        warm_up_s=0.3,
        processes=2,
        mix=[{"api": "raw", "name": "a", "path": "/ok"}, {"api": "raw", "name": "b", "path": "/slow"}],
    )
    plan = make_plan(scenario)
    seen = []
    began_s = time.time()
    result = run(plan, scenario, on_progress=seen.append)
    ended_s = time.time()
    records = result.records
    assert records.dtype == RECORD
    np.testing.assert_array_equal(records["index"], np.arange(len(plan.scheduled_ns)))
    np.testing.assert_array_equal(records["scheduled_ns"], plan.scheduled_ns)
    np.testing.assert_array_equal(records["kind"], [plan.mix.kind(i) for i in range(len(records))])
    assert records["warm_up"].sum() == plan.warm_up > 0
    assert outcomes(records) == {RequestOutcome.OK: len(records)}
    times = ("scheduled_ns", "sent_ns", "first_byte_ns", "done_ns")
    assert all((records[a] <= records[b]).all() for a, b in pairwise(times))
    assert (records["received_bytes"] == 40).all()
    assert (result.interrupted, result.problems, result.limits) == (False, (), ())
    assert 0 < result.cpu_s < 2 * result.wall_s + 1
    assert result.wall_s >= records["done_ns"].max() / 1e9
    assert began_s <= result.started_unix_s
    assert result.started_unix_s + result.wall_s <= ended_s + 0.1  # two clocks
    assert len(result.echo.latency_ns) >= 1
    assert (result.echo.latency_ns > 0).all()
    last = seen[-1]
    assert (last.done, last.ok, last.errors, last.in_flight) == (len(records), len(records), 0, 0)
    assert last.planned == len(records)


def test_what_has_no_room_is_counted(server):
    """Two requests may be in flight and the server never answers: the rest was not sent, which is a limit of the
    generator, and nothing is hidden."""
    scenario = scenario_of(
        server.url,
        path="/dead",
        arrivals={"kind": "constant", "rate_per_s": 50},
        duration_s=0.4,
        processes=2,
        limits={"in_flight": 2, "drain_s": 1.0},
    )
    result = go(scenario)
    assert outcomes(result.records) == {RequestOutcome.UNFINISHED: 2, RequestOutcome.NOT_SENT: 18}
    (limit,) = result.limits
    assert limit.startswith("limits.connections or limits.in_flight was met: 18 requests had to wait; raise them")


def test_cancellations_come_as_planned(server):
    """Of those without an answer exactly the requests that the plan names are given up, as long after sending as the
    scenario says; one that was answered before stays answered, though the next one waits on the same connection."""
    scenario = scenario_of(
        server.url,
        arrivals={"kind": "constant", "rate_per_s": 100},
        duration_s=0.5,
        target={"timeout_s": 2.0},
        limits={"cancel_rate": 0.4, "cancel_after_s": 1.0},
        mix=[{"api": "raw", "name": "a", "path": "/ok"}, {"api": "raw", "name": "b", "path": "/dead"}],
    )
    plan = make_plan(scenario)
    records = run(plan, scenario).records
    is_dead = records["kind"] == 1
    np.testing.assert_array_equal(records["outcome"] == RequestOutcome.OK, ~is_dead)
    cancelled = records["outcome"] == RequestOutcome.CANCELLED
    np.testing.assert_array_equal(cancelled[is_dead], plan.cancelled[is_dead])
    assert 0 < cancelled.sum() < is_dead.sum()
    assert ((records["done_ns"] - records["sent_ns"])[cancelled] >= 990_000_000).all()


def test_a_closed_loop_waits_for_replies(server):
    """Three callers never have more than three requests in flight; warm-up is marked by time."""
    scenario = scenario_of(
        server.url,
        path="/slow",
        arrivals={"kind": "closed", "concurrency": 3},
        duration_s=0.6,
        warm_up_s=0.3,
        processes=2,
    )
    records = go(scenario).records
    assert outcomes(records) == {RequestOutcome.OK: len(records)}
    assert 3 <= len(records) <= 3 * 18  # 0.9 s of 50 ms each, or less on a busy machine
    starts, ends = records["scheduled_ns"], records["done_ns"]
    assert max(int(((starts <= at) & (ends > at)).sum()) for at in starts) <= 3
    np.testing.assert_array_equal(records["warm_up"], starts < 300_000_000)


def test_a_closed_loop_ends_after_its_count(server):
    """``count`` requests are measured, whatever the duration."""
    for duration_s in (3600, 0.001):
        scenario = scenario_of(
            server.url, arrivals={"kind": "closed", "concurrency": 2}, duration_s=duration_s, count=25,
            limits={"drain_s": 0.0},
        )  # fmt: skip
        assert outcomes(go(scenario).records) == {RequestOutcome.OK: 25}


def test_a_run_without_hope_is_ended_early(server):
    """Whoever watches may end it: the result says why, and what was done until then is kept."""
    scenario = scenario_of(server.url, arrivals={"kind": "constant", "rate_per_s": 100}, duration_s=60)
    result = go(scenario, stop_when=lambda told: "enough was seen" if told.done >= 50 else None)
    assert (result.interrupted, result.abandoned) == (True, "enough was seen")
    kept = outcomes(result.records)
    assert kept[RequestOutcome.OK] >= 50
    assert kept[RequestOutcome.OK] + kept[RequestOutcome.INTERRUPTED] == 6000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_that_dies_is_named(server):
    """The other worker's records are kept, its own read as interrupted, and the result says so."""
    scenario = scenario_of(server.url, arrivals={"kind": "constant", "rate_per_s": 100}, duration_s=2.0, processes=2)

    def kill(progress):
        workers = {child.name: child for child in multiprocessing.active_children()}
        if progress.elapsed_s > 0.3 and "loadtest-worker-1" in workers:
            workers["loadtest-worker-1"].kill()

    result = go(scenario, on_progress=kill)
    (problem,) = result.problems
    assert problem.startswith("worker process 1 of 2 died (exit code -9): the system kills where memory runs out")
    assert (result.records["outcome"][0::2] == RequestOutcome.OK).all()
    assert (result.records["outcome"][1::2] == RequestOutcome.INTERRUPTED).all()
    np.testing.assert_array_equal(result.records["index"], np.arange(200))


def test_a_request_that_can_not_be_built_is_an_error_before_the_load(server):
    """The mix's own sentence reaches the caller, and no process is left."""
    scenario = scenario_of(server.url, arrivals={"kind": "constant", "rate_per_s": 100}, duration_s=1.0)
    with pytest.raises(LoadtestError, match="no such picture"):
        run(replace(make_plan(scenario), mix=BrokenMix()), scenario)
    assert [child.name for child in multiprocessing.active_children()] == []


def test_it_runs_outside_the_main_thread(server):
    """The tuner runs trials from threads, where signals cannot be handled."""
    results = []
    scenario = scenario_of(server.url, arrivals={"kind": "constant", "rate_per_s": 50}, duration_s=0.3)
    thread = threading.Thread(target=lambda: results.append(go(scenario)))
    thread.start()
    thread.join(300)
    assert outcomes(results[0].records) == {RequestOutcome.OK: 15}
