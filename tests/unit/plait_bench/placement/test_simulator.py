"""Replays: what arrives, what departs, and what is counted."""

from __future__ import annotations

import pytest

from plait_bench.placement.filling import churn, fill, inflated
from plait_deploy.errors import TaskError
from plait_deploy.placement.policies import make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, classes_of
from suites.placement_policies import sample_tasks

ONE = Task(cpu_milli=0, gpus=1, gpu_milli=WHOLE)
HALF = Task(cpu_milli=0, gpus=1, gpu_milli=600)


def test_inflation_ends_at_the_load():
    """All tasks of the list once, then random ones; one more would pass 130 %."""
    tasks = sample_tasks(40, 1)
    total = 4 * sum(task.total_milli for task in tasks)
    found = inflated(tasks, total, 42)
    asked = sum(task.total_milli for task in found)
    assert 1.3 * total - 4 * WHOLE < asked <= 1.3 * total
    assert sorted(map(repr, found[: len(tasks)])) == sorted(map(repr, tasks))
    assert inflated(tasks, total, 42) == found != inflated(tasks, total, 43)


def test_a_list_that_asks_for_more_is_cut():
    """Down to the load, as the published simulator does."""
    found = inflated([ONE] * 100, 10 * WHOLE, 42)
    assert len(found) == 13


def test_a_list_without_gpus_has_no_load():
    """It would be inflated for ever."""
    with pytest.raises(TaskError):
        inflated([Task(cpu_milli=1)], 1000, 42)


def test_what_is_counted_is_what_is_there():
    """Two devices, three tasks of 0.6: one is refused, 0.8 are idle, and none of it is of use."""
    state = ClusterState([ClusterNode(name="a", cpu_milli=0, memory_mib=0, gpus=2)])
    ended = fill(state, [HALF] * 3, make_policy("first-fit", ()), classes_of([HALF, Task(cpu_milli=1)]))
    assert ended.allocated == pytest.approx(0.6)
    assert ended.stranded == pytest.approx(0.4)


def test_departures_keep_the_load():
    """Whole GPUs on a large cluster at 60 %: the mean over time is the load (5 sd)."""
    state = ClusterState([ClusterNode(name=str(at), cpu_milli=0, memory_mib=0, gpus=8) for at in range(50)])
    classes = classes_of([ONE])
    ended = churn(state, [ONE], make_policy("plait", classes), classes, seed=1, load=0.6, arrivals=4_000)
    # 400 GPUs, 240 in use: sd of a Poisson mean over 8 lifetimes, 2 relaxation times each way.
    assert ended.allocated == pytest.approx(0.6, abs=5 * (2 * 240 / 8) ** 0.5 / 400)
    assert ended.stranded == 0
