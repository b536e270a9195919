"""The `deploy` section of plait.yaml: the pods that carry its deployments. A server on one machine ignores it.

The limits are those of KubeRay 1.7 (`ValidateRayServiceSpec`, `MaxRayServiceNameLength`).
"""

from __future__ import annotations

import re
from os.path import expanduser
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

_DIGEST = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
_SHIFTS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$", description="bytes, for example 16Gi")]


def _absolute(text: str) -> str:
    if not PurePosixPath(text).is_absolute() or ".." in PurePosixPath(text).parts or text == "/":
        raise ValueError(f"{text} is not an absolute path of a folder")
    return text.rstrip("/")


def _local(text: str, info: ValidationInfo) -> str:
    """Resolve a relative path in a file relative to that file."""
    folder = info.context.get("folder") if isinstance(info.context, dict) else None
    return str((Path(folder or ".") / Path(expanduser(text))).resolve())


MountPath = Annotated[str, AfterValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerGroup(_Section):
    """Pods of one size. Counts that are left out follow from the replicas."""

    cpus: Annotated[int, Field(ge=1, le=1024, description="cores of a pod")] = 4
    memory: Quantity = "16Gi"
    min_pods: Annotated[int | None, Field(ge=1, le=10_000)] = None
    max_pods: Annotated[int | None, Field(ge=1, le=10_000)] = None
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of Kubernetes' nodes")

    @property
    def memory_bytes(self) -> int:
        """The memory of a pod."""
        return int(self.memory[:-2]) << _SHIFTS[self.memory[-2:]]

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_pods is not None and self.max_pods is not None and self.min_pods > self.max_pods:
            raise ValueError(f"min_pods {self.min_pods} is more than max_pods {self.max_pods}")
        return self


class ShardGroup(WorkerGroup):
    """Shards of ranking models' tables: memory and few cores."""

    memory: Quantity = "64Gi"


class GpuGroup(WorkerGroup):
    """HN: what needs one."""

    cpus: Annotated[int, Field(ge=1, le=1024, description="cores of a pod")] = 8
    memory: Quantity = "32Gi"
    gpus: Annotated[int, Field(ge=1, le=64, description="GPUs of a pod")] = 1
    resource: Annotated[str, Field(min_length=1, description="what Kubernetes calls them")] = "nvidia.com/gpu"


class Folder(_Section):
    """A volume. With `claim` one that is there; else one is claimed."""

    path: MountPath
    claim: Annotated[DnsLabel | None, Field(description="an existing PersistentVolumeClaim")] = None
    size: Quantity = "50Gi"
    storage_class: str | None = None


class Volumes(_Section):
    """What pods read models from, and what they keep: converted models, downloads. Pods of all nodes mount both."""

    models: Folder = Folder(path="/models")
    models_from: Annotated[
        Annotated[str, AfterValidator(_local)] | None,
        Field(description="the local folder that lies on the volume: its paths are rewritten"),
    ] = None
    cache: Folder = Folder(path="/cache")

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.models.path == self.cache.path:
            raise ValueError(f"models and cache are both at {self.cache.path}")
        return self


class NetworkAccess(_Section):
    """Who may speak to the pods, besides each other. Pods of the same namespace may always send requests."""

    operator_namespace: Annotated[DnsLabel, Field(description="where KubeRay's operator runs")] = "kuberay-system"
    monitoring_namespace: Annotated[DnsLabel | None, Field(description="where Prometheus runs; null: none")] = (
        "monitoring"
    )
    client_namespaces: Annotated[tuple[DnsLabel, ...], Field(description="whose pods may send requests, too")] = ()


class IncrementalUpgrade(_Section):
    """Traffic moves to a new cluster in steps, through the Gateway API."""

    gateway_class: Annotated[str, Field(min_length=1)]
    step_percent: Annotated[int, Field(ge=1, le=100)] = 20
    interval_s: Annotated[int, Field(ge=1, le=86_400)] = 30
    max_surge_percent: Annotated[int, Field(ge=1, le=100)] = 100

    @model_validator(mode="after")
    def _step_fits(self) -> Self:
        if self.step_percent > self.max_surge_percent:
            raise ValueError(
                f"step_percent {self.step_percent} is more than max_surge_percent {self.max_surge_percent}"
            )
        return self


class DeploySection(_Section):
    """How `plait deploy render --target kuberay` renders the rest of the file."""

    name: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$", description="of all objects")] = "plait"
    namespace: DnsLabel | None = None
    image: Annotated[str | None, Field(min_length=1, description="with plait in it, by digest")] = None
    allow_tag: Annotated[bool, Field(description="whether an image without a digest will do")] = False
    pull_secret: DnsLabel | None = None
    token_secret: Annotated[
        DnsLabel | None, Field(description="has Ray's token as auth_token; unset: the operator makes one")
    ] = None
    head: WorkerGroup = WorkerGroup(cpus=2, memory="8Gi")
    cpu: Annotated[WorkerGroup, Field(description="CN: what needs no GPU")] = WorkerGroup()
    gpu: GpuGroup = GpuGroup()
    shard: ShardGroup = ShardGroup()
    volumes: Volumes = Volumes()
    network: NetworkAccess = NetworkAccess()
    metrics_secret: Annotated[
        DnsLabel | None,
        Field(description="has an API key as api_key, for Prometheus; needed where the server has keys"),
    ] = None
    autoscaling: Annotated[bool, Field(description="whether Ray adds and removes pods")] = False
    queue: Annotated[DnsLabel | None, Field(description="Kueue's LocalQueue")] = None
    upgrade: Annotated[IncrementalUpgrade | None, Field(description="unset: a new cluster takes over at once")] = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.image is not None and not self.allow_tag and not _DIGEST.fullmatch(self.image):
            raise ValueError(
                f"image {self.image} has no digest (name@sha256:...), so it may change: pin it or allow_tag"
            )
        if self.upgrade is not None and not self.autoscaling:
            raise ValueError("upgrade needs autoscaling: true, since KubeRay moves traffic by moving capacity")
        if {self.head.min_pods, self.head.max_pods} - {None, 1}:
            raise ValueError("head is one pod: leave min_pods and max_pods out")
        return self
