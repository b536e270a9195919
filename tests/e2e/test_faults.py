"""Finding 10 and what follows from it: the fault run as a person starts it, a minute of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.server import RunningServer, send, started

ROOT = Path(__file__).resolve().parents[2]
KINDS = "engine,ingress,controlnet-edges,cn-picks,hn-picks"

# Starting, a quiet round, a minute of faults and stopping: too long for `make test`.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_no_request_ends_as_it_may_not_while_processes_die():
    """Finding 10: every kind of replica is killed under load and comes back; no answer is wrong, none hangs, and every
    error is documented, or Serve's proxy's while the ingress was dead; nothing is left behind."""
    pace = ["--seconds", "60", "--requests", "240", "--kinds", KINDS, "--warm-rounds", "0", "--json"]
    command = [sys.executable, "-m", "tests.faults", "run", *pace]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, errors = running.communicate()
        finally:
            running.terminate()  # if the test was stopped: the server must not go on
    assert output, errors[-3000:]
    report = json.loads(output)
    for part in ("all", "probes", "after"):
        ends = report[part]
        assert (ends["wrong"], ends["hung"], ends["undocumented"]) == (0, 0, 0), ends["seen"]
    assert report["all"]["right"] > 0
    assert report["after"]["right"] == report["after"]["requests"]
    assert {fault["kind"] for fault in report["faults"]} == set(KINDS.split(","))
    assert all(fault["recovered"] for fault in report["faults"]), report["faults"]
    held = report["held"]["after"]
    assert (held["zombies"], held["orphans"]) == (0, 0)
    assert report["left"] == []


def test_health_tells_the_workloads_apart():
    """With all engines stopped rankings are healthy and images are not, with the HN dead it is the other way round;
    each is told at once, every time (within two seconds on an idle host)."""
    with started("images.replicas=2", "images.executor=torch") as server:
        with stopped(server, "engine"):
            for _ in range(10):
                assert asked(server, "?workload=ranking")[0] == 200
                status, text = asked(server)
                assert status == 503, text
                assert "engine" in text
        assert asked(server, "?workload=films")[0] == 400
        for process in server.of("hn-picks"):
            send(process, signal.SIGKILL)
        until_s = time.monotonic() + 2.0  # another one takes longer to start
        while (found := asked(server, "?workload=ranking"))[0] == 200 and time.monotonic() < until_s:
            pass
        assert found[0] == 503
        assert "HN" in found[1]
        assert asked(server, "?workload=images")[0] == 200


@contextmanager
def stopped(server: RunningServer, kind: str) -> Iterator[None]:
    """All processes of a kind are stopped meanwhile."""
    there = server.of(kind)
    assert there
    for process in there:
        send(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in there:
            send(process, signal.SIGCONT)


def asked(server: RunningServer, query: str = "") -> tuple[int, str]:
    """What `/health` answers, before an engine that does not could."""
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(f"{server.url}/health{query}", timeout=5) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    print(f"{query}: {status} after {time.monotonic() - began_s:.2f} s")
    return status, text
