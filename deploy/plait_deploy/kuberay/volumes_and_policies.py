"""What stands around the RayService: volumes, who may speak to the pods, how many may go at once, who watches them."""

from __future__ import annotations

from typing import Any

from plait_deploy.kuberay.options import DeploySection
from plait_deploy.kuberay.rayservice import (
    DASHBOARD_PORT,
    METRICS_PORT,
    SERVICE_LABEL,
    Pods,
    named_object,
    optional,
)

_GROUP, _HEAD_GROUP = "ray.io/group", "headgroup"
"""The label that KubeRay gives pods, and its value for the head."""
_NAMESPACE = "kubernetes.io/metadata.name"


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
