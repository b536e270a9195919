"""Replays at recorded times, against a twin that counts in dictionaries."""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import pytest

from plait_deploy.placement import naive
from plait_deploy.placement.policies import POLICIES, make_policy
from plait_deploy.placement.recorded import replay, stranded
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Stay, Task, TaskPlacement, classes_of

NODES = [ClusterNode(name=str(at), cpu_milli=30_000, memory_mib=0, gpus=at % 3) for at in range(6)]
KINDS = [
    Task(cpu_milli=4_000, group="a/CN", per_node=2),
    Task(cpu_milli=6_000, group="a/CN"),
    Task(cpu_milli=1_000, gpus=1, gpu_milli=WHOLE, group="a/HN", per_node=1),
    Task(cpu_milli=1_000, gpus=1, gpu_milli=400, group="b/HN", per_node=3),
    Task(cpu_milli=2_000, group="b/CN"),
]


def some_stays(seed: int, count: int = 160) -> list[Stay]:
    """Random kinds, at different times, some of which stay for ever."""
    rng = np.random.default_rng(seed)
    arrives = np.sort(rng.random(count) * 100)
    lives = np.where(rng.random(count) < 0.2, inf, rng.exponential(20, count))
    kinds = rng.integers(len(KINDS), size=count)
    return [
        Stay(task=KINDS[kind], arrives_s=float(at), leaves_s=float(at + life))
        for kind, at, life in zip(kinds, arrives, lives, strict=True)
    ]


class Watched:
    """A policy, and what it was asked for and said."""

    def __init__(self, policy) -> None:
        self.policy, self.said = policy, []

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Ask the policy."""
        at = self.policy.choose(state, task)
        self.said.append((task, at))
        return at


def naive_first_fit(stays: list[Stay]) -> list[int | None]:
    """The first node with room and fewer of the group than the task's limit; one instance at a time."""
    there: list[tuple[Stay, int, int]] = []
    found: list[int | None] = []
    for stay in stays:
        there = [each for each in there if each[0].leaves_s > stay.arrives_s]
        found.append(None)
        for at, node in enumerate(NODES):
            mine = [(other.task, device) for other, where, device in there if where == at]
            task = stay.task
            if sum(other.cpu_milli for other, _ in mine) + task.cpu_milli > node.cpu_milli:
                continue
            if task.per_node and sum(other.group == task.group for other, _ in mine) >= task.per_node:
                continue
            free = [
                (WHOLE - sum(other.gpu_milli for other, where in mine if where == device), device)
                for device in range(node.gpus)
            ]
            room = [each for each in free if each[0] >= task.gpu_milli]
            if task.gpus and not room:
                continue
            there.append((stay, at, min(room)[1] if task.gpus else -1))
            found[-1] = at
            break
    return found


@pytest.mark.parametrize("seed", range(4))
def test_first_fit_is_that_of_the_twin(seed):
    """Choice by choice, with limits per node, departures and refusals."""
    stays = some_stays(seed)
    policy = Watched(make_policy("first-fit", ()))
    ended = replay(ClusterState(NODES), stays, policy, seed=seed, looks=3, end_s=100)
    wanted = naive_first_fit(stays)
    assert [at.node if at else None for _, at in policy.said] == wanted
    assert ended.refused == wanted.count(None) > 0
    limits = [stay.task for stay, at in zip(stays, wanted, strict=True) if at is None]
    assert any(task.per_node for task in limits)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_passes_a_limit(name):
    """Counted apart from the state: instances of a group there when one with a limit came, fewer than its limit."""
    stays = some_stays(9)
    policy = Watched(make_policy(name, classes_of(stay.task for stay in stays), seed=1))
    replay(ClusterState(NODES), stays, policy, seed=1, looks=1, end_s=100)
    there: list[tuple[Stay, int]] = []
    at_limit = 0
    for stay, (task, at) in zip(stays, policy.said, strict=True):
        assert stay.task == task
        there = [each for each in there if each[0].leaves_s > stay.arrives_s]
        counts = Counter(node for other, node in there if other.task.group == task.group)
        if at is not None:
            assert not task.per_node or counts[at.node] < task.per_node
            there.append((stay, at.node))
        at_limit += bool(task.per_node) and max(counts.values(), default=0) >= task.per_node
    assert at_limit


def test_what_is_stranded_is_the_sum_of_the_docstring():
    """For a state in the middle of a replay, class by class and node by node, with counts per group apart."""
    rng = np.random.default_rng(5)
    state, weights = ClusterState(NODES), Counter({kind: at + 1 for at, kind in enumerate(KINDS)})
    policy = make_policy("random", (), seed=3)
    counts: Counter[tuple[int, str]] = Counter()
    for kind in rng.integers(len(KINDS), size=14).tolist():
        if at := policy.choose(state, KINDS[kind]):
            state.place(KINDS[kind], at)
            counts[at.node, KINDS[kind].group] += 1
    cpu = gpu = gpu_weight = 0
    for task, weight in weights.items():
        gpu_weight += weight * task.gpus
        for node, shape in enumerate(NODES):
            devices = state.devices[node, : shape.gpus].tolist()
            fits = naive.can_run(task, int(state.cpu[node]), devices, "")
            fits = fits and not (task.per_node and counts[node, task.group] >= task.per_node)
            cpu += 0 if fits else weight * int(state.cpu[node])
            if task.gpus:
                gpu += weight * sum(free for free in devices if not fits or free < task.gpu_milli)
    found = stranded(state, weights)
    assert found.cpu_milli == pytest.approx(cpu / weights.total())
    assert found.gpu_milli == pytest.approx(gpu / gpu_weight)
    assert 0 < found.gpu_milli < state.gpu_free.sum()


def test_shares_are_means_over_time():
    """One GPU for 30 of 100 s, a core all the time from 50 s on; what came too late is not seen."""
    nodes = [ClusterNode(name="a", cpu_milli=2_000, memory_mib=0, gpus=1)]
    gpu, core = Task(cpu_milli=0, gpus=1, gpu_milli=WHOLE), Task(cpu_milli=1_000)
    stays = [Stay(task=gpu, arrives_s=10, leaves_s=40), Stay(task=core, arrives_s=50, leaves_s=inf)]
    ended = replay(ClusterState(nodes), stays, make_policy("first-fit", ()), seed=0, looks=100, end_s=100)
    assert ended.gpu_used == pytest.approx(300)
    assert ended.cpu_used == pytest.approx(500)
    assert ended.refused == 0
    assert ended.decisions_s.shape == (2,)
    # Once the GPU is taken, the CPU is of no use to a GPU task: half of the classes, 30 % of the time, 2 cores.
    assert ended.stranded.cpu_milli == pytest.approx(0.5 * 0.3 * 2_000)
    assert ended.stranded.gpu_milli == 0


def test_what_arrives_together_comes_in_an_order_of_the_seed():
    """The file's order is nobody's."""
    stays = [Stay(task=Task(cpu_milli=at + 1), arrives_s=0, leaves_s=inf) for at in range(20)]

    def order(seed: int) -> list[int]:
        policy = Watched(make_policy("first-fit", ()))
        replay(ClusterState(NODES), stays, policy, seed=seed, looks=1, end_s=1)
        return [task.cpu_milli for task, _ in policy.said]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(1, 21))
