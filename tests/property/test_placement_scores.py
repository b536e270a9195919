"""The fast scores of placement equal the formulas as they read, and what is remembered equals what is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_deploy.errors import TaskError
from plait_deploy.placement.device_tables import FragmentTables
from plait_deploy.placement.policies.plait import HURRIES, STEPS, UNIT, ExpectedUse
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, TaskClass, TaskPlacement
from support import placement_twin as naive

MODELS = ("A", "B", "")
MILLIS = st.sampled_from([50, 190, 230, 470, 500, 530, 810, 999, WHOLE])


@st.composite
def tasks(draw: st.DrawFn, *, cpus: tuple[int, ...] = (0, 500, 1_000, 4_000, 12_000), picky: bool = True) -> Task:
    """A task without GPUs, with a part of one, or with whole ones."""
    gpus = draw(st.sampled_from([0, 1, 1, 1, 2, 4]))
    milli = 0 if not gpus else WHOLE if gpus > 1 else draw(MILLIS)
    models = frozenset(draw(st.sets(st.sampled_from("AB"), max_size=1))) if gpus and picky else frozenset()
    return Task(cpu_milli=draw(st.sampled_from(cpus)), gpus=gpus, gpu_milli=milli, gpu_models=models)


def classes(*, picky: bool = True) -> st.SearchStrategy[list[TaskClass]]:
    """Up to six classes."""
    one = st.builds(TaskClass, task=tasks(picky=picky), weight=st.integers(1, 50))
    return st.lists(one, min_size=1, max_size=6)


@st.composite
def states(draw: st.DrawFn, *, cpus: tuple[int, ...] = (0, 3_000, 16_000, 64_000)) -> ClusterState:
    """One to four nodes, with random parts of their devices and CPU taken."""
    nodes = [
        ClusterNode(
            name=str(at), cpu_milli=draw(st.sampled_from(cpus)), memory_mib=0,
            gpus=draw(st.sampled_from([0, 1, 2, 4, 8])), gpu_model=draw(st.sampled_from(MODELS)),
        )
        for at in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    state = ClusterState(nodes)
    for at, node in enumerate(nodes):
        for device in range(node.gpus):
            if taken := draw(st.sampled_from([0, 0, 190, 470, 810, WHOLE])):
                state.place(Task(cpu_milli=0, gpus=1, gpu_milli=taken), TaskPlacement(node=at, devices=(device,)))
        state.place(Task(cpu_milli=draw(st.integers(0, node.cpu_milli))), TaskPlacement(node=at, devices=()))
    return state


def row_of(state: ClusterState, node: int) -> tuple[int, list[int], str]:
    """What is free on a node, as the naive functions take it."""
    devices = state.devices[node, : state.nodes[node].gpus].tolist()
    return int(state.cpu[node]), devices, state.nodes[node].gpu_model


@given(state=states(), known=classes())
def test_fragments_are_those_of_the_formula(state: ClusterState, known: list[TaskClass]) -> None:
    """F of every node, to the last unit."""
    found = FragmentTables(known, state).fragments(state)
    assert found.tolist() == [naive.fragment(known, *row_of(state, node)) for node in range(len(state.nodes))]


@given(state=states(), known=classes(), task=tasks())
def test_gains_are_those_of_placing_the_task(state: ClusterState, known: list[TaskClass], task: Task) -> None:
    """On every node that the task fits, and on the best device."""
    every = np.arange(len(state.nodes))
    nodes = every[state.fits(task, every, state.allows(task))]
    if nodes.size:
        gains, devices = FragmentTables(known, state).gain(state, task, nodes)
        wanted = [naive.gain(known, task, *row_of(state, node)) for node in nodes.tolist()]
        assert list(zip(gains.tolist(), devices.tolist(), strict=True)) == wanted


@given(state=states(cpus=(16_000, 32_000)), known=classes(picky=False))
def test_prospects_are_those_of_the_recursion(state: ClusterState, known: list[TaskClass]) -> None:
    """V of every node, to rounding: a thousandth of a milli-GPU for each device and class."""
    grain = -(-max(node.cpu_milli for node in state.nodes) // STEPS)
    found = ExpectedUse(known, state).values(state, np.arange(len(state.nodes))) / UNIT
    for node, value in enumerate(found.tolist()):
        cpu, devices, _ = row_of(state, node)
        wanted = [naive.node_value(known, cpu, devices, grain=grain, hurry=hurry, steps=STEPS) for hurry in HURRIES]
        assert value == pytest.approx(np.mean(wanted), abs=0.01)


@given(state=states(), known=classes(), task=tasks())
def test_a_prospect_lost_is_the_difference_of_two_values(
    state: ClusterState, known: list[TaskClass], task: Task
) -> None:
    """`gain` equals value after minus value before, and what the task takes."""
    every = np.arange(len(state.nodes))
    nodes = every[state.fits(task, every, state.allows(task))]
    if not nodes.size:
        return
    tables = ExpectedUse(known, state)
    gains, devices = tables.gain(state, task, nodes)
    for node, gain, device in zip(nodes.tolist(), gains.tolist(), devices.tolist(), strict=True):
        one = np.array([node])
        before = int(tables.values(state, one)[0])
        best = []
        for at in [(g,) for g in range(8)] if task.is_share else [state.best_fit(task, node).devices]:
            placement = TaskPlacement(node=node, devices=at)
            if task.is_share and (at[0] >= state.nodes[node].gpus or state.devices[node, at[0]] < task.gpu_milli):
                continue
            state.place(task, placement)
            best.append((int(tables.values(state, one)[0]), -at[0] if task.is_share else 1))
            state.release(task, placement)
        value, where = max(best)
        assert (gain, device) == (task.total_milli * UNIT + value - before, -where)


@given(state=states(), data=st.data())
def test_nothing_is_taken_twice(state: ClusterState, data: st.DataObject) -> None:
    """A refused placement changes nothing; an accepted one is undone by its release, derived sums included."""
    task = data.draw(tasks())
    node = data.draw(st.integers(0, len(state.nodes) - 1))
    at = TaskPlacement(
        node=node, devices=tuple(data.draw(st.sets(st.integers(0, state.devices.shape[1] - 1), max_size=4)))
    )
    before = [state.cpu.copy(), state.devices.copy(), state.gpu_free.copy(), state.whole.copy(), state.widest.copy()]
    try:
        state.place(task, at)
    except TaskError:
        pass
    else:
        assert (state.devices >= 0).all()
        assert (state.cpu >= 0).all()
        state.release(task, at)
    for was, now in zip(before, (state.cpu, state.devices, state.gpu_free, state.whole, state.widest), strict=True):
        assert np.array_equal(was, now)
