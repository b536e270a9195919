"""The image benchmark: workloads, systems, measures. `definition` is all that the runner needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from plait_bench.benchmark import Benchmark, MetricValue, RunSample, System, Workload
from plait_bench.images import pixels
from plait_bench.images.models import open_models
from plait_bench.images.workloads import cost, lora_set, workloads
from plait_bench.sharing import by_group, evenly, in_runs

NAME = "images"
OURS = "plait"
SYSTEMS = ("plait", "diffusers_fair", "diffusers", "diffusers_batched")


def definition(root: Path, *, only: Sequence[str] | None = None, systems: Sequence[str] | None = None) -> Benchmark:
    """The benchmark over the models in ``root``; all workloads and systems, or those named.

    Raises `BenchError` if models are missing, KeyError for an unknown name.
    """
    chosen = workloads(only)
    items = [item for workload in chosen for item in workload.items]
    controlnets = frozenset(item["control"][0] for item in items if item["control"])
    loras = frozenset(name for item in items for name, _ in item["loras"])
    models = open_models(root, controlnets=controlnets, loras=loras)
    known = _systems({"root": str(models.root.resolve()), "controlnets": sorted(controlnets), "loras": sorted(loras)})
    return Benchmark(
        name=NAME,
        ours=OURS,
        systems=tuple(known[name] for name in (systems or SYSTEMS)),
        workloads=chosen,
        measures=measures,
        check=pixels.check,
    )


def measures(workload: Workload, sample: RunSample) -> Mapping[str, MetricValue]:
    """Throughput of the whole workload, and latency: of a picture that runs alone, or the mean of those at once."""
    per_s = len(workload.items) / sample.wall_s
    result = {
        "images_per_s": MetricValue(unit="images/s", value=per_s),
        "seconds_per_image": MetricValue(unit="s", value=1 / per_s),
    }
    if not workload.one_by_one:
        result["mean_latency_s"] = MetricValue(unit="s", value=mean(sample.latencies_s))
    return result


def _knobs(workload: Workload) -> tuple[str, ...]:
    """The knob of our engine that matters: the bits of a request alone, or the most images in one denoiser call.

    The peers may choose their memory format, which changes the last bits as well.
    """
    return ("exact", "never exact") if workload.one_by_one else ("batch 16", "batch 8", "batch 4")


def _systems(settings: Mapping[str, object]) -> dict[str, System]:
    here = "plait_bench.images.factories"
    return {
        "plait": System(
            name="plait",
            factory=f"{here}:plait",
            settings=settings,
            share=partial(by_group, cost=cost, group=lora_set),
            variants=_knobs,
        ),
        "diffusers_fair": System(
            name="diffusers_fair",
            factory=f"{here}:diffusers",
            settings={**settings, "way": "fair"},
            share=partial(in_runs, cost=cost, group=lora_set),
            variants=lambda _: ("", "channels_last"),
        ),
        "diffusers": System(
            name="diffusers",
            factory=f"{here}:diffusers",
            settings={**settings, "way": "stock"},
            share=partial(evenly, cost=cost),
        ),
        "diffusers_batched": System(
            name="diffusers_batched",
            factory=f"{here}:diffusers",
            settings={**settings, "way": "batched"},
            share=partial(evenly, cost=cost),
            variants=lambda _: ("", "channels_last"),
        ),
    }
