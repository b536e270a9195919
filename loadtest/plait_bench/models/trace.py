"""The public trace of an image service: when requests came, for which base model, and how much they asked for.

alibaba/clusterdata, cluster-trace-v2026-GenAI. Its times were scaled by who published it, so only their order and their
proportions are used: a window of the trace is stretched until the work is the wanted share of the time.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from plait_bench.errors import SystemUnavailable

__all__ = ["TracedRequest", "read_trace", "window"]

FILE = Path("genai-v2026") / "lora_request_trace.csv.gz"
_STEPS = 30.0
"""For the few rows without a number: what nine of ten requests ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request: when it came, and its work in steps of one image."""

    at: float
    model: str
    work: float


def read_trace(data: Path | None) -> list[TracedRequest]:
    """Return the requests in the order of their arrival. Raises `SystemUnavailable` without the file."""
    if data is None or not (data / FILE).is_file():
        raise SystemUnavailable(f"models: give --data FOLDER, which has {FILE}")
    with gzip.open(data / FILE, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["predict_status"] == "SUCCEED"]
    return sorted(
        (
            TracedRequest(
                at=datetime.fromisoformat(row["gmt_create"]).timestamp(),
                model=row["checkpoint_model_version_id"],
                work=float(row["num_images_per_prompt"] or 1.0) * float(row["num_inference_steps"] or _STEPS),
            )
            for row in rows
        ),
        key=lambda asked: asked.at,
    )


def window(
    trace: Sequence[TracedRequest], number: int, *, count: int, replicas: int, busy: float
) -> list[TracedRequest]:
    """Return `count` requests, of which `number` says where they begin, stretched until their work takes a share `busy`
    of the time of all replicas. Time is in steps of one image."""
    first = (number - 1) * count % max(1, len(trace) - count)
    part = trace[first : first + count]
    span = max(part[-1].at - part[0].at, 1.0)
    scale = sum(asked.work for asked in part) / (busy * replicas * span)
    return [TracedRequest(at=(asked.at - part[0].at) * scale, model=asked.model, work=asked.work) for asked in part]
