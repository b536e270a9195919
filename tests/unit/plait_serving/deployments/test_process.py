"""The deployment class that imports what it stands for in the replica; how long a replica is expected to be away."""

from __future__ import annotations

import inspect
import os

import pytest
from ray.serve._private.replica import UserMethodInfo

from plait_serving.deployments.process import LazyReplica, estimate_s
from plait_serving.replica_metrics import ReplicaMetrics


class Target:
    """What a replica stands for."""

    def __init__(self, *, log):
        self.log = log
        if log is None:
            raise ValueError("no log")

    async def ask(self, question, *, loudly=False):
        return question.upper() if loudly else question

    async def count(self, to):
        try:
            for i in range(to):
                yield i
        finally:
            self.log.append("closed")

    async def record_autoscaling_stats(self):
        return {"pressure": 0.5}

    async def metric_families(self):
        return ReplicaMetrics(replica="r", families=[])

    def reconfigure(self, user_config):
        if not user_config:
            raise ValueError("no knobs")
        self.log.append(user_config)

    def __del__(self):
        if self.log is not None:
            self.log.append("gone")


def lazy_replica(log, **more):
    return LazyReplica(f"{__name__}:Target", log=log, **more)


async def test_calls_streams_and_errors_are_the_targets():
    """Arguments, results, exceptions, and the end of a stream that is left early."""
    log = []
    lazy = lazy_replica(log)
    assert await lazy.ask("a", loudly=True) == "A"
    assert [i async for i in lazy.count(3)] == [0, 1, 2]
    stream = lazy.count(3)
    await anext(stream)
    await stream.aclose()
    assert log == ["closed", "closed"]
    with pytest.raises(ValueError, match="no knobs"):
        lazy.reconfigure({})
    lazy.reconfigure({"threads": 1})
    assert log[-1] == {"threads": 1}
    lazy.__del__()
    assert log[-1] == "gone"


def test_serve_finds_the_targets_methods_and_no_others():
    """It asks the object what it has, of what kind, and whether it takes anything."""
    lazy = lazy_replica([])
    assert inspect.isasyncgenfunction(lazy.count)
    assert inspect.iscoroutinefunction(lazy.ask)
    asked = UserMethodInfo.from_callable(lazy.ask, is_asgi_app=False)
    assert (asked.name, asked.takes_any_args) == ("ask", True)
    assert not UserMethodInfo.from_callable(lazy.record_autoscaling_stats, is_asgi_app=False).takes_any_args
    assert not hasattr(lazy, "record_routing_stats")
    assert not hasattr(lazy, "__serve_multiplex_wrapper")


def test_one_that_could_not_be_made_has_nothing_to_shut_down():
    """Serve asks it all the same."""
    lazy = LazyReplica.__new__(LazyReplica)
    with pytest.raises(ValueError, match="no log"):
        lazy.__init__(f"{__name__}:Target", log=None)
    assert not hasattr(lazy, "__del__")


async def test_threads_are_settled_before_the_import(monkeypatch):
    """OpenMP reads its environment once, when torch is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    lazy_replica([], omp_wait="passive")
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


async def test_what_a_replica_reports_includes_where_it_is(monkeypatch):
    """To Serve, and to an ingress, beside what its target reports."""
    monkeypatch.setattr("plait_serving.deployments.process.whereabouts", lambda: {"plait_node": 7.0})
    lazy = lazy_replica([])
    assert await lazy.metric_families() == ReplicaMetrics(replica="r", families=[], at={"plait_node": 7.0})
    assert await lazy.record_autoscaling_stats() == {"pressure": 0.5, "plait_node": 7.0}


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "expected_s"),
    [
        (9.0, 8.0, 10.0),  # alone on its cores
        (40.0, 8.5, 12.0),  # six processes started at once on two cores
        (100.0, 8.0, 27.0),  # mostly waiting for a disk
        (10.0, 16.0, 12.0),  # a model that loads with two threads
    ],
)
def test_a_start_among_others_says_little_of_one_alone(wall_s: float, cpu_s: float, expected_s: float) -> None:
    """Processor time is the measure where the first start had to share the cores (finding 10)."""
    assert estimate_s(wall_s=wall_s, cpu_s=cpu_s) == expected_s
