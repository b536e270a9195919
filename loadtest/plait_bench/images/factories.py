"""The factories that worker processes call. Imports are deferred: only the system's own libraries are loaded."""

from __future__ import annotations

from pathlib import Path

from plait_bench.errors import BenchError
from plait_bench.fleet.values import FleetWorker
from plait_bench.images.models import ModelFolder, open_models


def plait(root: str, controlnets: list[str], loras: list[str]) -> FleetWorker:
    """Build our engine, in process."""
    from plait_bench.images.ours import Ours

    return Ours(_models(root, controlnets, loras))


def diffusers(root: str, controlnets: list[str], loras: list[str], way: str) -> FleetWorker:
    """Build a peer; `way` is stock, fair or batched."""
    from plait_bench.images import peers

    ways = {"stock": peers.stock, "fair": peers.fair, "batched": peers.batched}
    if way not in ways:
        raise BenchError(f"there is no way {way!r} to use diffusers")
    return ways[way](_models(root, controlnets, loras))


def _models(root: str, controlnets: list[str], loras: list[str]) -> ModelFolder:
    return open_models(Path(root), controlnets=frozenset(controlnets), loras=frozenset(loras))
