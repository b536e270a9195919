"""The conformance suite of placement policies: what `Policy` promises, on small made-up clusters.

Derive a class named `Test...` and give it a fixture `make`, which returns `(classes, seed) -> Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from plait_deploy.placement.policies.scored import Policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskClass, TaskPlacement, classes_of

MakePolicy = Callable[[Sequence[TaskClass], int], Policy]


def sample_nodes() -> list[ClusterNode]:
    """Return a small cluster: 8, 4 and 1 GPUs of two models, a node without GPUs, and one with little CPU."""
    return [
        ClusterNode(name="eight", cpu_milli=96_000, memory_mib=400_000, gpus=8, gpu_model="A"),
        ClusterNode(name="host", cpu_milli=64_000, memory_mib=200_000),
        ClusterNode(name="four", cpu_milli=48_000, memory_mib=200_000, gpus=4, gpu_model="B"),
        ClusterNode(name="poor", cpu_milli=6_000, memory_mib=50_000, gpus=4, gpu_model="A"),
        ClusterNode(name="one", cpu_milli=16_000, memory_mib=60_000, gpus=1, gpu_model="B"),
    ]


def sample_tasks(count: int, seed: int) -> list[Task]:
    """Return random tasks: without GPUs, parts of one, whole ones, several, and some that name a model."""
    rng = np.random.default_rng(seed)
    kinds = [
        Task(cpu_milli=4_000, memory_mib=8_000),
        Task(cpu_milli=2_000, memory_mib=4_000, gpus=1, gpu_milli=810),
        Task(cpu_milli=1_500, memory_mib=4_000, gpus=1, gpu_milli=470),
        Task(cpu_milli=500, memory_mib=1_000, gpus=1, gpu_milli=190),
        Task(cpu_milli=6_000, memory_mib=16_000, gpus=1, gpu_milli=WHOLE),
        Task(cpu_milli=9_000, memory_mib=30_000, gpus=2, gpu_milli=WHOLE),
        Task(cpu_milli=20_000, memory_mib=60_000, gpus=4, gpu_milli=WHOLE),
        Task(cpu_milli=1_000, memory_mib=4_000, gpus=1, gpu_milli=300, gpu_models=frozenset("B")),
        Task(cpu_milli=1_000, memory_mib=4_000, gpus=1, gpu_milli=WHOLE, group="app", per_node=2),
    ]
    return [kinds[at] for at in rng.integers(len(kinds), size=count)]


class PolicyContract:
    """The suite. Tasks outnumber what the cluster holds, so that every policy meets a full one."""

    def test_what_is_chosen_fits(self, make: MakePolicy) -> None:
        """`place` takes every choice: as many devices as asked, each with room, CPU and memory, and the right model."""
        state = ClusterState(sample_nodes())
        for task, at in self._filled(make, state, seed=1):
            if at is not None and task.gpu_models:
                assert state.nodes[at.node].gpu_model in task.gpu_models

    def test_a_place_is_found_if_there_is_one(self, make: MakePolicy) -> None:
        """None is the answer only where no node fits."""
        state = ClusterState(sample_nodes())
        policy = make(classes_of(sample_tasks(200, 2)), 0)
        nodes = np.arange(len(state.nodes))
        refused = 0
        for task in sample_tasks(200, 2):
            at = policy.choose(state, task)
            assert (at is not None) == bool(state.fits(task, nodes, state.allows(task)).any())
            refused += at is None
            if at is not None:
                state.place(task, at)
        assert refused

    def test_choosing_changes_nothing(self, make: MakePolicy) -> None:
        """The state is as before, clock included."""
        state = ClusterState(sample_nodes())
        policy = make(classes_of(sample_tasks(50, 3)), 0)
        before = [state.cpu.copy(), state.memory.copy(), state.devices.copy(), state.running.copy()]
        for task in sample_tasks(50, 3):
            policy.choose(state, task)
        assert state.clock == 0
        for was, now in zip(before, (state.cpu, state.memory, state.devices, state.running), strict=True):
            assert np.array_equal(was, now)

    def test_a_seed_fixes_the_choices(self, make: MakePolicy) -> None:
        """Two policies of one seed choose the same."""
        one, two = ([at for _, at in self._filled(make, ClusterState(sample_nodes()), seed=4)] for _ in range(2))
        assert one == two

    def test_departures_make_room(self, make: MakePolicy) -> None:
        """What was released can be placed again, and a cluster that emptied is as it was."""
        state = ClusterState(sample_nodes())
        empty = state.devices.copy()
        held = [(task, at) for task, at in self._filled(make, state, seed=5) if at is not None]
        policy = make(classes_of(sample_tasks(120, 5)), 0)
        for task, at in held:
            state.release(task, at)
            assert policy.choose(state, task) is not None
        assert np.array_equal(state.devices, empty)
        assert not state.running.any()

    def test_nothing_of_before_is_believed(self, make: MakePolicy) -> None:
        """With arrivals and departures, a policy that saw all of it agrees with one that sees the state first now.

        Policies that draw are exempt: their draws differ.
        """
        state = ClusterState(sample_nodes())
        tasks = sample_tasks(80, 6)
        classes = classes_of(tasks)
        policy, rng = make(classes, 0), np.random.default_rng(6)
        held: list[tuple[Task, TaskPlacement]] = []
        draws = self._draws(make, classes)
        for task in tasks:
            at = policy.choose(state, task)
            if not draws:
                assert at == make(classes, 0).choose(state, task)
            if at is not None:
                state.place(task, at)
                held.append((task, at))
            if held and rng.random() < 0.3:
                state.release(*held.pop(int(rng.integers(len(held)))))

    def test_another_state_is_seen(self, make: MakePolicy) -> None:
        """A policy that is handed another cluster chooses by that one."""
        task = Task(cpu_milli=1_000, gpus=1, gpu_milli=WHOLE)
        policy = make(classes_of([task]), 0)
        full = ClusterState([ClusterNode(name="a", cpu_milli=2_000, memory_mib=10, gpus=1)])
        at = policy.choose(full, task)
        assert at is not None
        full.place(task, at)
        assert policy.choose(full, task) is None
        assert policy.choose(ClusterState(full.nodes), task) == at

    @staticmethod
    def _draws(make: MakePolicy, classes: Sequence[TaskClass]) -> bool:
        """Whether choices depend on the seed."""
        found = set()
        for seed in range(8):
            state = ClusterState([ClusterNode(name=str(n), cpu_milli=10_000, memory_mib=1, gpus=1) for n in range(8)])
            found.add(make(classes, seed).choose(state, Task(cpu_milli=1_000, gpus=1, gpu_milli=500)))
        return len(found) > 1

    @staticmethod
    def _filled(make: MakePolicy, state: ClusterState, *, seed: int) -> list[tuple[Task, TaskPlacement | None]]:
        """Offer more tasks than there is room for, and place what is chosen."""
        tasks = sample_tasks(120, seed)
        policy = make(classes_of(tasks), seed)
        found = []
        for task in tasks:
            at = policy.choose(state, task)
            if at is not None:
                state.place(task, at)
            found.append((task, at))
        return found
