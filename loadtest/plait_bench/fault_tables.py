"""The tables of whole-server runs (`python -m tests.faults`), by name."""

from __future__ import annotations

from collections.abc import Mapping

from plait_bench.table_spec import MEDIANS, TableSpec

__all__ = ["FAULT_TABLES"]

_HELD = {
    "memory_mib": "MiB",
    "shared_mib": "MiB, shared",
    "processes": "processes",
    "threads": "threads",
    "descriptors": "descriptors",
    "sockets": "sockets",
    "socket_files": "socket files",
    "shm_files": "files in /dev/shm",
    "zombies": "zombies",
    "orphans": "orphans",
}
FAULT_TABLES: Mapping[str, TableSpec] = {
    "faults": TableSpec(
        bench="faults",
        metrics={
            "requests": "requests",
            "right": "right",
            "wrong": "wrong",
            "documented": "documented error",
            "proxy": "Serve's proxy",
            "undocumented": "undocumented",
            "hung": "hung",
            "disconnected": "left by us",
            "answered_s": "s until right",
            "replaced_s": "s until back",
        },
        workloads=("ends",),
        counted="faults",
        verb="Counted",
        says="By the fault that came last before the end of a request. Seconds: from the kill until the first right "
        "answer that needs the process, and until there is another one.",
    ),
    "faults-held": TableSpec(
        bench="faults", metrics=_HELD, workloads=("held",), counted="runs", verb="Counted",
        says="Memory: pages that are no file's, summed over all processes of the server; shared ones count for each. "
        "Rows before 2026-11-25 count mapped files, too.",
    ),
    "fairness": TableSpec(
        bench="faults",
        metrics={
            "goodput_per_s": "in time/s",
            "latency_p50_s": "s, median",
            "latency_p99_s": "s, p99",
            "first_image_s": "s, single image",
        },
        ratio="goodput_per_s",
        ratio_title="beside by alone",
        workloads=("share", "first-image"),
        says=MEDIANS,
    ),
    "neighbours": TableSpec(
        bench="faults",
        metrics={
            "latency_p50_s": "s, median",
            "latency_p95_s": "s, p95",
            "health_p99_s": "s, p99 of `/health`",
            "requests": "images",
            "right": "right",
            "killed": "processes killed",
            "engine_mib": "MiB, engine",
            "engine_peak_mib": "at most",
            "ingress_mib": "MiB, ingress",
            "ingress_peak_mib": "at most",
        },
        ratio="latency_p95_s",
        ratio_title="p95 beside by alone",
        workloads=("neighbours-",),
        says=f"{MEDIANS} MiB: before the first round alone, after the last beside the attack.",
    ),
    "many": TableSpec(
        bench="faults",
        metrics={
            "engine_mib": "MiB, engine, at most",
            "requests": "requests",
            "answered": "answered",
            "refused": "refused",
            "broken": "neither",
            "killed": "processes killed",
            "refusal_ms": "ms, a refusal",
            "unknown_ms": "ms, a LoRA that nobody has",
            "listing_ms": "ms, `/v1/loras`",
            "first_ms": "ms, the first request after",
            "image_s": "s, an image of eight at once",
            "known_s": "s until one more file is known",
        },
        long=True,
        workloads=("many-",),
        counted="times",
        says="Medians; in parentheses the 20th and 80th percentile. Each model was asked with every sampler, twice.",
    ),
    "refusals": TableSpec(
        bench="faults",
        metrics={"refused_p50_s": "s, median", "refused_p99_s": "s, p99", "refused_per_s": "refusals/s"},
        workloads=("refusals-",),
        counted="runs",
        says="Connections that ask again as soon as they have an answer.",
    ),
    "steady": TableSpec(
        bench="faults",
        metrics={
            "memory_bytes_per_hour": "MiB per hour",
            "shared_bytes_per_hour": "MiB of shared memory per hour",
            "descriptors_per_hour": "descriptors per hour",
            "sockets_per_hour": "sockets per hour",
            "socket_files_per_hour": "socket files per hour",
            "shm_files_per_hour": "files in /dev/shm per hour",
            "threads_per_hour": "threads per hour",
            "processes_per_hour": "processes per hour",
        },
        long=True,
        workloads=("steady",),
        counted="runs",
        says="The slope of a line through what the server held (Theil and Sen), with its 95 % interval.",
    ),
}  # fmt: skip
