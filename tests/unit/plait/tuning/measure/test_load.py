"""The metrics of a trial's load, and a load on a real server: ended early, at a given rate, in search of a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from fakes.bad_server import bad_server
from plait.tuning.measure.load import LoadResult, Watch, joined, metrics_of, run_given, run_search
from plait.tuning.measure.measurer import with_address
from plait_autoconfig.objective import Limit
from plait_autoconfig.trial_load import Look, LookPlan
from plait_loadtest.load import load_scenario
from plait_loadtest.measure import summarise
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import records, result, scenario, session


def test_metrics_are_those_of_the_rate_that_was_asked_for() -> None:
    """Chance made 90 requests of 100 a second for a second; 80 in time of 90 are 88.9 a second, not 80."""
    rows = records(np.linspace(0, 0.99, 90), np.where(np.arange(90) < 80, 50.0, 200.0))
    found = metrics_of([session(rows, scenario(duration_s=1.0))])
    assert found["offered_per_s"] == 100.0
    assert found["attainment"] == pytest.approx(80 / 90)
    assert found["goodput_per_s"] == pytest.approx(100 * 80 / 90)
    assert found["p50_ms"] == pytest.approx(50.0, rel=1e-3)
    assert found["p99_ms"] == pytest.approx(200.0, rel=1e-3)
    assert found["error_rate"] == 0.0


def test_what_a_run_left_unanswered_counts_as_late() -> None:
    """Of 10 requests 4 were in time when the run was ended: 40 %, and those that waited raise the latencies."""
    rows = records(np.arange(10) / 10, 50.0)
    rows["outcome"][4:] = RequestOutcome.INTERRUPTED
    rows["done_ns"][4:8] = 1_000_000_000  # in flight when the end came after a second
    rows["done_ns"][8:] = -1
    run = replace(result(rows, interrupted=True, wall_s=1.0), abandoned="no hope")
    chosen = scenario(duration_s=10.0)
    found = metrics_of([replace(session(rows, chosen), result=run, summary=summarise(run, chosen))])
    assert found["attainment"] == pytest.approx(0.4)
    assert found["error_rate"] == 0.0
    assert found["p99_ms"] == pytest.approx(600.0, rel=0.02)  # between the largest two, as percentiles are


def test_a_run_without_answers_has_no_metrics() -> None:
    """No number is made up."""
    rows = records(np.arange(5) / 10, 50.0, outcome=RequestOutcome.CONNECT)
    rows["done_ns"] = -1
    assert metrics_of([session(rows, scenario(duration_s=1.0))]) == {}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose requests to /slow take 50 ms and do not wait for each other."""
    with bad_server() as found:
        yield found.url


def small(url: str, **settings: object) -> Scenario:
    """50 requests a second for half a second."""
    target = {"url": url, "api": "raw", "path": "/slow"}
    base = {"target": target, "arrivals": {"kind": "constant", "rate_per_s": 50}, "duration_s": 0.5}
    return load_scenario({**base, "slo": {"latency_ms": 500}, **settings}, {})


def test_a_load_at_a_given_rate_is_measured(url: str) -> None:
    """And shown while it runs."""
    told: list[object] = []
    loaded = run_given(small(url, slo={"latency_ms": 50_000}), Watch(show=told.append))
    assert told
    assert (loaded.ended_early, loaded.timed_out) == ("", False)
    assert loaded.metrics["attainment"] > 0.5
    assert loaded.metrics["p50_ms"] >= 50


def test_a_load_ends_at_the_time_limit_of_its_trial(url: str) -> None:
    """The reason is in the outcome, and it is no word about the generator."""
    loaded = run_given(small(url, duration_s=60.0), Watch(limit_s=0.5))
    assert loaded.timed_out
    assert "time limit" in loaded.ended_early
    assert not [reason for reason in loaded.invalid.split("; ") if "early" in reason]


def test_a_load_that_ends_early_says_whether_the_server_is_known_to_be_idle_again(url, monkeypatch):
    """This one answers nothing but errors: nobody can know."""
    monkeypatch.setattr("plait.tuning.measure.early_stop._WINDOW_S", 0.2)
    target = {"url": url, "api": "raw", "path": "/503"}
    loaded = run_given(small(url, target=target, duration_s=1.0), Watch(limit_s=60.0))
    assert "requests failed" in loaded.ended_early
    assert not loaded.timed_out
    assert "still busy" in loaded.notes[-1]


def test_a_guard_ends_the_load(url: str) -> None:
    """Whatever is asked to watch may end it."""
    loaded = run_given(small(url, duration_s=60.0), Watch(stop=(lambda told: "guard: enough" if told.done else None,)))
    assert loaded.ended_early == "guard: enough"


def a_load(chosen: Scenario, latency_ms: float = 50.0) -> LoadResult:
    """Of a second, whose requests all took that long."""
    done = session(records(np.linspace(0, 0.99, 100), latency_ms), chosen)
    return LoadResult(metrics=metrics_of([done]), sessions=(done,), counted_s=done.result.wall_s)


def test_a_search_returns_the_load_that_counts_and_says_what_it_tried(monkeypatch):
    """A rate that held, with its own metrics and use; the sessions of all runs are kept."""
    planned: list[LookPlan] = []

    def two_looks(run: Callable[[float, float], Look], plan: LookPlan) -> list[Look]:
        planned.append(plan)
        return [replace(run(40.0, 1.0), held=True, valid=True), replace(run(80.0, 1.0), held=False, valid=True)]

    monkeypatch.setattr("plait.tuning.measure.load.look_for_capacity", two_looks)
    monkeypatch.setattr("plait.tuning.measure.load.run_given", lambda trial, _: a_load(trial))
    loaded = run_search(scenario(duration_s=4.0), Watch(), expected_per_s=40.0)
    assert (planned[0].first_per_s, planned[0].short_s, planned[0].long_s) == (40.0, 1.0, 4.0)
    assert loaded.metrics["offered_per_s"] == 40.0
    assert len(loaded.sessions) == 2
    assert loaded.counted_s == loaded.sessions[0].result.wall_s
    assert loaded.notes == ("rates: 40/s held (1 s), 80/s missed (1 s)",)


@pytest.mark.parametrize(
    ("limits", "held"),
    [
        ((), True),
        ((Limit("p99_ms", "at_most", 60.0), Limit("memory_gib", "at_most", 0.0)), True),
        ((Limit("p99_ms", "at_most", 40.0),), False),
    ],
)
def test_a_rate_holds_within_the_limits(limits: tuple[Limit, ...], held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a limit below the SLO would be judged at a rate that breaks it, and nothing would keep it. What no load
    shows is not a matter of rates."""
    looks = list[Look]()

    def one_look(run: Callable[[float, float], Look], plan: LookPlan) -> list[Look]:
        looks.append(run(plan.first_per_s, plan.long_s))
        return looks

    monkeypatch.setattr("plait.tuning.measure.load.run_given", lambda trial, _: a_load(trial))
    monkeypatch.setattr("plait.tuning.measure.load.look_for_capacity", one_look)
    run_search(scenario(duration_s=1.0), Watch(), limits=limits)
    assert [look.held for look in looks] == [held]


def test_a_look_and_the_rest_are_one_load() -> None:
    """Their requests are counted together, at the one rate."""
    look, rest = (a_load(scenario(duration_s=1.0), latency_ms) for latency_ms in (50.0, 200.0))
    both = joined(look, rest)
    assert (both.metrics["offered_per_s"], both.metrics["attainment"]) == (100.0, 0.5)
    assert len(both.sessions) == 2
    assert both.counted_s == pytest.approx(look.counted_s + rest.counted_s)


def test_a_scenario_is_aimed_at_the_application(url: str) -> None:
    """At its address, and below its path if it has one, also where a class of requests has a path of its own."""
    assert with_address(small("http://h:1"), url, "").target.url == url
    images = with_address(load_scenario("smoke", {}), url, "/trial")
    assert (images.target.path, images.mix[0].edits.path) == ("/trial/v1/images/generations", "/trial/v1/images/edits")
    raw = load_scenario({"target": {"api": "raw"}, "mix": [{"path": "/x"}, {"name": "own"}]}, {})
    assert [each.path for each in with_address(raw, url, "/trial").mix] == ["/trial/x", None]
    infer = load_scenario("picks", {})
    assert with_address(infer, url, "/trial").target.path == "/trial/v2/models/picks/infer"
