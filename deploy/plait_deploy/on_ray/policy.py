"""The autoscaling policy of a placed application, which Serve's controller runs, and what a Serve configuration says
for such an application.

Serve calls the policy ten times a second and waits, so it looks at the cluster once a second and plans only after a
change. The number of replicas that a model shall have is the upper bound of each of its deployments (`max_replicas`):
that may change without a restart, while the arguments of the application and of its policy may not (Serve derives the
code's version from them).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from plait_deploy.on_ray.nodes import (
    DEVICES,
    LABEL,
    NODE,
    RayNode,
    check_names,
    devices_in,
    living_nodes,
    name_at,
    ray_nodes,
    split_name,
)
from plait_deploy.placement.policies import OURS, make_policy
from plait_deploy.placement.recount import Standing, recount
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, Demand, demand_classes, task_of

_log = logging.getLogger("ray.serve")

_LOOK_S = 1.0


class PlacementPolicy:
    """Sets the number of replicas of every placed deployment; others, of which an application of ours has none whose
    number varies, keep theirs.

    `deployments`: `num_cpus` and `num_gpus` of a replica by name. How many replicas a name shall have is
    `max_replicas` of its deployments, or what a policy of its own says of all of them together: `follows` has that by
    name, as Serve has one of a deployment. `nodes` and `clock` are for tests.
    """

    def __init__(
        self,
        *,
        classes: Sequence[str],
        deployments: Mapping[str, Mapping[str, float]],
        follows: Mapping[str, Mapping[str, Any]] | None = None,
        policy: str = OURS,
        nodes: Callable[[], Sequence[Mapping[str, Any]]] = ray_nodes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._classes = tuple(classes)
        self._tasks = {
            name: task_of(name, num_cpus=needs["num_cpus"], num_gpus=needs["num_gpus"])
            for name, needs in deployments.items()
        }
        self._follows = {name: _Follower(**options) for name, options in (follows or {}).items()}
        self._policy = policy
        self._nodes, self._clock = nodes, clock
        self._looked_s = float("-inf")
        self._seen: object = None
        self._counts: Mapping[tuple[str, str], int] = {}

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, float], dict[Any, dict[str, Any]]]:
        """Return the numbers of replicas, and nothing for Serve to keep."""
        placed: dict[tuple[str, str], tuple[Any, Any]] = {}
        for key, context in contexts.items():
            where = split_name(context.deployment_name)
            if where is not None and where[0] in self._tasks:
                placed[where] = key, context
        try:
            self._look({where: context for where, (_, context) in placed.items()})
        except Exception:  # an error here would stop Serve's whole control loop, for all applications
            _log.exception("placement: the cluster could not be planned; the numbers stay as they are")
        return {key: self._counts.get(where, it.target_num_replicas) for where, (key, it) in placed.items()}, {}

    def _look(self, contexts: Mapping[tuple[str, str], Any]) -> None:
        """Plan again if the nodes, the replicas or their wanted numbers have changed since the last look."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        nodes = tuple(each for each in living_nodes(self._nodes()) if each.node_class in self._classes)
        if not nodes:
            return  # nothing can start anywhere; and should Ray not know its nodes for a moment, nothing shall end
        demands = self._demands(contexts)
        standing = _standing(contexts, nodes)
        seen = (nodes, demands, standing)
        if seen == self._seen:
            return
        self._seen = seen
        state = ClusterState([each.node for each in nodes])
        policy = make_policy(self._policy, demand_classes(demands))
        found = recount(state, [each.node_class for each in nodes], demands, standing, policy)
        counts = {where: found.counts.get(where, 0) for where in contexts}
        if counts != self._counts:
            logged = {f"{name}@{of}": count for (name, of), count in counts.items() if count}
            _log.info("placement: %s; no room for %s; later %d", logged, found.unplaced or "none", found.held_back)
        self._counts = counts

    def _demands(self, contexts: Mapping[tuple[str, str], Any]) -> tuple[Demand, ...]:
        of: dict[str, list[Any]] = {}
        for (name, _), context in contexts.items():
            of.setdefault(name, []).append(context)
        found: list[Demand] = []
        for name, parts in of.items():
            bound = max(context.capacity_adjusted_max_replicas for context in parts)
            follower = self._follows.get(name)
            replicas = bound if follower is None else min(bound, follower.wanted(parts))
            found.append(Demand(name=name, task=self._tasks[name], replicas=replicas))
        return tuple(found)


class _Follower:
    """Asks a policy of a deployment for the replicas of a name, as if its deployments were one."""

    def __init__(self, *, policy_function: str, policy_kwargs: Mapping[str, Any]) -> None:
        self._policy = resolve_name(policy_function)(**policy_kwargs)
        self._state: dict[str, Any] = {}

    def wanted(self, parts: Sequence[Any]) -> int:
        """Return the number of replicas; `parts`: the contexts of the deployments."""
        metrics: dict[str, dict[Any, float]] = {}
        for context in parts:
            for metric, by_replica in (context.aggregated_metrics or {}).items():
                metrics.setdefault(metric, {}).update(by_replica)
        whole = SimpleNamespace(
            aggregated_metrics=metrics,
            target_num_replicas=max(1, sum(context.target_num_replicas for context in parts)),
            policy_state=self._state,
            current_time=max(context.current_time for context in parts),
        )
        number, self._state = self._policy(whole)
        return int(number)


def _standing(contexts: Mapping[tuple[str, str], Any], nodes: Sequence[RayNode]) -> tuple[Standing, ...]:
    """Return the replicas that run or start. Those that have not reported yet are anywhere in their class."""
    at = {each.number: index for index, each in enumerate(nodes)}
    found: list[Standing] = []
    for (name, node_class), context in contexts.items():
        if not context.target_num_replicas:
            continue
        said = _reports(context)
        for replica in list(context.running_replicas)[: context.target_num_replicas]:
            report = said.get(replica, {})
            node = at.get(report.get(NODE, -1.0))
            devices = None if node is None else devices_in(report)
            found.append(Standing(name=name, node_class=node_class, node=node, devices=devices))
        starting = context.target_num_replicas - len(context.running_replicas)
        found += [Standing(name=name, node_class=node_class)] * starting
    return tuple(found)


def _reports(context: Any) -> dict[Any, dict[str, float]]:
    """Return what each replica reported last, by replica."""
    found: dict[Any, dict[str, float]] = {}
    for metric in (NODE, DEVICES):
        for replica, series in (context.raw_metrics or {}).get(metric, {}).items():
            if series:
                found.setdefault(replica, {})[metric] = series[-1].value
    return found


def placed_options(demand: Demand, node_class: str) -> dict[str, Any]:
    """Return Serve's options for one deployment: no replicas until the policy says so, on nodes of the class only."""
    return {
        "autoscaling_config": {
            "min_replicas": 0,
            "max_replicas": demand.replicas,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "downscale_to_zero_delay_s": 0.0,
        },
        "ray_actor_options": {**_needs(demand), "label_selector": {LABEL: node_class}},
    }


def _needs(demand: Demand) -> dict[str, float]:
    return {"num_cpus": demand.task.cpu_milli / WHOLE, "num_gpus": demand.task.total_milli / WHOLE}


def placed_deployments(demands: Sequence[Demand], classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of all deployments by name. Raises `PlacementError`."""
    check_names(tuple(each.name for each in demands), tuple(classes))
    return {
        name_at(each.name, node_class): placed_options(each, node_class) for each in demands for node_class in classes
    }


def policy_options(
    demands: Sequence[Demand],
    classes: Sequence[str],
    *,
    follows: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the `autoscaling_policy` of the application. `follows`: the policies, as in an `autoscaling_config`, of
    those whose number of replicas follows the load."""
    return {
        "policy_function": f"{__name__}:{PlacementPolicy.__name__}",
        "policy_kwargs": {
            "classes": list(classes),
            "deployments": {each.name: _needs(each) for each in demands},
            "policy": OURS,
            **({"follows": {name: dict(each) for name, each in follows.items()}} if follows else {}),
        },
    }
