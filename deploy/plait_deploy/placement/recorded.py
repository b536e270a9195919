"""Replays tasks at the times of a recorded trace, and reads what of CPU and GPU is stranded meanwhile.

Stranded, after FGD's fragmentation (`fragments.py`), for both resources and with limits per node: what is idle on node
n and of no use to the average class m (weight p_m) that asks for the resource.

    GPU of n for m: sum_g R_g [R_g < d_m] if m fits n, else sum_g R_g
    CPU of n for m: 0 if m fits n, else c_n

m fits n if CPU, devices *and* the limit of its group allow one more. A limit can so strand a node that has room.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.policies.protocols import Policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import Stay, Task, TaskPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranded:
    """What is of no use to the average task at one moment, in milli-cores and milli-GPUs."""

    cpu_milli: float
    gpu_milli: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplay:
    """A replay: means over equally spaced moments. `cpu_used`, `gpu_used`: given to tasks, in milli-cores and
    milli-GPUs; `decisions_s`: the time of each decision, (tasks,) float64."""

    stranded: Stranded
    cpu_used: float
    gpu_used: float
    refused: int
    decisions_s: NDArray[np.float64]


def replay(
    state: ClusterState, stays: Sequence[Stay], policy: Policy, *, seed: int, looks: int, end_s: float
) -> RecordedReplay:
    """Place every task when it arrives and release it when it leaves; what fits nowhere is dropped. Changes the state.

    Tasks that arrive at the same time come in an order drawn with `seed`. The cluster is looked at `looks` times, in
    the middle of that many equal parts of 0..`end_s`.
    """
    order = np.random.default_rng([seed, 3]).permutation(len(stays)).tolist()
    coming = sorted((stays[at] for at in order), key=lambda stay: stay.arrives_s)
    weights = Counter(stay.task for stay in stays)
    moments = ((np.arange(looks) + 0.5) * (end_s / looks)).tolist()
    leaving: list[tuple[float, int, Task, TaskPlacement]] = []
    seen: list[tuple[float, float, float, float]] = []
    refused, spent, clock = 0, np.empty(len(coming)), time.perf_counter

    def pass_time(until_s: float) -> None:
        while leaving and leaving[0][0] <= until_s:
            _, _, gone, was = heapq.heappop(leaving)
            state.release(gone, was)

    for number, stay in enumerate([*coming, None]):
        now = stay.arrives_s if stay else inf
        while len(seen) < looks and moments[len(seen)] < now:
            pass_time(moments[len(seen)])
            seen.append(_read(state, weights))
        if stay is None:
            break
        pass_time(now)
        asked = clock()
        at = policy.choose(state, stay.task)
        spent[number] = clock() - asked
        if at is None:
            refused += 1
        else:
            state.place(stay.task, at)
            heapq.heappush(leaving, (stay.leaves_s, number, stay.task, at))
    means = np.mean(seen, axis=0).tolist()
    return RecordedReplay(
        stranded=Stranded(cpu_milli=means[0], gpu_milli=means[1]), cpu_used=means[2], gpu_used=means[3],
        refused=refused, decisions_s=spent,
    )  # fmt: skip


def stranded(state: ClusterState, weights: Counter[Task]) -> Stranded:
    """Return what is stranded now, for classes of these weights."""
    nodes = np.arange(len(state.nodes))
    cpu = gpu = gpu_weight = 0
    for task, weight in weights.items():
        fits = state.fits(task, nodes, state.allows(task))
        cpu += weight * int(state.cpu[~fits].sum())
        if task.gpus:
            devices = state.devices[fits]
            left = int(devices[devices < task.gpu_milli].sum())
            gpu += weight * (left + int(state.gpu_free[~fits].sum()))
            gpu_weight += weight
    return Stranded(cpu_milli=cpu / weights.total(), gpu_milli=gpu / max(1, gpu_weight))


def _read(state: ClusterState, weights: Counter[Task]) -> tuple[float, float, float, float]:
    """Return stranded CPU and GPU, and used CPU and GPU."""
    lost = stranded(state, weights)
    cpu_used = sum(node.cpu_milli for node in state.nodes) - int(state.cpu.sum())
    return lost.cpu_milli, lost.gpu_milli, cpu_used, state.total_milli - int(state.gpu_free.sum())
