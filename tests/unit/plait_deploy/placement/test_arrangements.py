"""Split and monolithic recommendation: what an app's instances become, and how many nodes there are."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

import pytest

from plait_deploy.placement.arrangements import (
    GPU_SHAPE,
    busiest,
    monolithic,
    nodes_needed,
    placeable,
    split,
    trace_end_s,
)
from plait_deploy.placement.dlrm_trace import Instance
from plait_deploy.placement.errors import TraceError
from plait_deploy.placement.values import WHOLE, ClusterNode, Stay, Task

SMALL = ClusterNode(name="s", cpu_milli=10 * WHOLE, memory_mib=0, gpus=2)


def cn(cores: int = 48, *, app: str = "a", arrives: float = 0, leaves: float = inf, limit: int = 0) -> Instance:
    """A CN."""
    task = Task(cpu_milli=cores * WHOLE, group=f"{app}/CN", per_node=limit)
    return Instance(app=app, role="CN", stay=Stay(task=task, arrives_s=arrives, leaves_s=leaves))


def hn(cores: int = 8, *, app: str = "a", arrives: float = 0, leaves: float = inf, limit: int = 0) -> Instance:
    """An HN."""
    task = Task(cpu_milli=cores * WHOLE, gpus=1, gpu_milli=WHOLE, group=f"{app}/HN", per_node=limit)
    return Instance(app=app, role="HN", stay=Stay(task=task, arrives_s=arrives, leaves_s=leaves))


def needs(pools) -> list[tuple[int, int]]:
    """CPU and GPU of each instance of the only pool."""
    (pool,) = pools
    return [(stay.task.cpu_milli, stay.task.total_milli) for stay in pool.stays]


def test_split_halves_have_nodes_of_their_own():
    """CNs on nodes without GPUs."""
    first, second = split([cn(), hn(), hn(arrives=5)])
    assert {node.gpus for node in first.nodes} == {0}
    assert [stay.task.cpu_milli for stay in first.stays] == [48 * WHOLE]
    assert {node.gpus for node in second.nodes} == {8}
    assert len(second.stays) == 2


def test_a_monolithic_instance_has_the_cores_of_both_halves():
    """Two CNs for an HN: each takes half of its cores, and a GPU, or half of one if GPUs are shared."""
    app = [cn(48, limit=3), cn(48, arrives=0, leaves=100), cn(96, arrives=50, leaves=100), hn(8, leaves=75)]
    # CN instance-seconds 100 + 100 + 50, HN 75, of 100 s that the trace names.
    assert trace_end_s(app) == 100
    more = ceil(8 * WHOLE * 75 / 250)
    assert needs(monolithic(app, shared=False)) == [(48_000 + more, 1000)] * 2 + [(96_000 + more, 1000)]
    assert needs(monolithic(app, shared=True)) == [(48_000 + more, 300)] * 2 + [(96_000 + more, 300)]
    (pool,) = monolithic(app, shared=False)
    assert [(stay.arrives_s, stay.leaves_s) for stay in pool.stays] == [(0, inf), (0, 100), (50, 100)]
    assert (pool.stays[0].task.group, pool.stays[0].task.per_node) == ("a/CN", 3)


def test_an_app_with_more_hns_is_as_many_instances():
    """Each HN takes part of a CN's cores; its GPU is whole in both."""
    app = [cn(48), hn(8, limit=4), hn(8), cn(96, app="b", leaves=10), hn(2, app="b", leaves=10)]
    for shared in (False, True):
        assert needs(monolithic(app, shared=shared)) == [(32_000, 1000)] * 2 + [(98_000, 1000)]
    assert monolithic(app, shared=True)[0].stays[0].task.per_node == 4


def test_what_both_arrangements_need_in_total_is_the_same():
    """Core-seconds, and GPU-seconds if GPUs are shared, up to rounding to thousandths."""
    apps = [
        *(cn(64, app="x", arrives=at, leaves=at + 30) for at in range(0, 60, 7)),
        *(hn(12, app="x", arrives=at, leaves=at + 25) for at in range(0, 60, 20)),
        *(cn(96, app="y", arrives=at) for at in range(0, 50, 20)),
        *(hn(8, app="y", arrives=at) for at in range(0, 60, 9)),
    ]
    end = trace_end_s(apps)

    def total(pools, of) -> float:
        stays = [stay for pool in pools for stay in pool.stays]
        return sum(of(stay.task) * (min(stay.leaves_s, end) - stay.arrives_s) for stay in stays)

    one, other = split(apps), monolithic(apps, shared=True)
    assert total(other, lambda task: task.cpu_milli) == pytest.approx(total(one, lambda task: task.cpu_milli), rel=1e-3)
    assert total(other, lambda task: task.total_milli) == pytest.approx(
        total(one, lambda task: task.total_milli), rel=3e-3
    )


def test_apps_that_fit_no_node_are_left_out_whole():
    """192 cores are more than a node has; the app's HNs go too."""
    assert placeable([cn(192), cn(48), hn(), cn(app="b"), hn(app="b")]) == [cn(app="b"), hn(app="b")]
    with pytest.raises(TraceError, match="every app has an instance of more than 128 cores"):
        placeable([cn(192), hn()])


def test_the_busiest_moment_is_that_of_the_scarce_resource():
    """6 cores of 10 are less than both GPUs; who leaves then is gone."""
    early = [Stay(task=Task(cpu_milli=6_000), arrives_s=0, leaves_s=5)]
    late = [Stay(task=Task(cpu_milli=500, gpus=1, gpu_milli=WHOLE), arrives_s=at, leaves_s=inf) for at in (5, 6)]
    assert busiest(SMALL, early + late) == [stay.task for stay in late]
    assert busiest(SMALL, []) == []


def test_nodes_are_what_first_fit_fills_and_a_ninth_more():
    """Limits per node count as well: 9 nodes for 9 instances of which a node takes one, and 10 at 90 %."""
    assert nodes_needed(SMALL, [Task(cpu_milli=cores * WHOLE) for cores in (4, 4, 6, 6)]) == 2
    one = hn(8, limit=1)
    assert nodes_needed(GPU_SHAPE, [one.stay.task] * 9) == 9
    assert nodes_needed(GPU_SHAPE, [replace(one.stay.task, per_node=0)] * 9) == 2
    assert len(split([cn(), *([one] * 9)])[1].nodes) == 10
    with pytest.raises(TraceError, match="fits no node of 10 cores"):
        nodes_needed(SMALL, [one.stay.task, cn().stay.task])
