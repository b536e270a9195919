"""One plait.yaml as a complete set of manifests for KubeRay: the RayService, and what stands around it: volumes, who
may speak to the pods, how many may go at once, who watches them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from plait_deploy.errors import DeployError
from plait_deploy.kuberay.options import DeploySection, GpuGroup, Volumes, WorkerGroup
from plait_deploy.kuberay.rayservice import (
    CPU_NODE,
    DASHBOARD_PORT,
    GPU_NODE,
    METRICS_PORT,
    NODE_LABEL,
    SERVICE_LABEL,
    SHARD_NODE,
    Pods,
    Service,
    named_object,
    optional,
)
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Reservation
from plait_deploy.serve import render_serve

_GROUP, _HEAD_GROUP = "ray.io/group", "headgroup"
"""The label that KubeRay gives pods, and its value for the head."""
_NAMESPACE = "kubernetes.io/metadata.name"


def render_kuberay(
    application: Mapping[str, Any],
    reservations: Sequence[Reservation],
    options: DeploySection,
    *,
    port: int,
    has_keys: bool,
    longest_request_s: float,
    ray_version: str,
    environment: Mapping[str, str],
) -> str:
    """Return the YAML documents of all objects. `reservations`: every deployment of the application.

    Raises DeployError if what is asked for contradicts itself or fits no pod; then there is no document at all.
    """
    if options.image is None:
        raise DeployError("no image: give --image name@sha256:...")
    if has_keys and options.network.monitoring_namespace is not None and options.metrics_secret is None:
        raise DeployError(
            "the server asks for keys, so Prometheus needs one: name the Secret that has it (deploy.metrics_secret), "
            "or set deploy.network.monitoring_namespace to null"
        )
    pods = _pods(reservations, options)
    told = {it["name"]: it for it in application["deployments"]}
    placed = {
        **application,
        "args": mapped(application["args"], options.volumes),
        "deployments": [{"name": it.name, "ray_actor_options": _actor(it), **told[it.name]} for it in reservations],
    }
    service = Service(options=options, port=port, longest_request_s=longest_request_s, environment=environment)
    # In a pod the server listens on all interfaces.
    serve_config = render_serve(placed, host="0.0.0.0", port=port, proxies="EveryNode")  # noqa: S104
    documents = [
        *volume_claims(options),
        network_policy(options, port=port),
        *disruption_budgets(options, pods),
        *([] if options.network.monitoring_namespace is None else [pod_monitor(options)]),
        service.manifest(pods, serve_config=serve_config, ray_version=ray_version),
    ]
    # A copy through JSON shares no parts, of which YAML would make aliases.
    separate = json.loads(json.dumps(documents))
    return yaml.dump_all(separate, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _pods(reservations: Sequence[Reservation], options: DeploySection) -> list[Pods]:
    """Return the groups that have something to carry. Without autoscaling all pods are there from the start."""
    found = []
    groups: Sequence[tuple[str, str, WorkerGroup]] = (
        ("cpu", CPU_NODE, options.cpu),
        ("gpu", GPU_NODE, options.gpu),
        ("shard", SHARD_NODE, options.shard),
    )
    for name, node, group in groups:
        carried = [it for it in reservations if _node(it) == node]
        if not carried:
            continue
        key, gpus = f"deploy.{name}", group.gpus if isinstance(group, GpuGroup) else 0
        pod = ClusterNode(name=key, cpu_milli=group.cpus * WHOLE, memory_mib=group.memory_bytes >> 20, gpus=gpus)
        fewest, needed = pods_for(carried, pod, at_most=False), pods_for(carried, pod, at_most=True)
        most = group.max_pods or max(needed, group.min_pods or 0)
        start = group.min_pods or (fewest if options.autoscaling else min(needed, most))
        if most < fewest:
            raise DeployError(f"{key}.max_pods is {most}, and the replicas need {fewest} pods of that size")
        if not options.autoscaling and start < fewest:
            lack = f"{key}.min_pods is {start}, and the replicas need {fewest} pods"
            raise DeployError(f"{lack}: nothing adds them without autoscaling")
        workloads = {it.workload for it in carried if it.workload is not None}
        workload = workloads.pop() if len(workloads) == 1 else None
        found.append(Pods(name=name, node=node, group=group, min_pods=start, max_pods=most, workload=workload))
    return found


def pods_for(reservations: Sequence[Reservation], pod: ClusterNode, *, at_most: bool) -> int:
    """Return the number of pods of that size that carry all replicas, as many as there are at most, or at least: first
    fit, the largest first.

    Raises DeployError if a replica fits no pod; the pod's name is that of what to change.
    """
    largest_first = sorted(reservations, key=lambda it: (it.num_gpus, it.num_cpus, it.name), reverse=True)
    replicas = [it for it in largest_first for _ in range(it.max_replicas if at_most else it.min_replicas)]
    state, needed, room_bytes = ClusterState([pod] * max(1, len(replicas))), 0, pod.memory_mib << 20
    for one in replicas:
        if one.memory_bytes > room_bytes:
            holds, has = f"{one.name} holds {one.memory_bytes / 1e9:g} GB of tables", f"{room_bytes / 1e9:.3g} GB"
            raise DeployError(f"a replica of {holds}, and a pod of {pod.name} has {has}: it fits no node")
        task = replace(one.demand().task, memory_mib=one.memory_bytes >> 20)
        if (at := state.first_fit(task)) is None:
            wants = f"{one.name} wants {one.num_cpus:g} cores" + (f" and {one.num_gpus:g} GPUs" if one.num_gpus else "")
            has = f"{pod.cpu_milli // WHOLE}" + (f" and {pod.gpus}" if one.num_gpus else "")
            raise DeployError(f"a replica of {wants}, and a pod of {pod.name} has {has}: it fits no node")
        state.place(task, at)
        needed = max(needed, at.node + 1)
    return needed


def _node(reservation: Reservation) -> str:
    if reservation.is_shard:
        return SHARD_NODE
    return GPU_NODE if reservation.num_gpus > 0 else CPU_NODE


def _actor(reservation: Reservation) -> dict[str, object]:
    gpus = {"num_gpus": reservation.num_gpus} if reservation.num_gpus else {}
    return {"num_cpus": reservation.num_cpus, **gpus, "label_selector": {NODE_LABEL: _node(reservation)}}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


_READ = {"folder", "model", "models_folder"}
_WRITTEN = {"cache_folder"}
_ALSO_WRITTEN = {"images.results.folder", "tuning.folder"}
_ALSO_READ = "images.models."
"""Its keys are names of models."""


def mapped(args: Mapping[str, Any], volumes: Volumes) -> dict[str, Any]:
    """Return the arguments with every absolute path below `models_from` moved to the volume of models.

    Raises DeployError for a path that lies on no volume: no pod would find it.
    """
    return {key: _value(value, key, key, volumes) for key, value in args.items()}


def _value(value: Any, key: str, where: str, volumes: Volumes) -> Any:
    if isinstance(value, Mapping):
        return {inner: _value(it, inner, f"{where}.{inner}", volumes) for inner, it in value.items()}
    is_path = key in _READ | _WRITTEN or where.startswith(_ALSO_READ)
    if not isinstance(value, str) or not value.startswith("/") or not is_path:
        return value
    path = PurePosixPath(value)
    if key in _WRITTEN or where in _ALSO_WRITTEN:
        if not path.is_relative_to(volumes.cache.path):
            raise DeployError(f"{where}: {value} is written to, so it must lie below {volumes.cache.path} (the cache)")
        return value
    if volumes.models_from is not None and path.is_relative_to(volumes.models_from):
        return str(PurePosixPath(volumes.models.path) / path.relative_to(volumes.models_from))
    if path.is_relative_to(volumes.models.path):
        return value
    raise DeployError(
        f"{where}: {value} is not below {volumes.models.path}, where pods have models; "
        f"deploy.volumes.models_from names the local folder that lies there"
    )


def volume_claims(options: DeploySection) -> list[dict[str, Any]]:
    """Return a claim for each volume that is not there yet. Pods of all nodes mount them: ReadWriteMany."""
    claims = []
    for name, folder in (("models", options.volumes.models), ("cache", options.volumes.cache)):
        if folder.claim is None:
            size = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": folder.size}}}
            spec = size | optional(storageClassName=folder.storage_class)
            claims.append(named_object(options, "v1", "PersistentVolumeClaim", spec, part=name))
    return claims


def network_policy(options: DeploySection, *, port: int) -> dict[str, Any]:
    """Return a policy for what comes in. The pods speak to each other, the operator to the head, Prometheus to metrics,
    and the namespace's pods send requests. What goes out is left alone: hubs, DNS and Kubernetes' own API."""
    network = options.network
    ours = {"podSelector": {"matchLabels": {SERVICE_LABEL: options.name}}}
    clients = [{"podSelector": {}}, *(_from(namespace) for namespace in network.client_namespaces)]
    rules: list[dict[str, Any]] = [
        {"from": [ours]},
        {"from": clients, "ports": _ports(port)},
        {"from": [_from(network.operator_namespace)], "ports": _ports(DASHBOARD_PORT, port)},
    ]
    if network.monitoring_namespace is not None:
        rules.append({"from": [_from(network.monitoring_namespace)], "ports": _ports(METRICS_PORT, port)})
    spec = {**ours, "policyTypes": ["Ingress"], "ingress": rules}
    return named_object(options, "networking.k8s.io/v1", "NetworkPolicy", spec)


def disruption_budgets(options: DeploySection, pods: list[Pods]) -> list[dict[str, Any]]:
    """Return how many pods must stay when nodes are drained: all but one, and at least one; the head always.

    Kubernetes takes only `minAvailable` for pods that no Deployment owns.
    """
    budgets = []
    for group, count in {_HEAD_GROUP: 1, **{it.name: max(1, it.min_pods - 1) for it in pods}}.items():
        selector = {"matchLabels": {SERVICE_LABEL: options.name, _GROUP: group}}
        spec, part = {"minAvailable": count, "selector": selector}, "head" if group == _HEAD_GROUP else group
        budgets.append(named_object(options, "policy/v1", "PodDisruptionBudget", spec, part=part))
    return budgets


def pod_monitor(options: DeploySection) -> dict[str, Any]:
    """Return what Prometheus' operator scrapes: Ray's metrics of every pod, and plait's of every proxy. Each proxy
    answers for all replicas, so plait's are summed up by `max without (instance, pod)` first (`deploy/dashboards`)."""
    plait: dict[str, Any] = {"port": "serve", "path": "/metrics", "interval": "15s", "scrapeTimeout": "5s"}
    if options.metrics_secret is not None:
        plait["authorization"] = {"credentials": {"name": options.metrics_secret, "key": "api_key"}}
    scraped = [{"port": "metrics", "interval": "15s"}, plait]
    spec = {"selector": {"matchLabels": {SERVICE_LABEL: options.name}}, "podMetricsEndpoints": scraped}
    return named_object(options, "monitoring.coreos.com/v1", "PodMonitor", spec)


def _from(namespace: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE: namespace}}}


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
