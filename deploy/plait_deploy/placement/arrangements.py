"""Recommendation on a cluster in two ways: split into CN and HN halves on nodes of their own, and monolithic.

**Split** is the trace as it is: CN instances go to nodes with cores only, HN instances to nodes with GPUs.

**Monolithic**: cores and GPU of an instance are on one node. The trace has no monolithic instances; they are made from
the halves so that an app needs the same in total. Of an app's two halves, the one that ran for more instance-seconds is
the *base*; every instance of it becomes a monolithic one with its times and its limit per node. To its own cores come
those of the other half, rho = instance-seconds of the other / of the base <= 1 of an average instance of it. In the
trace a CN asks for 48, 64 or 96 cores, and the paper's typical monolithic instance for 48 and a GPU. The GPU is a whole
one, as in the paper, so an app with more CNs than HNs holds GPUs that the split one does not need; with `shared`, it is
rho of one, so that both need the same.

Nodes have 128 cores, and those with GPUs 8 (NSDI 2025, evaluation: CN 128 cores, HN 128 cores and 8 A100). Each pool of
nodes has as many as first-fit with the largest first would need for all that is there at the busiest moment, divided by
`LOAD`: the paper compares fragments at about 90 % allocation. Memory and NICs are no constraint: see `dlrm_trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from plait_deploy.placement.dlrm_trace import CN, HN, Instance
from plait_deploy.placement.errors import TraceError
from plait_deploy.placement.policies.baselines import FirstFitPolicy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Stay, Task

NODE_CORES = 128
HN_GPUS = 8
LOAD = 0.9
CPU_SHAPE = ClusterNode(name="cn", cpu_milli=NODE_CORES * WHOLE, memory_mib=0)
GPU_SHAPE = ClusterNode(name="hn", cpu_milli=NODE_CORES * WHOLE, memory_mib=0, gpus=HN_GPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Equal nodes, and what goes to them."""

    nodes: tuple[ClusterNode, ...]
    stays: tuple[Stay, ...]


def placeable(instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances of apps that fit nodes of these shapes: an app of which any instance does not (192 cores) is
    left out, in all arrangements alike. Raises `TraceError` if none is left."""
    large = {each.app for each in instances if each.stay.task.cpu_milli > CPU_SHAPE.cpu_milli}
    left = [each for each in instances if each.app not in large]
    if not left:
        raise TraceError(f"every app has an instance of more than {NODE_CORES} cores, which no node has")
    return left


def split(instances: Sequence[Instance]) -> tuple[NodePool, ...]:
    """Return a pool for CNs and one for HNs."""
    return tuple(
        _pool(shape, [each.stay for each in instances if each.role == role])
        for role, shape in ((CN, CPU_SHAPE), (HN, GPU_SHAPE))
    )


def monolithic(instances: Sequence[Instance], *, shared: bool) -> tuple[NodePool, ...]:
    """Return one pool of nodes with GPUs. `shared`: instances take a part of a GPU where that is all they need."""
    end = trace_end_s(instances)
    apps: dict[str, dict[str, list[Stay]]] = {}
    for each in instances:
        apps.setdefault(each.app, {CN: [], HN: []})[each.role].append(each.stay)
    return (_pool(GPU_SHAPE, [stay for halves in apps.values() for stay in _joined(halves, end, shared=shared)]),)


def trace_end_s(instances: Sequence[Instance]) -> float:
    """Return the last time that the trace names, in seconds."""
    times = [time for each in instances for time in (each.stay.arrives_s, each.stay.leaves_s) if time < inf]
    return max(times, default=0.0)


def nodes_needed(shape: ClusterNode, tasks: Sequence[Task]) -> int:
    """Return how many nodes of a shape first-fit fills with the tasks, the largest first. Limits per node are kept."""
    state, policy = ClusterState([shape] * max(1, len(tasks))), FirstFitPolicy()
    for task in sorted(tasks, key=lambda each: -_size(shape, each.cpu_milli, each.total_milli)):
        at = policy.choose(state, task)
        if at is None:
            raise TraceError(f"an instance of {task.group} fits no node of {shape.cpu_milli / WHOLE:g} cores")
        state.place(task, at)
    return int(state.running.any(1).sum())


def busiest(shape: ClusterNode, stays: Sequence[Stay]) -> list[Task]:
    """Return what is there at the moment of the largest demand: of the resource of which most nodes are needed."""
    arriving = [(stay.arrives_s, 1, stay.task) for stay in stays]
    leaving = [(stay.leaves_s, -1, stay.task) for stay in stays if stay.leaves_s < inf]
    cpu = gpu = 0
    most, when = 0.0, 0.0
    for time, sign, task in sorted(arriving + leaving, key=lambda change: change[:2]):
        cpu += sign * task.cpu_milli
        gpu += sign * task.total_milli
        if (size := _size(shape, cpu, gpu)) > most:
            most, when = size, time
    return [stay.task for stay in stays if stay.arrives_s <= when < stay.leaves_s]


def _pool(shape: ClusterNode, stays: Sequence[Stay]) -> NodePool:
    count = ceil(nodes_needed(shape, busiest(shape, stays)) / LOAD)
    return NodePool(nodes=tuple(replace(shape, name=f"{shape.name}-{at}") for at in range(count)), stays=tuple(stays))


def _size(shape: ClusterNode, cpu_milli: int, gpu_milli: int) -> float:
    """Return a demand in nodes: of the resource of which it takes the most."""
    return max(cpu_milli / shape.cpu_milli, gpu_milli / (shape.gpus * WHOLE) if shape.gpus else 0.0)


def _joined(halves: dict[str, list[Stay]], end_s: float, *, shared: bool) -> Iterable[Stay]:
    """Return an app's monolithic instances: the rule of the module docstring."""
    spans = {role: _spans_s(stays, end_s) for role, stays in halves.items()}
    base, other = (CN, HN) if spans[CN].sum() >= spans[HN].sum() else (HN, CN)
    there = float(spans[base].sum())
    rho = float(spans[other].sum()) / there if there else 1.0
    cores = float(spans[other] @ [stay.task.cpu_milli for stay in halves[other]])
    more = ceil(cores / there) if there else 0
    milli = WHOLE if base == HN or not shared else min(WHOLE, max(1, ceil(rho * WHOLE)))
    for stay in halves[base]:
        task = replace(stay.task, cpu_milli=stay.task.cpu_milli + more, gpus=1, gpu_milli=milli)
        yield replace(stay, task=task)


def _spans_s(stays: Sequence[Stay], end_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([min(stay.leaves_s, end_s) - stay.arrives_s for stay in stays], np.float64)
