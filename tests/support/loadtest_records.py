"""Synthetic runs of a load with known answers: records without a network."""

from __future__ import annotations

import numpy as np

from plait_loadtest.measure import summarise
from plait_loadtest.plan import RequestPlan
from plait_loadtest.scenario import ImageClass, PoissonArrivals, Scenario, Slo
from plait_loadtest.session import FinishedRun
from plait_loadtest.thresholds import check, parse_all
from plait_loadtest.values import RECORD, Echo, RequestOutcome, RunResult

MS = 1_000_000
SECOND = 1_000_000_000


def records(scheduled_s, latency_ms, *, outcome=RequestOutcome.OK, kind=0, lag_ms=0.1, warm_up=False):
    """Records of requests that all ended ``latency_ms`` after their scheduled time. Scalars or arrays."""
    scheduled_s = np.asarray(scheduled_s, dtype=np.float64)
    rows = np.zeros(scheduled_s.size, dtype=RECORD)
    rows["index"] = np.arange(scheduled_s.size)
    rows["kind"], rows["outcome"], rows["warm_up"] = kind, outcome, warm_up
    rows["scheduled_ns"] = np.rint(scheduled_s * SECOND)
    rows["sent_ns"] = rows["scheduled_ns"] + np.rint(np.asarray(lag_ms) * MS).astype(np.int64)
    rows["done_ns"] = rows["scheduled_ns"] + np.rint(np.asarray(latency_ms) * MS).astype(np.int64)
    rows["first_byte_ns"], rows["first_part_ns"] = rows["done_ns"], -1
    rows["status"] = 200
    rows["server_ms"] = np.nan
    gone = rows["outcome"] == RequestOutcome.NOT_SENT
    for name in ("sent_ns", "first_byte_ns", "done_ns"):
        rows[name][gone] = -1
    return rows


def result(rows, *, interrupted=False, echo_ms=0.3, wall_s=None, problems=(), whys=("",)):
    """A run that left these records."""
    instants = np.arange(0, 100, dtype=np.int64) * SECOND // 10
    ended = rows["done_ns"].max(initial=0) / SECOND
    return RunResult(
        records=rows,
        echo=Echo(scheduled_ns=instants, latency_ns=np.full(100, int(echo_ms * MS), dtype=np.int64)),
        started_unix_s=1_790_000_000.0,
        wall_s=ended if wall_s is None else wall_s,
        cpu_s=1.0,
        interrupted=interrupted,
        problems=problems,
        whys=whys,
    )


def plan(size):
    """Requests a millisecond apart."""
    scheduled_ns, cancelled = np.arange(size, dtype=np.int64) * MS, np.zeros(size, dtype=np.bool_)
    return RequestPlan(scheduled_ns=scheduled_ns, cancelled=cancelled, warm_up=0, mix=None)


def scenario(**settings):
    """10 s at 100/s with an SLO of 100 ms at p95, unless said otherwise."""
    base = {
        "name": "synthetic",
        "arrivals": PoissonArrivals(rate_per_s=100.0),
        "duration_s": 10.0,
        "slo": Slo(latency_ms=100.0, percentile=95.0),
        "mix": (ImageClass(name="images"),),
    }
    return Scenario(**(base | settings))


def session(rows, chosen=None, **about):
    """A finished session of these records."""
    chosen = chosen or scenario()
    run = result(rows, **about)
    summary = summarise(run, chosen)
    thresholds = parse_all(chosen.thresholds, kinds=[item.name for item in chosen.mix])
    return FinishedRun(scenario=chosen, result=run, summary=summary, verdicts=check(thresholds, summary))


def queue(rate_per_s, seconds, *, mean_service_ms, seed=0):
    """Records of an M/M/1 server: Poisson arrivals, exponential service, one at a time, in order."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate_per_s * seconds)
    arrived = np.sort(rng.uniform(0.0, seconds, count))
    served = rng.exponential(mean_service_ms / 1e3, count)
    # Lindley: done_i = max(arrived_i, done_(i-1)) + served_i, as one running maximum.
    total = np.cumsum(served)
    done = np.maximum.accumulate(arrived - (total - served)) + total
    return records(arrived, (done - arrived) * 1e3)
