"""The numbers of replicas by class of nodes: what stands stays, what is lost moves, waves find their devices."""

from __future__ import annotations

import itertools
import random

import pytest

from plait_deploy.placement.policies import make_policy
from plait_deploy.placement.recount import Standing, recount
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Demand, demand_classes, task_of

CLASSES = ("a", "b", "c")


def demand(name, gpus, replicas, cpus=1.0):
    return Demand(name=name, task=task_of(name, num_cpus=cpus, num_gpus=gpus), replicas=replicas)


def node(name, gpus=2, cpus=16):
    return ClusterNode(name=name, cpu_milli=cpus * WHOLE, memory_mib=1, gpus=gpus)


def run(demands, standing=(), classes=CLASSES, gpus=2, policy="plait"):
    state = ClusterState([node(f"n{number}", gpus) for number, _ in enumerate(classes)])
    return recount(state, classes, demands, standing, make_policy(policy, demand_classes(demands)))


def total(found, name):
    return sum(count for (of, _), count in found.counts.items() if of == name)


def settled(demands, classes=CLASSES, gpus=2):
    """Recounts until nothing is held back, each replica where Ray would have put it, in the order of its start."""
    rows = [[WHOLE] * gpus for _ in classes]
    standing: list[Standing] = []
    chance = random.Random(1)
    for _ in range(20):
        found = run(demands, standing, classes, gpus)
        have = {key: sum((it.name, it.node_class) == key for it in standing) for key in found.counts}
        new = [key for key, count in found.counts.items() for _ in range(count - have[key])]
        chance.shuffle(new)
        for name, node_class in new:
            task = next(it.task for it in demands if it.name == name)
            at = classes.index(node_class)
            state = ClusterState([node("n", gpus)])
            state.devices[0] = rows[at]
            devices = state.best_fit(task, 0).devices
            assert len(devices) == task.gpus, "Ray found no device"
            for device in devices:
                rows[at][device] -= task.gpu_milli
                assert rows[at][device] >= 0
            standing.append(Standing(name=name, node_class=node_class, node=at, devices=devices))
        if not new:
            return found, standing
    raise AssertionError("it never came to an end")


def test_waves_find_devices_in_whatever_order_they_start():
    """0.6, 0.4, 0.5 and 0.5 fill two devices, but not in every order: so they do not start at once."""
    demands = [demand("big", 0.6, 1), demand("small", 0.4, 1), demand("half", 0.5, 2)]
    first = run(demands, classes=("a",))
    assert first.held_back > 0
    started = [it.task for it in demands for _ in range(total(first, it.name))]
    for order in itertools.permutations(started):
        state = ClusterState([node("n")])
        for task in order:
            devices = state.best_fit(task, 0).devices
            state.devices[0][list(devices)] -= task.gpu_milli
    found, _ = settled(demands, classes=("a",))
    assert sum(found.counts.values()) == 4


@pytest.mark.parametrize(("at", "left"), [({"node": 0, "devices": (0,)}, (1, 0)), ({}, (0, 1))])
def test_of_two_the_one_goes_whose_end_strands_less_unless_one_has_not_started(at, left):
    """Class a's device holds another half: without its neighbour it would be a half device that "whole" cannot use.
    What has not started Serve stops in any case: what runs is worth more than a better plan."""
    demands = [demand("half", 0.5, 1), demand("other", 0.5, 1), demand("whole", 1, 3)]
    standing = [
        Standing(name="half", node_class="a", **at),
        Standing(name="other", node_class="a", node=0, devices=(0,)),
        Standing(name="half", node_class="b", node=1, devices=(0,)),
    ]
    found = run(demands, standing)
    assert (found.counts["half", "a"], found.counts["half", "b"]) == left


def test_a_replica_that_found_no_device_is_placed_elsewhere():
    """It was told to start in class a, whose devices have turned out to be too full."""
    demands = [demand("x", 0.6, 3)]
    standing = [
        Standing(name="x", node_class="a", node=0, devices=(0,)),
        Standing(name="x", node_class="a", node=0, devices=(1,)),
        Standing(name="x", node_class="a"),
    ]
    found = run(demands, standing)
    assert found.counts["x", "a"] == 2
    assert total(found, "x") == 3


def test_what_cannot_be_where_it_is_said_to_be_is_placed_anew():
    """Reports are of different moments: two on one device, and one whose devices nobody knows."""
    where = {"name": "x", "node_class": "a", "node": 0}
    standing = [Standing(**where, devices=(0,)), Standing(**where, devices=(0,)), Standing(**where)]
    found = run([demand("x", 0.6, 3)], standing)
    assert (found.counts["x", "a"], total(found, "x")) == (2, 3)


@pytest.mark.parametrize("seed", range(8))
def test_random_demands_end_with_every_replica_on_devices_of_its_own(seed):
    """Whatever is asked for, waves end, nothing is placed twice, and only what has no room is left out."""
    chance = random.Random(seed)
    demands = [
        demand(f"m{number}", chance.choice((0.1, 0.25, 0.3, 0.45, 0.6, 0.75, 1, 2)), chance.randint(1, 4), 0.5)
        for number in range(6)
    ]
    found, standing = settled(demands, gpus=4)
    for each in demands:
        assert total(found, each.name) + found.unplaced.get(each.name, 0) == each.replicas
    assert len(standing) == sum(found.counts.values())
