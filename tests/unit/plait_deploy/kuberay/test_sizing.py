"""How many pods carry the replicas, held against a search over all ways to place them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from plait_deploy.kuberay.render import pods_for
from plait_deploy.placement.values import WHOLE, ClusterNode, Reservation


def work(name="a", cpus=1.0, gpus=0.0, least=1, most=None):
    return Reservation(name=name, num_cpus=cpus, num_gpus=gpus, min_replicas=least, max_replicas=most or least)


def pod(cpus, gpus=0):
    return ClusterNode(name="deploy.cpu", cpu_milli=cpus * WHOLE, memory_mib=0, gpus=gpus)


@pytest.mark.parametrize(
    ("works", "cpus", "gpus", "pods"),
    [
        ([work(cpus=2, least=4)], 4, 0, 2),
        ([work(cpus=3, least=2), work("b", cpus=1, least=2)], 4, 0, 2),
        ([work(gpus=0.5, least=3)], 8, 1, 2),
        ([work(gpus=0.6, least=2)], 8, 1, 2),  # fractions of one GPU do not come from two
        ([work(gpus=2, least=1), work("b", gpus=0.5, least=2)], 8, 3, 1),
        ([work(gpus=2, least=2)], 8, 3, 2),
        ([work(cpus=0.1, least=40)], 4, 0, 1),
    ],
)
def test_pods_carry_whole_and_shared_gpus(works, cpus, gpus, pods):
    """Counts that one can check by hand."""
    assert pods_for(works, pod(cpus, gpus), at_most=True) == pods


def test_fewest_and_most_replicas():
    """Replicas that follow the load need pods for the most of them, and fewer to start with."""
    works = [work(cpus=2, least=1, most=6)]
    assert (pods_for(works, pod(4), at_most=False), pods_for(works, pod(4), at_most=True)) == (1, 3)


@given(
    strategies.lists(strategies.tuples(strategies.integers(1, 8), strategies.integers(1, 3)), min_size=1, max_size=6)
)
def test_never_fewer_than_the_cores_need_and_at_most_twice_as_many(sizes):
    """First fit leaves no two pods half empty."""
    works = [work(str(i), cpus=float(cpus), least=count) for i, (cpus, count) in enumerate(sizes)]
    cores = sum(cpus * count for cpus, count in sizes)
    pods = pods_for(works, pod(8), at_most=True)
    assert cores / 8 <= pods <= max(1, 2 * cores / 8)
