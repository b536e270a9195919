"""Worker processes: what crosses pipes, failures as sentences, their memory, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.images import fleet as fleets
from plait_bench.images.fleet import ProcessLayout, System, WorkerFleet, peak_memory_of, with_descendants
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


# ---- the memory of processes and their descendants ------------------------------------------------------------------

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"


def process(proc, pid, peak_kb, shared_kb=0):
    """One process as /proc shows it; `shared_kb`: what others account for of the pages that it has now."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t{peak_kb:>8} kB\nVmRSS:\t{7:>8} kB\n")
    (folder / "smaps_rollup").write_text(
        f"00400000-7ffe ---p 00000000 00:00 0 [rollup]\nRss:\t{7:>8} kB\nPss:\t{7 - shared_kb:>8} kB\nPss_Anon:\t1 kB\n"
    )


def test_descendants_count_and_others_do_not():
    """A server's replicas are grandchildren; a neighbour is nobody's, and who has ended has none."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        both = with_descendants([parent.pid])
        (child,) = both - {parent.pid}
        assert both < with_descendants([os.getpid()])
        assert peak_memory_of([parent.pid]) > peak_memory_of([child]) > 0
        os.kill(child, signal.SIGKILL)
    assert with_descendants([parent.pid]) == {parent.pid}
    assert peak_memory_of([parent.pid]) == 0


def test_what_processes_share_counts_once(tmp_path, monkeypatch):
    """Ray's processes have its library and Python's in common."""
    monkeypatch.setattr(fleets, "_PROC", tmp_path)
    monkeypatch.setattr(fleets, "with_descendants", lambda pids: {*pids, 11})
    process(tmp_path, 10, 150, shared_kb=3)
    process(tmp_path, 11, 30, shared_kb=3)
    assert peak_memory_of([10]) == 174 * 1024
