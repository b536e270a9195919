"""The numbers are right: reported latencies against a server of which every latency is known."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from plait_loadtest.measure import summarise
from plait_loadtest.plan import make_plan
from plait_loadtest.run.coordinator import run
from plait_loadtest.scenario import Scenario
from support.cluster import TESTS

RATE_PER_S, SECONDS, STALL_S, STALL_AT = 200, 3, 1.0, 100


def measured(arrivals, *, seconds=SECONDS):
    """Records and summary of a run against a server that stalls once, and how long the stall really was."""
    command = [sys.executable, "-m", "fakes.stalling_server", str(STALL_AT), str(STALL_S)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=TESTS, **pipes) as process:
        port = int(process.stdout.readline())
        scenario = Scenario.model_validate(
            {
                "target": {"url": f"http://127.0.0.1:{port}", "api": "raw"},
                "mix": [{"api": "raw"}],
                "arrivals": arrivals,
                "duration_s": seconds,
            }
        )
        result = run(make_plan(scenario), scenario)
        process.stdin.close()
        stalled_s = float(process.stdout.read())
    return result.records, summarise(result, scenario), stalled_s


def known_latencies_ms(requests, stalled_s):
    """Request number `STALL_AT` waits for the whole stall, each later one a gap less, the others not at all."""
    waits_s = stalled_s - (np.arange(requests) - (STALL_AT - 1)) / RATE_PER_S
    waits_s[: STALL_AT - 1] = 0
    return np.maximum(waits_s, 0) * 1000


def corrected_ms(records):
    """Latencies as wrk2 corrects them, from the raw rows: from the time at which a request should have been sent."""
    return (records["done_ns"] - records["scheduled_ns"]) / 1e6


def test_a_stall_is_told_as_it_was():
    """p99 and maximum of the open loop are no less than what they must be; a closed loop hides them ten times over.

    The percentiles of the report agree with those of the corrected raw rows to 0.2 %. A machine that stands still adds
    to what the server did, so that a run can only be too slow, and by less than the stall.
    """
    records, summary, stalled_s = measured({"kind": "constant", "rate_per_s": RATE_PER_S})
    latency = summary.total.latency_ms
    told = [latency.p50, latency.p90, latency.p95, latency.p99, latency.p99_9, latency.max]
    from_rows = np.percentile(corrected_ms(records), (50, 90, 95, 99, 99.9, 100))
    np.testing.assert_allclose(told, from_rows, rtol=0.002)
    known_ms = known_latencies_ms(len(records), stalled_s)
    ratios = np.array([latency.max, latency.p99]) / [known_ms.max(), np.percentile(known_ms, 99)]
    assert 0.98 <= ratios.min() <= ratios.max() < 2.0

    _, closed, _ = measured({"kind": "closed", "concurrency": 1}, seconds=1.5)
    assert closed.total.latency_ms.p95 * 10 < latency.p99  # one request in 200 saw it
