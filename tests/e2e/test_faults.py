"""Finding 10 and what follows from it: the fault run as a person starts it, a minute of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
