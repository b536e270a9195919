"""Comparison of all systems' scores, before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plait_bench.disagg.systems.serving import BenchServer
from plait_bench.errors import Disagreement

__all__ = ["compare", "scores_of"]

RTOL, ATOL = 1e-5, 1e-6
"""Tiling and fused lookups only change the order of additions."""

_COMPARED = 4


def compare(servers: Mapping[str, BenchServer], bodies: Sequence[Path]) -> None:
    """Compare the servers' scores. Raises `Disagreement` if two systems differ on one of the first bodies."""
    for path in bodies[:_COMPARED]:
        found = {name: scores_of(server, path.read_bytes()) for name, server in servers.items()}
        first, *others = found
        for name in others:
            if not np.allclose(found[name], found[first], rtol=RTOL, atol=ATOL):
                worst = float(np.abs(found[name] - found[first]).max())
                raise Disagreement(f"{path.stem}: {name} and {first} differ by up to {worst:.2g}")


def scores_of(server: BenchServer, body: bytes) -> npt.NDArray[np.float32]:
    """Return the first output of an infer request, float32."""
    answer = server.ask(body)
    head_bytes = int(answer.headers["inference-header-content-length"])
    entry = json.loads(answer.content[:head_bytes])["outputs"][0]
    size = entry["parameters"]["binary_data_size"]
    return np.frombuffer(answer.content[head_bytes : head_bytes + size], dtype=np.float32)
