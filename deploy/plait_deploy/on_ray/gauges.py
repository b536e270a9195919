"""The GPUs of each node for Prometheus: how many, how many are idle, and how much of that is stranded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from plait_deploy.errors import TaskError
from plait_deploy.on_ray.nodes import CPUS, GPUS, NODE, RayNode, devices_in
from plait_deploy.placement.values import WHOLE, Demand, Task, TaskPlacement, task_of

if TYPE_CHECKING:
    from plait_deploy.placement.state import ClusterState

_FAMILIES = {
    "plait_node_gpus": "GPUs of a node of Ray",
    "plait_node_idle_gpus": "GPUs of the node that no replica of this application has taken",
    "plait_node_stranded_gpus": "Idle GPUs of the node that the application's average GPU replica could not use",
}


def occupied(nodes: Sequence[RayNode], replicas: Iterable[tuple[Task, Mapping[str, float]]]) -> ClusterState:
    """Return the cluster with the replicas where they say they are (`whereabouts`). Raises `ClusterError` without a
    node.

    A replica on a node that is gone, or on devices that another one says it has, counts nowhere: the two reports are
    of different moments.
    """
    from plait_deploy.placement.state import ClusterState

    state = ClusterState([each.node for each in nodes])
    index = {each.number: at for at, each in enumerate(nodes)}
    for task, said in replicas:
        if (node := index.get(said.get(NODE, -1.0))) is not None:
            with suppress(TaskError):
                devices = devices_in(said)
                at = None if devices is None else TaskPlacement(node=node, devices=devices)
                state.place(task, at or state.best_fit(task, node))
    return state


def gauges(nodes: Sequence[RayNode], reports: Iterable[Mapping[str, float]]) -> list[Metric]:
    """Return the gauges, by what each replica says of itself; their families are there even where no node has a GPU."""
    having = [each for each in nodes if each.node.gpus]
    families = [GaugeMetricFamily(name, said, labels=("node", "class")) for name, said in _FAMILIES.items()]
    if having:
        from plait_deploy.placement.plan import use_of

        replicas = [(task_of("", num_cpus=it.get(CPUS, 0.0), num_gpus=it.get(GPUS, 0.0)), it) for it in reports]
        alike = Counter(task for task, _ in replicas)
        state = occupied(having, replicas)
        use = use_of(state, [Demand(name="", task=task, replicas=count) for task, count in alike.items()])
        for at, each in enumerate(having):
            values = (each.node.gpus, int(state.gpu_free[at]) / WHOLE, round(use.stranded_by_node[at], 6))
            for family, value in zip(families, values, strict=True):
                family.add_metric((each.node.name[:12], str(each.node_class)), value)
    return [*families]
