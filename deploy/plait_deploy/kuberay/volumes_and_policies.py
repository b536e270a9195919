"""What stands around the RayService: volumes, who may speak to the pods, how many may go at once, who watches them."""

from __future__ import annotations

from typing import Any

from plait_deploy.kuberay.options import DeploySection
from plait_deploy.kuberay.rayservice import DASHBOARD_PORT, METRICS_PORT, SERVICE_LABEL, Pods

_GROUP, _HEAD_GROUP = "ray.io/group", "headgroup"
"""The label that KubeRay gives pods, and its value for the head."""
_NAMESPACE = "kubernetes.io/metadata.name"


def volume_claims(options: DeploySection) -> list[dict[str, Any]]:
    """Return a claim for each volume that is not there yet. Pods of all nodes mount them: ReadWriteMany."""
    folders = {"models": options.volumes.models, "cache": options.volumes.cache}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": _metadata(options, name),
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": folder.size}},
                **({} if folder.storage_class is None else {"storageClassName": folder.storage_class}),
            },
        }
        for name, folder in folders.items()
        if folder.claim is None
    ]


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
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(options),
        "spec": {**ours, "policyTypes": ["Ingress"], "ingress": rules},
    }


def disruption_budgets(options: DeploySection, pods: list[Pods]) -> list[dict[str, Any]]:
    """Return how many pods must stay when nodes are drained: all but one, and at least one; the head always.

    Kubernetes takes only `minAvailable` for pods that no Deployment owns.
    """
    fewest = {_HEAD_GROUP: 1} | {it.name: max(1, it.min_pods - 1) for it in pods}
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _metadata(options, "head" if group == _HEAD_GROUP else group),
            "spec": {
                "minAvailable": count,
                "selector": {"matchLabels": {SERVICE_LABEL: options.name, _GROUP: group}},
            },
        }
        for group, count in fewest.items()
    ]


def pod_monitor(options: DeploySection) -> dict[str, Any]:
    """Return what Prometheus' operator scrapes: Ray's metrics of every pod, and plait's of every proxy. Each proxy
    answers for all replicas, so plait's are summed up by `max without (instance, pod)` first (`deploy/dashboards`)."""
    plait: dict[str, Any] = {"port": "serve", "path": "/metrics", "interval": "15s", "scrapeTimeout": "5s"}
    if options.metrics_secret is not None:
        plait["authorization"] = {"credentials": {"name": options.metrics_secret, "key": "api_key"}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(options),
        "spec": {
            "selector": {"matchLabels": {SERVICE_LABEL: options.name}},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}, plait],
        },
    }


def _metadata(options: DeploySection, part: str | None = None) -> dict[str, Any]:
    name = options.name if part is None else f"{options.name}-{part}"
    where = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **where, "labels": {SERVICE_LABEL: options.name}}


def _from(namespace: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE: namespace}}}


def _ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
