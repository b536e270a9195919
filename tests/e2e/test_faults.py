"""What `/health` says of each workload while the processes of one of them are stopped or dead (finding 10)."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from plait_bench.faults.server import FaultServer, served

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_health_tells_the_workloads_apart(tmp_path):
    """With all engines stopped rankings are healthy and images are not, with the HN dead it is the other way round;
    each is told at once, every time (within two seconds on an idle host)."""
    missed: list[str] = []
    with served({"images": {"replicas": 2, "executor": "torch", "controlnets": {}}}, tmp_path, missed) as server:
        with stopped(server, "engine"):
            for _ in range(10):
                assert asked(server, "?workload=ranking")[0] == 200
                status, text = asked(server)
                assert status == 503, text
                assert "engine" in text
        assert asked(server, "?workload=films")[0] == 400
        for process in server.of("hn-picks"):
            os.kill(process, signal.SIGKILL)
        until_s = time.monotonic() + 2.0  # another one takes longer to start
        while (found := asked(server, "?workload=ranking"))[0] == 200 and time.monotonic() < until_s:
            pass
        assert found[0] == 503
        assert "HN" in found[1]
        assert asked(server, "?workload=images")[0] == 200


@contextmanager
def stopped(server: FaultServer, kind: str) -> Iterator[None]:
    """All processes of a kind are stopped meanwhile."""
    there = server.of(kind)
    assert there
    for process in there:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in there:
            os.kill(process, signal.SIGCONT)


def asked(server: FaultServer, query: str = "") -> tuple[int, str]:
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
