"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping

from plait_bench.cells import engine, rank
from plait_bench.cells.engine import EngineWorkload
from plait_bench.cells.rank import RankWorkload
from plait_bench.cells.values import CellWorkload

__all__ = ["WORKLOADS"]


def _images(
    name: str, *, callers: int, images: int, steps: int, slo_ms: float, loras: int = 0, controlled: int = 0
) -> EngineWorkload:
    return EngineWorkload(
        name=name,
        service="images",
        space=engine.SPACE,
        sets=engine.SETS,
        slo_ms=slo_ms,
        features={
            "callers": callers, "steps": steps, "lora_sets": loras, "controlled_share": controlled / 4,
            "slo_ms": slo_ms,
        },
        callers=callers,
        images=images,
        steps=steps,
        loras=loras,
        controlled=controlled,
        slow_knob="threads",
    )  # fmt: skip


def _rank(
    name: str, model: str, scale: float, *, candidates: int, callers: int, requests: int, slo_ms: float
) -> RankWorkload:
    return RankWorkload(
        name=name,
        service="recommend",
        space=rank.SPACE,
        sets=rank.SETS,
        slo_ms=slo_ms,
        features={"callers": callers, "candidates": candidates, "slo_ms": slo_ms},
        model=model,
        scale=scale,
        candidates=candidates,
        callers=callers,
        requests=requests,
    )


WORKLOADS: Mapping[str, CellWorkload] = {
    workload.name: workload
    for workload in (
        _images("images-mixed", callers=6, images=18, steps=6, slo_ms=1500.0, loras=2, controlled=1),
        _images("images-plain", callers=4, images=12, steps=8, slo_ms=1000.0),
        _images("images-loras", callers=8, images=16, steps=4, slo_ms=1500.0, loras=4),
        _images("images-controlled", callers=4, images=8, steps=6, slo_ms=1500.0, controlled=4),
        _rank("rm1-64", "rm1", 0.125, candidates=64, callers=8, requests=2400, slo_ms=20.0),
        _rank("rm1-512", "rm1", 0.125, candidates=512, callers=4, requests=600, slo_ms=50.0),
        _rank("criteo-64", "criteo-kaggle", 0.25, candidates=64, callers=8, requests=1800, slo_ms=10.0),
        _rank("rm2-64", "rm2", 0.125, candidates=64, callers=8, requests=800, slo_ms=50.0),
    )
}
"""The workloads by name."""
