"""`GET /v1/status`: how the server is, for people: what `/health` and `/metrics` know, in one small answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastapi import APIRouter
from prometheus_client import Metric
from pydantic import BaseModel, Field

from plait_kernels.cores import instruction_set
from plait_serving.http.context import ContextDep, installed_version
from plait_serving.http.metrics import gather
from plait_serving.replica_metrics import REPLICA

router = APIRouter(prefix="/v1", tags=["operations"])


class ReplicasStatus(BaseModel):
    """The replicas that answer now."""

    ingress: int
    engine: int


class QueueStatus(BaseModel):
    """Image requests over all replicas of the engine."""

    waiting: int
    running: int
    compute_s: float = Field(description="predicted seconds of compute that wait")


class ResidentStatus(BaseModel):
    """What the engine's replicas hold."""

    models: list[str] = Field(description="base models in the memory of any replica")
    model_bytes: int
    loras: int
    lora_bytes: int
    prepared: list[str] = Field(description="parts of the model that run as programs of the executor")


class StatusResponse(BaseModel):
    """Counts of the moment. A service that is not in `services` is not part of this server."""

    version: str
    ready: bool
    reason: str | None
    services: dict[str, bool]
    instruction_sets: list[str] = Field(
        description="widest vector instructions that the engine's hosts compute with; without images, the ingress's"
    )
    replicas: ReplicasStatus
    queue: QueueStatus
    resident: ResidentStatus
    images_made: int
    rankings_made: int


@dataclass(frozen=True, slots=True)
class _Read:
    """Sums of samples by name, and the largest by the value of each label."""

    sums: Mapping[str, float]
    labels: Mapping[str, Mapping[str, float]]


@router.get("/status", summary="Replicas, queue and what is resident")
async def status(context: ContextDep) -> StatusResponse:
    """Return how the server is. What does not answer within a second counts as 0."""
    health = await context.health()
    gathered = await gather(context)
    found = _read(gathered.families)
    number = found.sums
    return StatusResponse(
        version=installed_version(),
        ready=health.ready,
        reason=health.reason,
        services=gathered.is_up,
        instruction_sets=sorted(found.labels["plait_host_instruction_set"]) or [instruction_set()],
        replicas=ReplicasStatus(
            ingress=int(number["plait_ingress_replicas"]), engine=int(number["plait_engine_replicas"])
        ),
        queue=QueueStatus(
            waiting=int(number["plait_engine_requests_waiting"]),
            running=int(number["plait_engine_requests_running"]),
            compute_s=number["plait_engine_queued_compute_seconds"],
        ),
        resident=ResidentStatus(
            models=sorted(name for name, count in found.labels["plait_model_resident"].items() if count),
            model_bytes=int(number["plait_models_resident_bytes"]),
            loras=int(number["plait_lora_cache_resident"]),
            lora_bytes=int(number["plait_lora_cache_resident_bytes"]),
            prepared=sorted(found.labels["plait_engine_prepared"]),
        ),
        images_made=int(number["plait_images_total"]),
        rankings_made=int(number["plait_rank_duration_seconds_count"]),
    )


def _read(families: Iterable[Metric]) -> _Read:
    sums: dict[str, float] = defaultdict(float)
    labels: dict[str, dict[str, float]] = defaultdict(dict)
    for family in families:
        for sample in family.samples:
            sums[sample.name] += sample.value
            for value in (value for key, value in sample.labels.items() if key != REPLICA):
                labels[sample.name][value] = max(sample.value, labels[sample.name].get(value, 0.0))
    return _Read(sums, labels)
