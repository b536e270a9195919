"""The image benchmark: sizes, workloads, systems, measures. `benchmark` is all that the runner needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from plait_bench.benchmark import Benchmark, Metric, Say, chosen
from plait_bench.fleet.values import FleetDefinition, ItemList, RunSample
from plait_bench.fleet.workload import OpenFleet, on_fleets
from plait_bench.images import pixels
from plait_bench.images.models import open_models, write_missing
from plait_bench.images.roster import OURS, SYSTEMS, systems, taking_part
from plait_bench.images.sizes import Variety
from plait_bench.images.start import StartWorkload
from plait_bench.images.workloads import START, workloads

NAME = "images"

METRICS: Mapping[str, Metric] = {
    "images_per_s": Metric(unit="images/s", better="higher"),
    "seconds_per_image": Metric(unit="s", better="lower"),
    "mean_latency_s": Metric(unit="s", better="lower"),
    "largest_pixel_difference": Metric(unit="levels of 255"),
    "mean_pixel_difference": Metric(unit="levels of 255"),
}


def benchmark(
    root: Path,
    *,
    cores: int,
    open_fleet: OpenFleet,
    varieties: Sequence[Variety] = (Variety(),),
    only: Sequence[str] = (),
    named: Sequence[str] = (),
) -> Benchmark:
    """Make the benchmark over the models in `root`, with all workloads and their systems or those named.

    The models of a real size that are missing are written first. Raises `BenchError` if models are missing, or a name
    is unknown.
    """
    size = varieties[0].size
    wanted = chosen(only, size.workloads, "workload")
    chosen(named, SYSTEMS, "system")
    defined = definition(root, varieties=varieties, only=[name for name in wanted if name != START], named=named)
    fleets = on_fleets(defined, cores=cores, open_fleet=open_fleet)
    starts: list[StartWorkload] = []
    if START in wanted:
        for variety in varieties:
            taken = systems(taking_part(START, size, named))
            starts.append(StartWorkload(variety, taken, _settings(root, variety, _items(START, variety)), open_fleet))

    @contextmanager
    def session(say: Say) -> Iterator[None]:
        if size.family:
            write_missing(root, **_needs(_all_items(wanted, varieties[0])), size=size, say=say)
        with fleets.session(say):
            yield

    return Benchmark(name=NAME, workloads=(*starts, *fleets.workloads), session=session)


def definition(
    root: Path,
    *,
    varieties: Sequence[Variety] = (Variety(),),
    only: Sequence[str] | None = None,
    named: Sequence[str] = (),
) -> FleetDefinition:
    """Define the workloads that have orders, or those of them in `only`.

    Raises `BenchError` if models are missing that are not written here.
    """
    size = varieties[0].size
    names = [name for name in (size.workloads if only is None else only) if name != START]
    if not size.family:
        open_models(root, **_needs(_all_items(names, varieties[0])), size=size)
    lists: list[ItemList] = []
    for variety in varieties:
        shared = None if size.max_open and not variety.on_gpu else _all_items(names, variety)
        for name in names:
            (workload,) = workloads([name], variety)
            settings = _settings(root, variety, shared or workload.items)
            taken = taking_part(name, size, named, on_gpu=variety.on_gpu)
            lists += _parts(replace(workload, settings=settings), taken, variety)
    used = [name for name in SYSTEMS if any(name in (each.systems or ()) for each in lists)]
    return FleetDefinition(
        name=NAME,
        ours=used[0] if used else OURS,
        systems=systems(used),
        workloads=tuple(lists),
        metrics=METRICS,
        measures=measures,
        check=pixels.PixelCheck(),
        max_open=0 if varieties[0].on_gpu else size.max_open,
    )


def _parts(workload: ItemList, names: Sequence[str], variety: Variety) -> list[ItemList]:
    """Return the workload; where not all systems fit in memory, once for each peer, beside ours.

    Two systems that are open in turn would otherwise be opened anew for every round.
    """
    size = variety.size
    if variety.on_gpu or not size.max_open or len(names) <= size.max_open or size.max_open == 1:
        return [replace(workload, systems=frozenset(names))] if names else []
    ours, *others = names
    peers = sorted(others, key=lambda name: (not name.startswith("diffusers"), others.index(name)))  # the reference
    return [replace(workload, systems=frozenset({ours, peer})) for peer in peers]


def _settings(root: Path, variety: Variety, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the factories are called with: the models that the items need, and how to run them."""
    size, needed = variety.size, _needs(items)
    models = {
        "root": str(root.resolve()),
        "base": size.base,
        "controlnets": {name: size.controlnets[name] for name in sorted(needed["controlnets"])},
        "loras": sorted(needed["loras"]),
    }
    return {"models": models, "dtype": variety.dtype, "edge": variety.image_edge, "device": variety.device}


def _needs(items: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    return {
        "controlnets": frozenset(item["control"][0] for item in items if item["control"]),
        "loras": frozenset(name for item in items for name, _ in item["loras"]),
    }


def _items(name: str, variety: Variety) -> tuple[Mapping[str, Any], ...]:
    return workloads([name], variety)[0].items if name != START else workloads(["single"], variety)[0].items


def _all_items(names: Sequence[str], variety: Variety) -> list[Mapping[str, Any]]:
    return [item for name in names for item in _items(name, variety)]


def measures(workload: ItemList, sample: RunSample) -> Mapping[str, float]:
    """Compute the throughput of the whole workload, and latency: of a single image, or the mean of concurrent ones."""
    per_s = len(workload.items) / sample.wall_s
    result = {"images_per_s": per_s, "seconds_per_image": 1 / per_s}
    if not workload.one_by_one:
        result["mean_latency_s"] = mean(sample.latencies_s)
    return result
