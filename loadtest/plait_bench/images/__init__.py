"""The image benchmark: workloads, systems, measures. `definition` is all that the runner needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from plait_bench.benchmark import Metric, chosen
from plait_bench.fleet.sharing import by_group, evenly, in_runs
from plait_bench.fleet.values import FleetDefinition, ItemList, RunSample, System
from plait_bench.images import pixels
from plait_bench.images.models import open_models
from plait_bench.images.workloads import NAMES, cost, lora_set, workloads

NAME = "images"
OURS = "plait"
SYSTEMS = ("plait", "diffusers_fair", "diffusers", "diffusers_batched")


METRICS: Mapping[str, Metric] = {
    "images_per_s": Metric(unit="images/s", better="higher"),
    "seconds_per_image": Metric(unit="s", better="lower"),
    "mean_latency_s": Metric(unit="s", better="lower"),
    "largest_pixel_difference": Metric(unit="levels of 255"),
}


def definition(root: Path, *, only: Sequence[str] = (), systems: Sequence[str] = ()) -> FleetDefinition:
    """Define the benchmark over the models in `root`, with all workloads and systems or those named.

    Raises `BenchError` if models are missing, or a name is unknown.
    """
    wanted = workloads(chosen(only, NAMES, "workload"))
    taking_part = chosen(systems, SYSTEMS, "system")
    items = [item for workload in wanted for item in workload.items]
    controlnets = frozenset(item["control"][0] for item in items if item["control"])
    loras = frozenset(name for item in items for name, _ in item["loras"])
    models = open_models(root, controlnets=controlnets, loras=loras)
    known = _systems({"root": str(models.root.resolve()), "controlnets": sorted(controlnets), "loras": sorted(loras)})
    return FleetDefinition(
        name=NAME,
        ours=OURS,
        systems=tuple(known[name] for name in taking_part),
        workloads=wanted,
        metrics=METRICS,
        measures=measures,
        check=pixels.check,
    )


def measures(workload: ItemList, sample: RunSample) -> Mapping[str, float]:
    """Compute the throughput of the whole workload, and latency: of a single image, or the mean of concurrent ones."""
    per_s = len(workload.items) / sample.wall_s
    result = {"images_per_s": per_s, "seconds_per_image": 1 / per_s}
    if not workload.one_by_one:
        result["mean_latency_s"] = mean(sample.latencies_s)
    return result


def _knobs(workload: ItemList) -> tuple[str, ...]:
    """Return the values of the engine's knob that matters: exactness of a request alone, or the maximum images per
    batch.

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
