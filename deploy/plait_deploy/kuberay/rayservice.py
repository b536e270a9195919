"""The RayService: a head that serves nothing, CPU pods (CN) and GPU pods (HN).

What KubeRay 1.7 does with it, as far as it shapes what is written here: it hands `serveConfigV2` to the head once the
head is ready, so the head's readiness cannot wait for models; it finds the dashboard's port in the head's own headless
service, where it must stay; it fills in probes only where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait_deploy.kuberay.options import DeploySection, GpuGroup, WorkerGroup

NODE_LABEL, CPU_NODE, GPU_NODE, SHARD_NODE = "plait-node", "cn", "hn", "shard"
"""The label of a Ray node, and its values: a CN has cores and memory, an HN GPUs, a shard above all memory."""
SERVICE_LABEL = "plait-service"
"""The label of a pod whose value is `deploy.name`."""

DASHBOARD_PORT, METRICS_PORT = 8265, 8080
_GCS_PORT, _AGENT_PORT = 6379, 52365
_CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""With the pod's own context: what Kubernetes' profile `restricted` asks of a container."""
_AUTOSCALER = {"version": "v2", "securityContext": _CONFINED}
_USER = 1000
"""The user of `deploy/Dockerfile`."""
_SPREAD_S = 15
"""How long a pod that ends may still be sent requests, until every node knows."""
_START_S = 120
"""How long a replica may then take to start elsewhere. Ray's default for all of a node's end, 30 s, is less than Serve
keeps for the old one to stop in: replicas would be stopped at once, the only one of its kind, too."""
_STOP_S = 20
"""Serve's default of that, which is `server.drain_s` where requests finish in replicas."""
_MARGIN_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The worker pods of one node class. `name`: of KubeRay's worker group; `workload`: the only one whose replicas
    they carry, if it is one."""

    name: str
    node: str
    group: WorkerGroup
    min_pods: int
    max_pods: int
    workload: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all parts of the RayService are made of. `port`: where it answers; `longest_request_s`: the longest request
    (`server.drain_s`), from which the times of its end follow; `environment`: of every container."""

    options: DeploySection
    port: int
    longest_request_s: float
    environment: Mapping[str, str]

    @property
    def _leaving_s(self) -> int:
        """How long a pod goes on after it was asked to end: nobody sends to it, its requests finish."""
        return _SPREAD_S + int(-(-self.longest_request_s // 1))

    @property
    def _moving_s(self) -> int:
        """What Ray then gives its node, at most: for replicas to start elsewhere, and to stop here."""
        return _START_S + max(_STOP_S, int(-(-self.longest_request_s // 1)))

    @property
    def _grace_s(self) -> int:
        """When Kubernetes kills a pod that has not ended."""
        return self._leaving_s + self._moving_s + _MARGIN_S

    def manifest(self, pods: Sequence[Pods], *, serve_config: str, ray_version: str) -> dict[str, Any]:
        """Return the RayService."""
        options = self.options
        spec: dict[str, Any] = {
            # When the cluster of the version before goes. KubeRay's default, 60 s, is the least.
            "rayClusterDeletionDelaySeconds": max(60, self._leaving_s + _MARGIN_S),
            "excludeHeadPodFromServeSvc": True,
            "upgradeStrategy": _upgrade(options),
            "serveConfigV2": serve_config,
            "rayClusterConfig": {
                "rayVersion": ray_version,
                "authOptions": {"mode": "token"} | optional(secretName=options.token_secret),
                "enableInTreeAutoscaling": options.autoscaling,
                **optional(autoscalerOptions=_AUTOSCALER if options.autoscaling else None),
                "headGroupSpec": self._head(),
                "workerGroupSpecs": [self._workers(it) for it in pods],
            },
        }
        queue = optional(**{"kueue.x-k8s.io/queue-name": options.queue})
        return named_object(options, "ray.io/v1", "RayService", spec, labels=queue)

    def _head(self) -> dict[str, Any]:
        ports = {"gcs-server": _GCS_PORT, "dashboard": DASHBOARD_PORT, "serve": self.port, "metrics": METRICS_PORT}
        container = self._container("ray-head", self.options.head, ports)
        # Ready as soon as Ray is: KubeRay sends the application only then.
        container["readinessProbe"] = _ray_is_alive(period_s=5, failures=6)
        # The autoscaler beside the head asks Kubernetes for pods; nothing else here needs a token of it.
        template = self._template(container, self.options.head, has_account=self.options.autoscaling)
        # Without cores the head runs Ray's own processes alone, no replica.
        return {"rayStartParams": {"num-cpus": "0"}, "template": template}

    def _workers(self, pods: Pods) -> dict[str, Any]:
        group = pods.group
        container = self._container("ray-worker", group, {"serve": self.port, "metrics": METRICS_PORT})
        container["readinessProbe"] = _models_are_warm(self.port, pods.workload)
        # Kubernetes takes a pod off the lists as it asks it to end, and Ray stops its replicas when it is asked. In
        # between, requests finish.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(self._leaving_s)]}}}
        template = self._template(container, group, has_account=False)
        if isinstance(group, GpuGroup):
            template["spec"]["tolerations"] = [{"key": group.resource, "operator": "Exists", "effect": "NoSchedule"}]
        return {
            "groupName": pods.name,
            "replicas": pods.min_pods,
            "minReplicas": pods.min_pods,
            "maxReplicas": pods.max_pods,
            "labels": {NODE_LABEL: pods.node},
            "rayStartParams": {},
            "template": template,
        }

    def _container(self, name: str, group: WorkerGroup, ports: Mapping[str, int]) -> dict[str, Any]:
        assert self.options.image is not None
        volumes = self.options.volumes
        cache = volumes.cache.path
        # What is logged is read where Kubernetes looks for it: files would go with the pod.
        ray = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(self._moving_s), "RAY_LOG_TO_STDERR": "1"}
        env = {**self.environment, **ray, "XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/hub"}
        size: dict[str, Any] = {"cpu": str(group.cpus), "memory": group.memory}
        if isinstance(group, GpuGroup):
            size[group.resource] = str(group.gpus)
        return {
            "name": name,
            "image": self.options.image,
            "env": [{"name": key, "value": value} for key, value in sorted(env.items())],
            "ports": [{"name": key, "containerPort": value} for key, value in ports.items()],
            "resources": {"requests": dict(size), "limits": dict(size)},
            "volumeMounts": [
                {"name": "models", "mountPath": volumes.models.path, "readOnly": True},
                {"name": "cache", "mountPath": cache},
            ],
            # Whether Ray's processes live, which no queue delays: a busy pod is not a dead one.
            "livenessProbe": _ray_is_alive(period_s=10, failures=12),
            "securityContext": _CONFINED,
        }

    def _template(self, container: dict[str, Any], group: WorkerGroup, *, has_account: bool) -> dict[str, Any]:
        options = self.options
        claims = {"models": options.volumes.models, "cache": options.volumes.cache}
        spec: dict[str, Any] = {
            "containers": [container],
            "terminationGracePeriodSeconds": self._grace_s,
            "automountServiceAccountToken": has_account,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [
                {"name": name, "persistentVolumeClaim": {"claimName": it.claim or f"{options.name}-{name}"}}
                for name, it in claims.items()
            ],
        }
        secrets = None if options.pull_secret is None else [{"name": options.pull_secret}]
        spec |= optional(imagePullSecrets=secrets, nodeSelector=group.node_selector or None)
        return {"metadata": {"labels": {SERVICE_LABEL: options.name}}, "spec": spec}


def _upgrade(options: DeploySection) -> dict[str, Any]:
    if options.upgrade is None:
        return {"type": "NewCluster"}
    return {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": options.upgrade.gateway_class,
            "stepSizePercent": options.upgrade.step_percent,
            "intervalSeconds": options.upgrade.interval_s,
            "maxSurgePercent": options.upgrade.max_surge_percent,
        },
    }


def _ray_is_alive(*, period_s: int, failures: int) -> dict[str, Any]:
    """Ray's own health check, which needs no token: the raylet, and on the head the GCS."""
    asks = {"httpGet": {"path": "/api/healthz", "port": _AGENT_PORT}, "initialDelaySeconds": 10}
    return {**asks, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _models_are_warm(port: int, workload: str | None) -> dict[str, Any]:
    """plait's `/health`: models are loaded, and a warm-up image was made; pods of one workload go on while the other
    one is down. A server that answers only to its own names answers to localhost."""
    path = "/health" if workload is None else f"/health?workload={workload}"
    asks = {"httpGet": {"path": path, "port": port, "httpHeaders": [{"name": "Host", "value": "localhost"}]}}
    return {**asks, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3}


def optional(**items: Any) -> dict[str, Any]:
    """Return those that are not None."""
    return {key: value for key, value in items.items() if value is not None}


def named_object(
    options: DeploySection, api: str, kind: str, spec: Any, *, part: str = "", labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return an object of Kubernetes, called as `deploy.name` says, or as a part of that."""
    name = f"{options.name}-{part}" if part else options.name
    own = {"labels": {SERVICE_LABEL: options.name, **(labels or {})}}
    metadata = {"name": name} | optional(namespace=options.namespace) | own
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
