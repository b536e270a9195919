"""Where the generator ends, and not the server, the run says so: which limit was met, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fakes.bad_server import bad_server
from plait_loadtest.capacity import judge, observe
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import run_scenario


@pytest.fixture(scope="module")
def server():
    """One for all."""
    with bad_server() as running:
        yield running


def under(files, *arguments):
    """The command where a process may have so many files, and its report."""
    command = [sys.executable, "-m", "plait_loadtest", "run", *map(str, arguments), "--json", "-"]
    limited = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "limited", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_descriptors_that_run_out_are_no_refusals(server):
    """60 requests that take a second each, within a second, need more files than 40: the others were not sent, and the
    run is invalid for that reason, which says what to do."""
    before = len(server.asked)
    load = ("--api", "raw", "--arrivals", "constant", "--rate", 60, "--duration", 1)
    report = under(40, "--url", server.url, "--path", "/second", *load)
    sent = len(server.asked) - before
    assert (report["requests"], report["succeeded"], report["errors"]) == (60, sent, {"not_sent": 60 - sent})
    assert 0 < sent < 40
    texts = {reason["code"]: reason["text"] for reason in report["reasons"]}
    assert report["valid"] is False
    says = f"out of file descriptors: {60 - sent} requests were not sent; raise ulimit -n, which is 40, or "
    assert texts["limit"].startswith(says)


def run_with(server, **settings):
    """A run of requests that take 50 ms, 40 within 0.4 s."""
    target = {"url": server.url, "api": "raw", "path": "/slow"}
    arrivals = {"kind": "constant", "rate_per_s": 100}
    return run_scenario(
        Scenario.model_validate({"target": target, "mix": [{"api": "raw"}], "arrivals": arrivals, **settings})
    )


@pytest.mark.parametrize("limits", [{"connections": 2}, {"in_flight": 2}])
def test_a_limit_on_connections_that_was_met_makes_the_run_invalid(server, limits):
    """Every request is answered, most after waiting for one of two connections: that is no latency of the server's, and
    no rate that it does not hold."""
    session = run_with(server, duration_s=0.4, limits=limits, slo={"latency_ms": 20_000, "percentile": 50})
    assert session.summary.total.succeeded == 40
    (reason,) = [reason for reason in session.summary.reasons if reason.code == "limit"]
    waited = int(reason.text.split(": ")[1].split(" ")[0])
    assert 0 < waited < 40
    assert reason.text.startswith("limits.connections or limits.in_flight was met: ")
    assert judge(observe(session.summary))[0] == "invalid"
