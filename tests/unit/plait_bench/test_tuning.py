"""The shipped jobs as a benchmark: `plait` as a process, and what it promised tried by somebody else's load test."""

from __future__ import annotations

import sys

import pytest

from fakes import plait_command
from fakes.bench import measured
from plait_bench.errors import SystemFailed
from plait_bench.runner import RunPlan
from plait_bench.tuning import JOBS, TunedJob, benchmark, promise_of


def test_a_promise_is_held_below_it_and_not_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does 1.05 times what was promised holds 0.9 of it in every round and 1.1 in none."""
    monkeypatch.setenv("PYTHONPATH", str(plait_command.__file__).rpartition("/fakes/")[0])
    job = TunedJob("picks", "recommend", command=(sys.executable, "-m", "fakes.plait_command"))
    rows = {row.metric: row for row in measured((job,), RunPlan(rounds=2, settles=False)).rows}
    assert rows["held_at_0.9"].rounds == (1.0, 1.0)
    assert rows["held_at_1.1"].rounds == (0.0, 0.0)
    assert (rows["gain"].p20, rows["gain"].value, rows["gain"].p80) == (1.3, 1.4, 1.5)
    assert (rows["promised_per_s"].value, rows["promised_per_s"].unit) == (plait_command.PROMISED_PER_S, "1/s")
    assert rows["job_s"].unit == "s"


def test_a_job_without_an_answer_is_a_failure_of_plait() -> None:
    """The reason is the job's own."""
    with pytest.raises(SystemFailed, match="no configuration keeps p99"):
        promise_of({"answers": [], "binding": "no configuration keeps p99", "reason": ""})


@pytest.mark.parametrize("promise", [None, {"rate_per_s": None}])
def test_a_job_that_promises_no_rate_is_a_failure_of_plait(promise: object) -> None:
    """There is nothing to try; its sentence says why."""
    answer = {"metrics": {}, "gain": {}, "promise": promise, "sentence": "No rate held."}
    with pytest.raises(SystemFailed, match=r"promises no rate: No rate held\."):
        promise_of({"answers": [answer], "remaining": {}, "rows": []})


def test_the_workloads_are_the_shipped_jobs() -> None:
    """By name; their files are there."""
    assert all(workload.job.is_file() for workload in benchmark() if isinstance(workload, TunedJob))
    assert [workload.name for workload in benchmark(only=["images"])] == ["images"]
    assert set(JOBS) == {"picks", "images"}
