"""Worker processes: what crosses pipes, failures as sentences, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.images.fleet import ProcessLayout, System, WorkerFleet, with_descendants
from support.paused import is_stopped
from support.waiting import wait_for


def system(factory: str = "fakes.bench:Echo") -> System:
    """A system whose workers import this test's support module."""
    return System(
        name="echo",
        factory=factory,
        settings={"greeting": "hello"},
        share=lambda items, n: [list(range(first, len(items), n)) for first in range(n)],
    )


@pytest.fixture(scope="module")
def fleet():
    """Two workers."""
    opened = WorkerFleet(system(), ProcessLayout(processes=2, threads=3, variant="wide"))
    yield opened
    opened.close()


def test_items_come_back_in_order_whatever_process_did_them(fleet, capfd):
    """Two processes share the items; results are in item order, and nothing that a library prints reaches stdout."""
    taken_s, results = fleet.run([{"i": i} for i in range(5)], one_by_one=False, keep=True)
    assert [result["i"] for result in results] == [0, 1, 2, 3, 4]
    assert {(r["threads"], r["variant"], r["greeting"], r["one_by_one"]) for r in results} == {
        (3, "wide", "hello", False)
    }
    assert taken_s > 0
    assert capfd.readouterr().out == ""


def test_results_are_not_sent_unless_asked_for(fleet):
    """A timed run carries times only."""
    assert fleet.run([{"i": 0}], one_by_one=False)[1] == []


def test_a_paused_fleet_stands_still_and_works_afterwards():
    """With all that its processes started; closing one that is paused ends it as ever."""
    opened = WorkerFleet(system(), ProcessLayout(processes=2, threads=1))
    try:
        places = [Path(f"/proc/{pid}") for pid in with_descendants(opened.pids)]
        opened.pause()
        opened.pause()
        wait_for(lambda: all(map(is_stopped, places)))  # a signal takes its time
        opened.resume()
        opened.resume()
        assert not any(map(is_stopped, places))
        _, results = opened.run([{"i": i} for i in range(3)], one_by_one=False, keep=True)
        assert [result["i"] for result in results] == [0, 1, 2]
        opened.pause()
    finally:
        opened.close()
    assert not any(place.exists() for place in places)


@pytest.mark.parametrize(
    ("factory", "item", "error", "sentence"),
    [
        ("fakes.bench:Echo", {"fail": True}, SystemFailed, "echo: ValueError: no such thing"),
        ("fakes.bench:Echo", {"die": True}, SystemFailed, r"its process died \(exit code 3\)"),
        ("fakes.bench:absent", {}, SystemUnavailable, "hello needs a library"),
    ],
)
def test_a_failure_is_one_sentence(factory, item, error, sentence):
    """An exception, a death and a missing library each say which system and why."""
    with pytest.raises(error, match=sentence):
        fleet = WorkerFleet(system(factory), ProcessLayout(processes=1, threads=1))
        try:
            fleet.run([item], one_by_one=False)
        finally:
            fleet.close()
