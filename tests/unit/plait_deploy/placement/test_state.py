"""The state of a cluster: what is free, and what cannot be taken or given back."""

from __future__ import annotations

import numpy as np
import pytest

from plait_deploy.errors import ClusterError, PlacementError, TaskError
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Task, TaskClass, TaskPlacement, classes_of

HALF = Task(cpu_milli=2_000, memory_mib=100, gpus=1, gpu_milli=500)
PAIR = Task(cpu_milli=2_000, memory_mib=100, gpus=2, gpu_milli=1000)


@pytest.fixture
def state() -> ClusterState:
    """A node with two GPUs and one with none."""
    return ClusterState(
        [
            ClusterNode(name="gpu", cpu_milli=8_000, memory_mib=1_000, gpus=2, gpu_model="A"),
            ClusterNode(name="cpu", cpu_milli=4_000, memory_mib=1_000),
        ]
    )


def test_sums_follow_what_is_placed(state):
    """The arrays that policies read agree with the devices."""
    state.place(HALF, TaskPlacement(node=0, devices=(1,)))
    assert state.devices.tolist() == [[1000, 500], [0, 0]]
    assert (state.gpu_free[0], state.whole[0], state.widest[0], state.cpu[0], state.memory[0]) == (
        1500,
        1,
        1000,
        6000,
        900,
    )
    assert state.running[0].tolist() == [0, 1, 0, 0]
    assert state.clock == 1


@pytest.mark.parametrize(
    ("task", "devices"),
    [
        (HALF, (0, 1)),
        (HALF, ()),
        (PAIR, (0, 0)),
        (Task(cpu_milli=9_000), ()),
        (Task(cpu_milli=1, memory_mib=1_001), ()),
    ],
)
def test_what_does_not_fit_is_refused(state, task, devices):
    """With the node's name, and nothing is taken."""
    with pytest.raises(TaskError, match="node gpu"):
        state.place(task, TaskPlacement(node=0, devices=devices))
    assert state.clock == 0


def test_what_was_not_placed_cannot_be_released(state):
    """More free than there is would be an invention."""
    with pytest.raises(TaskError, match="was not placed"):
        state.release(HALF, TaskPlacement(node=0, devices=(0,)))
    assert state.clock == 0


def test_devices_are_those_that_ray_takes(state):
    """The fullest with room for a part; the first free ones else."""
    state.place(HALF, TaskPlacement(node=0, devices=(1,)))
    assert state.best_fit(HALF, 0).devices == (1,)
    assert state.best_fit(Task(cpu_milli=0, gpus=1, gpu_milli=600), 0).devices == (0,)
    assert state.best_fit(Task(cpu_milli=0, gpus=1, gpu_milli=1000), 0).devices == (0,)


def test_fits_looks_at_devices_and_models(state):
    """A sum that suffices is not enough, and a task may name models."""
    nodes = np.arange(2)
    state.place(HALF, TaskPlacement(node=0, devices=(0,)))
    assert state.fits(PAIR, nodes, None).tolist() == [False, False]
    assert state.fits(HALF, nodes, None).tolist() == [True, False]
    named = Task(cpu_milli=0, gpus=1, gpu_milli=500, gpu_models=frozenset("B"))
    assert state.fits(named, nodes, state.allows(named)).tolist() == [False, False]
    assert state.fits(Task(cpu_milli=4_000), nodes, None).tolist() == [True, True]


def test_a_node_takes_so_many_of_a_group(state):
    """The limit is the task's; others of the node do not count, and a departure makes room."""
    one = Task(cpu_milli=100, group="shop", per_node=1)
    at, nodes = TaskPlacement(node=0, devices=()), np.arange(2)
    state.place(Task(cpu_milli=100, group="feed"), at)
    assert state.fits(one, nodes, None).tolist() == [True, True]
    state.place(one, at)
    assert state.fits(one, nodes, None).tolist() == [False, True]
    clock = state.clock
    with pytest.raises(TaskError, match="node gpu has 1 tasks of shop already"):
        state.place(one, at)
    assert state.clock == clock
    state.release(one, at)
    assert state.fits(one, nodes, None).tolist() == [True, True]


def test_cpu_is_scarcer_where_more_of_it_is_taken():
    """By shares of the whole cluster; GPUs that are not there are never scarce."""
    state = ClusterState([ClusterNode(name="a", cpu_milli=10_000, memory_mib=0, gpus=2)] * 2)
    assert not state.cpu_scarcer
    state.place(Task(cpu_milli=4_000), TaskPlacement(node=0, devices=()))
    assert state.cpu_scarcer
    state.place(Task(cpu_milli=1_000, gpus=1, gpu_milli=1_000), TaskPlacement(node=1, devices=(0,)))
    assert not state.cpu_scarcer
    bare = ClusterState([ClusterNode(name="b", cpu_milli=1_000, memory_mib=0)])
    bare.place(Task(cpu_milli=1), TaskPlacement(node=0, devices=()))
    assert bare.cpu_scarcer


def test_turnover_is_the_share_that_left(state):
    """A refused release is none."""
    at, task = TaskPlacement(node=0, devices=()), Task(cpu_milli=100)
    assert state.turnover == 0
    for _ in range(4):
        state.place(task, at)
    assert state.turnover == 0
    state.release(task, at)
    assert state.turnover == 0.25
    with pytest.raises(TaskError):
        state.release(Task(cpu_milli=1_000_000_000), at)
    assert state.turnover == 0.25


@pytest.mark.parametrize(
    "needs",
    [
        {"gpus": 1},
        {"gpu_milli": 500},
        {"gpus": 2, "gpu_milli": 500},
        {"gpus": 1, "gpu_milli": 1001},
        {"gpus": -1, "gpu_milli": 1000},
        {"per_node": -1},
    ],
)
def test_a_task_that_cannot_exist_is_refused(needs):
    """Half of each of two GPUs, GPUs without a part, and the like."""
    with pytest.raises(TaskError):
        Task(cpu_milli=1_000, **needs)


def test_empty_clusters_and_negative_nodes_are_refused():
    """Both are mistakes in a description."""
    with pytest.raises(ClusterError):
        ClusterState([])
    with pytest.raises(PlacementError, match="node a"):
        ClusterNode(name="a", cpu_milli=-1, memory_mib=0)


def test_classes_are_the_commonest_first():
    """Memory does not tell classes apart."""
    small = [Task(cpu_milli=1_000, memory_mib=mib, gpus=1, gpu_milli=500) for mib in range(95)]
    rare = [Task(cpu_milli=2_000)] * 5
    assert classes_of([*rare, *small]) == (
        TaskClass(task=Task(cpu_milli=1_000, gpus=1, gpu_milli=500), weight=95),
        TaskClass(task=Task(cpu_milli=2_000), weight=5),
    )
