"""Deployment classes that import what they stand for in the replica."""

from __future__ import annotations

import inspect
import os
from importlib import import_module

import pytest

from plait_serving.deployments.lazy import LazyControlNet, LazyEngine, LazyRankWorker, LazyReplica

LAZY = (LazyEngine, LazyControlNet, LazyRankWorker)


def kind(method):
    """How Serve would call it."""
    kinds = (inspect.isasyncgenfunction, inspect.iscoroutinefunction, inspect.isfunction)
    return next(check.__name__ for check in kinds if check(method))


def public(cls):
    """Methods by name, those of Python's own excepted."""
    return {name: it for name, it in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize("lazy", LAZY)
def test_a_lazy_class_has_exactly_its_targets_methods(lazy):
    """A method that is added to a deployment is reachable, and of the same kind; beside them every replica says where
    it is."""
    module, _, name = lazy.target.partition(":")
    own = {name: it for name, it in public(LazyReplica).items() if name in {"whereabouts", "record_autoscaling_stats"}}
    target = {**own, **public(getattr(import_module(module), name))}
    assert {name: kind(it) for name, it in public(lazy).items()} == {name: kind(it) for name, it in target.items()}


class Target:
    """What the class below stands for."""

    def __init__(self, log):
        self.log = log

    async def ask(self, question, *, loudly=False):
        return question.upper() if loudly else question

    async def count(self, to):
        try:
            for i in range(to):
                yield i
        finally:
            self.log.append("closed")

    def reconfigure(self, user_config):
        if not user_config:
            raise ValueError("no knobs")
        self.log.append(user_config)

    def __del__(self):
        self.log.append("gone")


class LazyTarget(LazyReplica, target=f"{__name__}:Target", calls=("ask",), streams=("count",)):
    """Stands for `Target`."""


async def test_calls_streams_and_errors_are_passed_on():
    """Arguments, results, exceptions, and the end of a stream that is left early."""
    log = []
    lazy = LazyTarget(log)
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


async def test_threads_are_settled_before_the_import(monkeypatch):
    """OpenMP reads its environment once, when torch is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    LazyTarget([], omp_wait="passive")
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


async def test_what_a_replica_reports_to_serve_includes_where_it_is(monkeypatch):
    """Beside what its target reports, if it does."""
    monkeypatch.setattr("plait_serving.deployments.lazy.whereabouts", lambda: {"plait_node": 7.0})
    lazy = LazyTarget([])
    assert await lazy.whereabouts() == await lazy.record_autoscaling_stats() == {"plait_node": 7.0}

    async def pressure(target):
        return {"pressure": 0.5}

    monkeypatch.setattr(Target, "record_autoscaling_stats", pressure, raising=False)
    assert await lazy.record_autoscaling_stats() == {"pressure": 0.5, "plait_node": 7.0}
