"""The tables that README files may show, by name: which rows, and which metrics side by side."""

from __future__ import annotations

from collections.abc import Mapping

from plait_bench.fault_tables import FAULT_TABLES
from plait_bench.table_spec import MEDIANS, TableSpec

__all__ = ["TABLES"]

_SEEDS = "The mean over the services of a workload, then the median of seeds (slow designers had fewer), with spread."


_OURS = "plait's ratio to it"
_IMAGES = {"images_per_s": "images/s", "peak_memory_gib": "GiB, peak"}
_STARTS = {
    "cold_ready_s": "s, ready first",
    "cold_first_image_s": "s, image first",
    "ready_s": "s, ready again",
    "first_image_s": "s, image again",
    "peak_memory_gib": "GiB, peak",
}
_STARTER = ("single", "controlnet", "lora", "same", "mixed", "distinct")
_MEMORY = "Memory is the sum over all processes of a system; the peak is the sum of each process's own."

_KERNELS = {
    "time_us": "us",
    "bandwidth": "GB/s",
    "share_of_copy": "of a copy",
    "gflops": "GFLOP/s",
    "share_of_matmul": "of a product",
    "share_of_step": "of a step",
}

TABLES: Mapping[str, TableSpec] = {
    **{
        name: TableSpec(
            bench="images",
            metrics=_IMAGES,
            ratio="images_per_s",
            ratio_title=_OURS,
            workloads=workloads,
            without=("start",),
            says=f"{says} {MEDIANS} {_MEMORY}",
        )
        for name, workloads, says in (
            ("images", _STARTER, "64x64, 20 steps, 12 to 30 in the mixed workloads of 16."),
            ("images-sd15", ("sd15-",), "4 steps; 256x256, or 512x512 where the name says so."),
            ("images-sdxl", ("sdxl-",), "2 steps; 256x256, or 512x512 where the name says so."),
        )
    },
    "images-start": TableSpec(
        bench="images",
        metrics=_STARTS,
        ratio="ready_s",
        ratio_title=f"{_OURS}, ready again",
        endings=("start",),
        says=f"First: with empty caches; again: with what the first start left there. {MEDIANS} {_MEMORY}",
    ),
    "loadtest": TableSpec(
        bench="loadtest",
        metrics={"requests_per_s": "requests/s", "cpu_s_per_1000": "CPU s per 1,000"},
        ratio="requests_per_s",
        ratio_title=_OURS,
    ),
    "disagg": TableSpec(
        bench="disagg", metrics={"goodput_per_s": "in time/s"}, ratio="goodput_per_s", ratio_title=_OURS
    ),
    "in-process": TableSpec(
        bench="disagg",
        metrics={"in_process_per_s": "requests/s"},
        ratio="in_process_per_s",
        ratio_title="split by it",
    ),
    "one-by-one": TableSpec(
        bench="disagg",
        metrics={"latency_p50_us": "us, median", "added_p50_us": "us more than whole"},
        ratio="latency_p50_us",
        ratio_title="split by it",
    ),
    "shards": TableSpec(
        bench="disagg",
        metrics={"sparse_p50_us": "us, median"},
        ratio="sparse_p50_us",
        ratio_title="shards by one process",
    ),
    "dense": TableSpec(bench="disagg", metrics={"dense_p50_us": "us, median"}, ratio="dense_p50_us", ratio_title=_OURS),
    "serve-one-by-one": TableSpec(
        bench="disagg",
        metrics={"latency_p50_ms": "ms, median", "latency_p99_ms": "ms, p99"},
        ratio="latency_p50_ms",
        ratio_title="median by Serve's",
    ),
    "overload": TableSpec(bench="disagg", metrics={"in_time_per_s": "in time/s", "share_of_peak": "of its peak"}),
    "refresh": TableSpec(
        bench="disagg", metrics={"p99_ms": "ms, p99"}, ratio="p99_ms", ratio_title="refreshed by still"
    ),
    "refresh-counts": TableSpec(
        bench="disagg",
        metrics={
            "mixed_version_answers": "wrong answers",
            "lost_requests": "lost requests",
            "rows_refreshed_per_s": "of all rows/s",
        },
        counted="answers",
        verb="Counted",
        says="",
    ),
    "fabric": TableSpec(
        bench="fabric",
        metrics={
            "gb_per_s": "GB/s",
            "round_trip_us": "us there and back",
            "one_way_us": "us one way",
            "alpha_us": "us, alpha",
        },
        long=True,
        ratio="*",
        ratio_title=_OURS,
    ),
    "transports": TableSpec(
        bench="fabric",
        metrics={"there_and_back_us": "us there and back"},
        ratio="there_and_back_us",
        ratio_title="a TCP socket's time by it",
    ),
    "zoo": TableSpec(
        bench="zoo",
        metrics={
            "crossing_bytes": "bytes",
            "by_hand_bytes": "by hand",
            "package_s": "s to package",
            "millionths": "max difference, 1e-6",
            "refused": "refused",
        },
        verb="Packaged",
        says="",
    ),
    "tuning": TableSpec(
        bench="tuning",
        metrics={
            "gain": "gain over the reference",
            "capacity_per_s": "capacity, 1/s",
            "promised_per_s": "promised, 1/s",
            "held_at_0.9": "held at 0.9",
            "held_at_1.1": "held at 1.1",
            "reserved_cores": "cores reserved",
            "used_cores": "cores used",
            "job_s": "s, the job",
            "load_s": "s of load",
            "beyond_load_s": "s of a trial beyond its load",
        },
        verb="Tuned",
        says="The gain is in the goal of the job; in parentheses the interval that it is 95 % sure of. Capacity: the "
        "mean of what its searches found. Held: the share of load tests, which are not the tuner's, at 0.9 and 1.1 of "
        "the promised rate.",
    ),
    "autoconfig-load": TableSpec(
        bench="autoconfig",
        metrics={"load_s": "s of load", "runs": "runs", "regret_at_12": "regret after 12 trials"},
        ratio="load_s",
        ratio_title="load of `looks` by its",
        workloads=("load",),
        verb="Searched",
        says="In virtual time. The mean over 12 services, then the median of seeds.",
    ),
    "autoconfig": TableSpec(
        bench="autoconfig",
        metrics={
            "regret_at_1": "regret at trial 1",
            "regret_at_5": "at 5",
            "regret_at_20": "at 20",
            "regret_confirmed_20": "at 20, confirmed",
            "trials_to_5pct": "trials to 5 %",
            "extra_trials_to_5pct": "more than cold",
        },
        ratio="trials_to_5pct",
        ratio_title="plait's trials by its",
        verb="Searched",
        says=_SEEDS,
    ),
    "autoconfig-ranks": TableSpec(
        bench="autoconfig",
        metrics={"rank": "mean rank"},
        counted="services",
        verb="Searched",
        says="By trials to 5 %, 1 is best (Friedman). In parentheses half a critical distance (Nemenyi, 95 %) on both "
        "sides: where two do not overlap, the designers differ.",
    ),
    "autoconfig-scores": TableSpec(
        bench="autoconfig",
        metrics={"so_score_3_trials": "S/O score at trial 3", "so_score_zero_shot": "S/O score, no trial"},
        verb="Searched",
        says=_SEEDS,
    ),
    "autoconfig-own": TableSpec(
        bench="autoconfig",
        metrics={"optimum": "optimum", "tied_cells": "of 48 cells as good"},
        workloads=("own-",),
        counted="trials of a cell",
        says="In parentheses: where the mean of the best cell is with 95 % certainty.",
    ),
    "autoconfig-costs": TableSpec(
        bench="autoconfig",
        metrics={
            "infeasible_6_to_15": "infeasible of trials 6 to 15",
            "ask_ms_after_100": "ms per proposal after 100",
            "pretrain_s": "s to learn from the library",
        },
        verb="Searched",
        says=_SEEDS,
    ),
    "kernels": TableSpec(
        bench="kernels",
        metrics=_KERNELS,
        ratio="time_us",
        ratio_title="plait's time by its",
        workloads=("geglu", "group-norm", "residual-add", "lora-merge", "int8-lookup", "guided-update"),
        says=f"Calls go round over inputs that no cache holds. {MEDIANS}",
    ),
    "kernels-tried": TableSpec(
        bench="kernels",
        metrics=_KERNELS,
        ratio="time_us",
        ratio_title="eager's time by its",
        workloads=("tried-",),
        says=MEDIANS,
    ),
    "models": TableSpec(
        bench="models",
        metrics={
            "p50_steps": "steps, median",
            "p99_steps": "steps, p99",
            "goodput_per_1000_steps": "good per 1,000 steps",
            "loads": "loads",
        },
        ratio="p50_steps",
        ratio_title="plait by LRU, median latency",
        workloads=("load",),
        counted="windows",
        verb="Modelled",
        says="Time is in steps of one image; a load takes as many as the workload's name says, then replicas and the "
        "models that each has memory for. Ratios are taken window by window; less is better.",
    ),
    "models-measured": TableSpec(
        bench="models",
        metrics={"images_per_s": "images/s", "loads": "loads", "load_s": "s, the longest load"},
        ratio="images_per_s",
        ratio_title="plait by one after another",
        workloads=("sd15-switches",),
        says=f"Eight images of 256x256 in two steps for four models, with memory for two. {MEDIANS}",
    ),
    "placement": TableSpec(
        bench="placement",
        metrics={
            "allocated_mean_pct": "% allocated",
            "published_mean_pct": "published",
            "stranded_mean_pct": "% stranded",
            "run_s": "s a run",
            "decision_p99_ms": "ms, p99 decision",
        },
        without=("nodes", "1250", "5000", "20000", "split", "monolithic", "shared"),
        counted="seeds",
        digits=4,
        verb="Simulated",
        says="Of all GPUs, means of seeds; in parentheses the lowest and highest. Times are medians, measured on one "
        "core. Published: the means of the FGD authors' runs.",
    ),
    "placement-nodes": TableSpec(
        bench="placement",
        metrics={"decision_us": "us a decision", "decision_p99_ms": "ms, p99", "growth": "growth by linear growth"},
        workloads=("nodes",),
        says="Decisions on clusters of that many nodes, after 3,000 that do not count. Growth: the time at 20,000 "
        "nodes by that at 1,250, divided by 16; below 1 is less than linear.",
    ),
    "placement-dlrm": TableSpec(
        bench="placement",
        metrics={
            "nodes": "nodes",
            "gpus": "GPUs",
            "gpus_used": "GPUs used",
            "cores_stranded": "cores stranded",
            "cores_stranded_pct": "% of cores",
            "gpus_stranded": "GPUs stranded",
            "gpus_stranded_pct": "% of GPUs",
            "refused_pct": "% refused",
            "covered_pct": "% of trace",
        },
        workloads=("dlrm",),
        counted="seeds",
        verb="Simulated",
        says="Medians of seeds, each a mean over 31 days; in parentheses the 20th and 80th percentile. Stranded: idle, "
        "but of no use to the average instance that asks for it. Refused: fitted nowhere when they came. % of trace: "
        "instances of the apps that fit nodes of 128 cores.",
    ),
    "placement-ray": TableSpec(
        bench="placement",
        metrics={
            "stranded_pct": "% stranded",
            "idle_pct": "% idle",
            "without_place": "replicas without a place",
            "restarted": "restarted without need",
            "step_s": "s until all run",
        },
        workloads=("ray-",),
        says="One play of each, by Ray Serve on Ray nodes of this machine. GPUs are numbers, and replicas do nothing.",
    ),
    "crossing": TableSpec(bench="disagg", metrics={"crossing_bytes": "bytes"}, verb="Counted", says=""),
    **FAULT_TABLES,
}
"""The tables, by the name used in a marker."""
