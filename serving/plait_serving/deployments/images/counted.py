"""What the processes of the image workload count, for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Metric

from plait_kernels.cores import instruction_set
from plait_kernels.executors.audit import AuditStatistics
from plait_serving.cores import HostCores
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.request_registry import TenantUsage
from plait_serving.replica_metrics import ReplicaMetrics, family, this_process

_AUDITS = {
    "checked": "Calls of compiled models that torch computed again",
    "drifted": "Audited calls that differed from torch's",
    "skipped": "Calls that were to be audited and found no room to wait",
    "failed": "Audits that could not be made",
}


def counted(engine: Engine, host: HostCores) -> ReplicaMetrics:
    """Return what an engine's replica counts, on its host."""
    me, usage = this_process(), engine.usage()
    return ReplicaMetrics(
        replica=me,
        families=[*_engine_families(engine), *gpu_families(), *_host_families(host)],
        account={(me, tenant, name): it for tenant, used in usage.items() for name, it in _used(used).items()},
    )


def _engine_families(served: Engine) -> list[Metric]:
    """Return what an engine and its LoRA caches count. What may leave with a model has the model's name."""
    engine, residency, models = served.statistics(), served.pool.statistics(), served.pool.models
    caches = {id(model.loras): (name, model.loras) for name, model in models.items()}  # several models may share one
    loras = {(name,): cache.statistics() for name, cache in caches.values()}
    resident = {(name,): int(name in residency.resident) for name in models}
    prepared = {(part,): 1 for part in sorted(served.pool.prepared)}

    def of_loras(key: str) -> Mapping[tuple[str, ...], float]:
        return {name: getattr(cache, key) for name, cache in loras.items()}

    return [
        family("plait_engine_replicas", "Engines that this answer counts", 1),
        family("plait_engine_requests_waiting", "Image requests in the queue", engine.waiting),
        family("plait_engine_requests_running", "Image requests in the batch", engine.running),
        family("plait_engine_queued_compute_seconds", "Compute that waits, by forecast", round(engine.queued_s, 3)),
        family("plait_engine_steps_total", "Calls of the denoiser", engine.steps),
        family("plait_engine_rows_total", "Images in calls of the denoiser", engine.rows),
        family("plait_engine_lora_switches_total", "LoRA sets put into the weights", engine.lora_switches),
        family("plait_engine_finished_total", "Requests whose images were made", engine.finished),
        family("plait_engine_failed_total", "Requests that ended in an error", engine.failed),
        family("plait_engine_cancelled_total", "Requests whose client went away", engine.cancelled),
        family("plait_engine_rejected_total", "Requests that were refused", engine.rejected),
        family("plait_lora_cache_resident_bytes", "LoRAs in memory", of_loras("resident_bytes"), "model"),
        family("plait_lora_cache_resident", "LoRA files in memory", of_loras("resident"), "model"),
        family("plait_lora_cache_hits_total", "LoRA files that were in memory", of_loras("hits"), "model"),
        family("plait_lora_cache_misses_total", "LoRA files that were loaded", of_loras("misses"), "model"),
        family("plait_lora_cache_evictions_total", "LoRA files that made room", of_loras("evictions"), "model"),
        family("plait_models_resident_bytes", "Base models in memory", residency.nbytes),
        family("plait_models_budget_bytes", "What base models in memory may take", residency.budget_bytes),
        family("plait_model_loads_total", "Base models that were loaded", residency.loads),
        family("plait_model_resident", "1: the base model is in memory", resident, "model"),
        family("plait_engine_prepared", "Parts of the models that run as programs", prepared, "part"),
        *audit_families({name: model.family.auditor.statistics() for name, model in models.items()}),
    ]


def gpu_families() -> list[Metric]:
    """Return what this process has of its GPUs; without one the families are empty."""
    from plait_kernels.executors.graphs import on_gpus
    from plait_serving.diffusion.memory import available_bytes

    gpus = {(str(device),): (device, memory) for device, memory in on_gpus().items()}
    free = {name: available_bytes(device) for name, (device, _) in gpus.items()}
    taken = {name: memory.nbytes + memory.capture.pool_bytes for name, (_, memory) in gpus.items()}
    graphs = {name: memory.graphs for name, (_, memory) in gpus.items()}
    short = {name: memory.given_up for name, (_, memory) in gpus.items()}
    return [
        family("plait_gpu_free_bytes", "Memory that models of the process can still take", free, "device"),
        family("plait_gpu_graph_bytes", "Memory that CUDA graphs of the process have", taken, "device"),
        family("plait_gpu_graphs", "CUDA graphs of the process", graphs, "device"),
        family("plait_gpu_short_of_memory_total", "Calls that did not fit: batches were halved", short, "device"),
    ]


def _used(usage: TenantUsage) -> dict[str, float]:
    return {
        "image_requests_finished": usage.finished,
        "image_requests_failed": usage.failed,
        "image_requests_cancelled": usage.cancelled,
        "image_requests_rejected": usage.rejected,
        "images": usage.images,
        "image_pixels": usage.pixels,
        "image_steps": usage.steps,
        "image_compute_seconds": round(usage.compute_s, 6),
    }


def audit_families(audits: Mapping[str, AuditStatistics]) -> list[Metric]:
    """Return what a process's auditors found, by the name of the model that each is of."""
    shares = {(name,): round(audit.largest, 6) for name, audit in audits.items()}
    said = "The largest difference that an audit found, as a share of the tolerance"
    counted = [
        family(f"plait_audit_{key}_total", said, {(name,): getattr(it, key) for name, it in audits.items()}, "model")
        for key, said in _AUDITS.items()
    ]
    return [family("plait_audit_largest_share_of_tolerance", said, shares, "model"), *counted]


def _host_families(host: HostCores) -> list[Metric]:
    """Return what the replicas of the engine's host may use."""
    return [
        family("plait_host_cores", "Cores of the host", host.cores),
        family("plait_host_threads_planned", "Threads that its replicas may use together", host.planned_threads),
        family("plait_host_shared", "1: these are more than it has cores", int(host.is_shared)),
        family("plait_host_instruction_set", "Widest vector instructions", {(instruction_set(),): 1}, "name"),
    ]
