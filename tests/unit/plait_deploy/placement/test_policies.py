"""What each policy prefers, on clusters small enough to see it."""

from __future__ import annotations

import numpy as np
import pytest

from plait_bench.placement.filling import fill, inflated, shuffled
from plait_deploy.errors import TaskError
from plait_deploy.placement.device_tables import FragmentTables
from plait_deploy.placement.policies import make_policy
from plait_deploy.placement.policies.baselines import FgdPolicy, commonest, integer_scores
from plait_deploy.placement.policies.plait import TURNS_OVER, ExpectedUse
from plait_deploy.placement.policies.scored import Ties, leftover
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskClass, TaskPlacement, classes_of

HALF = Task(cpu_milli=1_000, gpus=1, gpu_milli=500)
ONE = Task(cpu_milli=1_000, gpus=1, gpu_milli=WHOLE)
PAIR = Task(cpu_milli=1_000, gpus=2, gpu_milli=WHOLE)
CPU = Task(cpu_milli=1_000)


def cluster(*gpus: int, cpu_milli: int = 8_000) -> ClusterState:
    """Nodes with that many GPUs."""
    return ClusterState(
        [ClusterNode(name=str(at), cpu_milli=cpu_milli, memory_mib=0, gpus=n) for at, n in enumerate(gpus)]
    )


def mixed(times: int) -> list[ClusterNode]:
    """Nodes that differ in CPU per GPU."""
    shapes = [(64_000, 8), (96_000, 8), (128_000, 4)] * times
    return [ClusterNode(name=str(at), cpu_milli=cpu, memory_mib=0, gpus=gpus) for at, (cpu, gpus) in enumerate(shapes)]


def chosen(name: str, state: ClusterState, task: Task, *others: Task) -> TaskPlacement:
    """Where a policy that knows these tasks puts the first."""
    at = make_policy(name, classes_of([task, *others]), seed=1).choose(state, task)
    assert at is not None
    return at


def test_first_fit_and_best_fit():
    """The first in order; the one with the least left over."""
    state = cluster(0, 4, 2)
    assert chosen("first-fit", state, HALF).node == 1
    assert chosen("best-fit", state, HALF).node == 2


def test_dot_product_avoids_the_node_that_has_most_of_what_is_asked():
    """The smallest product of free and asked."""
    assert chosen("dot-product", cluster(8, 4), HALF).node == 1


def test_gpu_packing_uses_what_is_in_use():
    """A device in use, then a free one of a node in use, then an idle node."""
    state = cluster(2, 2)
    state.place(HALF, TaskPlacement(node=1, devices=(1,)))
    assert chosen("gpu-packing", state, HALF) == TaskPlacement(node=1, devices=(1,))
    assert chosen("gpu-packing", state, ONE) == TaskPlacement(node=1, devices=(0,))
    assert chosen("gpu-packing", state, PAIR) == TaskPlacement(node=0, devices=(0, 1))


def test_gpu_clustering_keeps_kinds_together():
    """Same kind only, mixed, idle, other kinds: in this order."""
    state = cluster(4, 4, 4, 4)
    state.place(ONE, TaskPlacement(node=0, devices=(0,)))
    state.place(HALF, TaskPlacement(node=1, devices=(0,)))
    state.place(ONE, TaskPlacement(node=1, devices=(1,)))
    state.place(HALF, TaskPlacement(node=3, devices=(0,)))
    order = []
    for node in (3, 1, 2, 0):
        at = chosen("gpu-clustering", state, HALF)
        order.append(at.node)
        state.place(
            Task(cpu_milli=8_000 - 1_000 * int(state.running[node].sum())), TaskPlacement(node=node, devices=())
        )
    assert order == [3, 1, 2, 0]


def test_ray_pack_prefers_nodes_in_use_and_spread_those_without_replicas():
    """Serve's two strategies."""
    state = cluster(4, 1, 4)
    state.place(HALF, TaskPlacement(node=0, devices=(0,)))
    assert chosen("ray-pack", state, HALF) == TaskPlacement(node=0, devices=(0,))
    assert chosen("ray-spread", state, HALF).node == 1


def test_ray_sees_sums_and_spills():
    """Two halves are no whole device: the replica ends on the first node that can take it."""
    state = cluster(2, 4)
    for device in (0, 1):
        state.place(HALF, TaskPlacement(node=0, devices=(device,)))
    assert chosen("ray-pack", state, ONE) == TaskPlacement(node=1, devices=(0,))


def test_random_draws_nodes_and_devices():
    """All that fit come up."""
    policy, state = make_policy("random", (), seed=3), cluster(2, 2)
    found = {policy.choose(state, HALF) for _ in range(60)}
    assert len(found) == 4  # a draw of 60 misses one of four with 4 (3/4)^60 < 1e-6


def test_fgd_leaves_what_the_average_task_can_use():
    """A half goes beside a half, a CPU task where there is no GPU."""
    state = cluster(2, 2, 0)
    state.place(HALF, TaskPlacement(node=1, devices=(1,)))
    for name in ("fgd", "plait"):
        assert chosen(name, state, HALF, ONE, ONE) == TaskPlacement(node=1, devices=(1,))
    busy = cluster(2, 0, cpu_milli=1_000)
    for name in ("fgd", "plait"):
        assert chosen(name, busy, CPU, ONE).node == 1


def test_ties_are_by_order_by_chance_or_by_packing():
    """The three rules, on nodes of equal score."""
    classes = classes_of([ONE])
    state = ClusterState(
        [ClusterNode(name=str(n), cpu_milli=cpu, memory_mib=0, gpus=1) for n, cpu in enumerate((9_000, 5_000, 7_000))]
    )
    by = {ties: FgdPolicy(classes, ties=ties, seed=5).choose(state, ONE) for ties in (Ties.FIXED, Ties.BEST_FIT)}
    assert {ties: at.node for ties, at in by.items() if at} == {Ties.FIXED: 0, Ties.BEST_FIT: 1}
    policy = FgdPolicy(classes, ties=Ties.RANDOM, seed=5)
    assert {at.node for _ in range(60) if (at := policy.choose(state, ONE))} == {0, 1, 2}


def test_the_published_score_is_a_whole_number():
    """int(100 sigmoid(gain)): 50 for no change, one step for some 0.04 GPU."""
    gains = np.array([0, -1, -4_100_000, 8_000_000_000, 3_900_000])
    assert integer_scores(gains, 100_000).tolist() == [50, 49, 48, 100, 50]


def test_fgd_knows_the_commonest_only():
    """The rare class is cut off at 95 %; `plait` knows it."""
    known = (TaskClass(task=HALF, weight=97), TaskClass(task=PAIR, weight=3))
    assert commonest(known) == known[:1]
    state = cluster(2, 1)
    assert FragmentTables(commonest(known), state).weight == 97
    assert chosen("plait", state, ONE, PAIR).node == 1


@pytest.mark.parametrize("tables", [ExpectedUse, FragmentTables])
def test_plait_follows_one_rule_while_a_cluster_fills_and_another_once_it_turns_over(tables):
    """The highest gain of the rule's tables, over all classes, with ties to the least left over. No class has two GPUs,
    so weights are counts."""
    tasks = made_up(3)
    classes = classes_of(tasks)
    state = ClusterState(mixed(3))
    policy = make_policy("plait", classes)
    turns, others = tables is FragmentTables, 0
    if turns:
        at = TaskPlacement(node=0, devices=())
        for _ in range(300):
            policy.choose(state, CPU)
            state.place(CPU, at)
            state.release(CPU, at)
    nodes = np.arange(len(state.nodes))
    for task in tasks[:150]:
        there = nodes[state.fits(task, nodes, None)]
        at = policy.choose(state, task)
        if not there.size:
            assert at is None
            continue
        gain, _ = tables(classes, state).gain(state, task, there)
        best = there[gain == gain.max()]
        assert at is not None
        assert at.node == best[leftover(state, task, best).argmin()]
        other = (ExpectedUse if turns else FragmentTables)(classes, state).gain(state, task, there)[0]
        others += at.node not in there[other == other.max()]
        state.place(task, at)
    assert (state.turnover >= TURNS_OVER) == turns
    assert others


@pytest.mark.parametrize("tables", [FragmentTables, ExpectedUse])
def test_scores_need_a_class(tables):
    """Nothing can be said about the tasks to come if there are none."""
    with pytest.raises(TaskError):
        tables([], cluster(1))


def made_up(seed: int) -> list[Task]:
    """Tasks as in the public lists in small: many large parts that leave holes, some that fill them."""
    rng = np.random.default_rng(seed)
    kinds = [
        (8_000, 810, 4), (6_000, 470, 3), (2_000, 320, 2), (4_000, 230, 2), (4_000, 650, 2), (3_000, 130, 1),
        (12_000, WHOLE, 8), (16_000, 0, 1),
    ]  # fmt: skip
    tasks = [Task(cpu_milli=cpu, gpus=min(milli, 1), gpu_milli=milli) for cpu, milli, _ in kinds]
    odds = np.array([weight for *_, weight in kinds], float)
    return [tasks[at] for at in rng.choice(len(kinds), size=400, p=odds / odds.sum())]


def test_plait_allocates_more_than_fgd_and_first_fit():
    """Where nodes differ in CPU per GPU, mean of eight seeds: by points, not by tenths; and random is far behind."""
    nodes = mixed(10)
    means = {}
    for name in ("plait", "fgd", "first-fit", "random"):
        ends = []
        for seed in range(8):
            state, tasks = ClusterState(shuffled(nodes, seed)), made_up(seed)
            classes = classes_of(tasks)
            come = inflated(tasks, state.total_milli, seed)
            ends.append(fill(state, come, make_policy(name, classes, seed=seed), classes).allocated)
        means[name] = float(np.mean(ends))
    assert means["plait"] > max(means["fgd"], means["first-fit"]) + 0.02
    assert min(means["fgd"], means["first-fit"]) > means["random"] + 0.02
