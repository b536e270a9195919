"""The factories that worker processes call. Imports are deferred: only the system's own libraries are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait_bench.errors import BenchError
from plait_bench.fleet.values import FleetWorker
from plait_bench.images.models import ModelFolder
from plait_bench.images.sizes import DeviceName, DTypeName


def models_of(settings: Mapping[str, Any]) -> ModelFolder:
    """Read the models from a workload's settings."""
    root = Path(settings["root"])
    return ModelFolder(
        root=root,
        base=root / settings["base"],
        controlnets={name: root / folder for name, folder in settings["controlnets"].items()},
        loras={name: root / "loras" / f"{name}.safetensors" for name in settings["loras"]},
    )


def served(  # noqa: PLR0917  # called with the settings of a system and a workload, by name
    models: Mapping[str, Any],
    dtype: DTypeName,
    edge: int | None,  # noqa: ARG001  # the settings of a workload are the same for all systems
    cache: str = "",
    knobs: Mapping[str, Any] | None = None,
    executor: str = "",
    is_split: bool = False,
    device: DeviceName = "cpu",  # noqa: ARG001
) -> FleetWorker:
    """Start `plait serve`."""
    from plait_bench.images.systems.served import Served

    return Served(models_of(models), dtype=dtype, cache=cache, knobs=knobs or {}, executor=executor, is_split=is_split)


def engine(
    models: Mapping[str, Any],
    dtype: DTypeName,
    edge: int | None,  # noqa: ARG001
    cache: str = "",  # noqa: ARG001
    device: DeviceName = "cpu",
) -> FleetWorker:
    """Build our engine, in process."""
    from plait_bench.images.systems.engine import InProcessEngine

    return InProcessEngine(models_of(models), dtype=dtype, device=device)


def diffusers(  # noqa: PLR0917
    models: Mapping[str, Any],
    dtype: DTypeName,
    edge: int | None,  # noqa: ARG001
    way: str,
    cache: str = "",  # noqa: ARG001  # it has none
    device: DeviceName = "cpu",
) -> FleetWorker:
    """Build a peer; `way` is stock, fair or batched."""
    from plait_bench.images.systems import peers

    ways = {"stock": peers.stock, "fair": peers.fair, "batched": peers.batched}
    if way not in ways:
        raise BenchError(f"there is no way {way!r} to use diffusers")
    return ways[way](models_of(models), dtype, device)


def openvino(
    models: Mapping[str, Any],
    dtype: DTypeName,
    edge: int | None,
    cache: str = "",
    device: DeviceName = "cpu",  # noqa: ARG001
) -> FleetWorker:
    """Build the pipeline of optimum-intel; `cache` holds its exports, the benchmarks' own if empty."""
    from plait_bench.images.systems.openvino import OpenVinoPipeline

    return OpenVinoPipeline(models_of(models), dtype=dtype, cache=cache, edge=edge)
