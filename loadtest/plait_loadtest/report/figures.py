"""What the page draws of a run's records: latency, its spread, rates and errors over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from plait_report.charts import Chart, Frame, time_text

_FRAME = Frame(width=980, height=300, left=56, right=96, top=18, bottom=34)
_LOW = Frame(width=980, height=200, left=56, right=96, top=18, bottom=34)
_MAX_DOTS = 1500  # a page stays below half a megabyte
_BUCKETS = 60  # of time
_BARS = 80

Floats = npt.NDArray[np.float64]


def latency_over_time(at_s: Floats, latency_ms: Floats, *, seconds: float, slo_ms: float | None) -> str:
    """Draw dots (the slowest of each moment are never left out), a band p50 to p95 over time, and the SLO."""
    high = max(float(latency_ms.max(initial=0.0)), slo_ms or 0.0) * 1.06
    log = high > 12.0 * float(np.median(latency_ms))  # else the slowest would flatten the rest
    low = float(np.percentile(latency_ms, 1.0)) * 0.8 if log else 0.0
    chart = Chart(_FRAME, _FRAME.x(0.0, seconds), _FRAME.y(low, high, log=log))
    chart.axis_x(_seconds)
    chart.axis_y(time_text)
    middle = _by_time(at_s, latency_ms, seconds)
    middle = middle if len(middle) > 2 else []
    chart.band(middle)
    keep = _thinned(at_s, latency_ms, seconds)
    for s, ms in zip(at_s[keep], latency_ms[keep], strict=True):
        chart.dot(s, ms, f"point{_over(ms, slo_ms)}", radius=2.1 if at_s.size > 300 else 3.4)
    chart.line((at, p50) for at, p50, _ in middle)
    labels = [(middle[-1][1], "p50", "accent"), (middle[-1][2], "p95", "")] if middle else []
    if slo_ms is not None:
        chart.level(slo_ms, "slo")
        labels.append((slo_ms, f"SLO {time_text(slo_ms)}", "bad"))
    chart.labels(labels)
    return chart.svg("Latency of every request over the time it was scheduled for")


def latency_histogram(latency_ms: Floats, *, marks: Mapping[str, float], slo_ms: float | None) -> str:
    """Draw bars over a logarithmic axis, on which percentiles and the SLO are marked."""
    edges, counts = _log_bars(latency_ms)
    frame = Frame(width=980, height=300, left=56, right=96, top=18 + 16 * (len(marks) + 1), bottom=34)
    x = frame.x(float(edges[0]), float(edges[-1]), log=True)
    chart = Chart(frame, x, frame.y(0.0, float(counts.max(initial=1))))
    chart.axis_y(_count, whole=True)
    chart.axis_x(time_text)
    for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True):
        if n:
            chart.box((low, high), (0.0, float(n)), f"bar{_over(math.sqrt(low * high), slo_ms)}", gap=0.8)
    named = [(ms, f"{name} {time_text(ms)}", "strong", "mark") for name, ms in marks.items()]
    if slo_ms is not None and edges[0] <= slo_ms <= edges[-1]:
        named.append((slo_ms, f"SLO {time_text(slo_ms)}", "bad", "slo"))
    chart.marks(named)
    return chart.svg("Histogram of latency on a logarithmic axis with its percentiles")


def rates_over_time(offered: Floats, achieved: Floats, *, seconds: float) -> str:
    """Draw both rates (B,), requests per second in equal parts of the measured time."""
    max_per_s = float(max(offered.max(initial=0.0), achieved.max(initial=0.0)))
    chart = Chart(_FRAME, _FRAME.x(0.0, seconds), _FRAME.y(0.0, max_per_s * 1.08))
    chart.axis_x(_seconds)
    chart.axis_y(lambda rate: f"{rate:g}/s")
    chart.steps(offered.tolist(), seconds / offered.size, "line quiet")
    chart.steps(achieved.tolist(), seconds / achieved.size)
    tail = max(1, offered.size // 8)
    ends = (float(rates[-tail:].mean()) for rates in (offered, achieved))
    chart.labels(zip(ends, ("offered", "achieved"), ("strong", "accent"), strict=True))
    return chart.svg("Offered and achieved requests per second over time")


def errors_over_time(counts: Mapping[str, Floats], *, seconds: float) -> str:
    """Draw stacked bars by class of error; each array (B,) in equal parts of the measured time."""
    stacked = np.sum(list(counts.values()), axis=0)
    chart = Chart(_LOW, _LOW.x(0.0, seconds), _LOW.y(0.0, float(stacked.max(initial=1.0))))
    chart.axis_x(_seconds)
    chart.axis_y(_count, about=3, whole=True)
    width_s, below = seconds / stacked.size, np.zeros(stacked.size)
    labels = []
    for shade, (name, values) in enumerate(counts.items()):
        for i in np.flatnonzero(values):
            ends = (float(below[i]), float(below[i] + values[i]))
            chart.box((i * width_s, (i + 1) * width_s), ends, f"bar over s{min(shade, 3)}", gap=1.0)
        below += values
        labels.append((chart.y.high, f"{name} {int(values.sum()):,}", "" if shade else "bad"))
    chart.labels(labels)
    return chart.svg("Errors over time by class")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _log_bars(latency_ms: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return edges (K + 1,) and counts (K,) of bars of equal width on a logarithmic axis."""
    # The few quickest would stretch the axis over empty decades: they are counted in the first bar.
    low, high = float(np.percentile(latency_ms, 0.5)), float(latency_ms.max())
    low, high = max(low * 0.8, 1e-3), max(high * 1.05, 2e-3)
    edges = np.geomspace(low, high, _BARS + 1)
    counts, _ = np.histogram(np.maximum(latency_ms, low), bins=edges)
    return edges, counts.astype(np.int64)


def _thinned(at_s: Floats, latency_ms: Floats, seconds: float) -> npt.NDArray[np.int64]:
    """Return indices of at most about 1,500 points: the slowest of every moment, and an even sample of the others."""
    if at_s.size <= _MAX_DOTS:
        return np.arange(at_s.size)
    moment = (at_s / max(seconds, 1e-9) * 300).astype(np.int64)
    order = np.lexsort((-latency_ms, moment))
    slowest = order[np.unique(moment[order], return_index=True)[1]]
    even = np.arange(0, at_s.size, -(-at_s.size // (_MAX_DOTS - 300)))
    return np.unique(np.concatenate([slowest, even]))


def _by_time(at_s: Floats, values: Floats, seconds: float) -> Sequence[tuple[float, float, float]]:
    """Return (middle of the part, p50, p95) of every part of the time that has at least 5 values."""
    parts = max(1, min(_BUCKETS, at_s.size // 12))
    which = np.clip((at_s / max(seconds, 1e-9) * parts).astype(np.int64), 0, parts - 1)
    found = [(i, values[which == i]) for i in range(parts)]
    return [
        ((i + 0.5) * seconds / parts, float(np.percentile(own, 50.0)), float(np.percentile(own, 95.0)))
        for i, own in found
        if own.size >= min(5, at_s.size)
    ]


def _over(ms: float, slo_ms: float | None) -> str:
    return " over" if slo_ms is not None and ms > slo_ms else ""


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"
