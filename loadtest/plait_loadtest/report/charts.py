"""The charts of the HTML report: inline SVG generated from numbers, no scripts. Colours come from the page's classes.

Each function returns a whole `<svg>`; widths are in its own units and scale with the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from plait_loadtest.report.scale import Scale, span, time_text

WIDTH, HEIGHT = 980, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 96, 18, 34
_MAX_DOTS = 1500  # a page stays below half a megabyte
_BUCKETS = 60  # of time
_BARS = 80

Floats = npt.NDArray[np.float64]


def latency_over_time(at_s: Floats, latency_ms: Floats, *, seconds: float, slo_ms: float | None) -> str:
    """Draw dots (the slowest of each moment are never left out), a band p50 to p95 over time, and the SLO."""
    x = span(0.0, seconds, start=LEFT, end=WIDTH - RIGHT)
    y = _latency_scale(latency_ms, slo_ms)
    keep = _thinned(at_s, latency_ms, seconds)
    radius = 2.1 if at_s.size > 300 else 3.4
    dots = [
        f'<circle class="dot{_over(ms, slo_ms)}" cx="{x(s):.1f}" cy="{y(ms):.1f}" r="{radius}"/>'
        for s, ms in zip(at_s[keep], latency_ms[keep], strict=True)
    ]
    middle = _by_time(at_s, latency_ms, seconds, (50.0, 95.0))
    middle = middle if len(middle) > 2 else []
    upper = [f"{x(t):.1f},{y(p95):.1f}" for t, _, p95 in middle]
    lower = [f"{x(t):.1f},{y(p50):.1f}" for t, p50, _ in middle]
    parts = [
        _time_axis(x),
        _axis_y(y, time_text),
        f'<polygon class="band" points="{" ".join(upper + lower[::-1])}"/>',
        *dots,
    ]
    parts.append(f'<polyline class="line" points="{" ".join(lower)}"/>')
    labels = []
    if middle:
        labels = [(y(middle[-1][1]), "p50", "accent"), (y(middle[-1][2]), "p95", "")]
    if slo_ms is not None:
        parts.append(f'<line class="slo" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(slo_ms):.1f}" y2="{y(slo_ms):.1f}"/>')
        labels.append((y(slo_ms), f"SLO {time_text(slo_ms)}", "bad"))
    parts += _right_labels(labels)
    return _svg(parts, "Latency of every request over the time it was scheduled for")


def latency_histogram(
    edges_ms: Floats, counts: npt.NDArray[np.int64], *, marks: Mapping[str, float], slo_ms: float | None
) -> str:
    """Draw bars over a logarithmic axis; `edges_ms` (K + 1,), `counts` (K,); percentiles and the SLO are marked."""
    top = TOP + 16 * (len(marks) + 1)
    x = span(float(edges_ms[0]), float(edges_ms[-1]), start=LEFT, end=WIDTH - RIGHT, log=True)
    y = span(0.0, float(counts.max(initial=1)), start=HEIGHT - BOTTOM, end=top)
    parts = [_axis_y(y, lambda n: f"{n:,.0f}", whole=True), _axis_x(x, time_text)]
    for low, high, n in zip(edges_ms[:-1], edges_ms[1:], counts, strict=True):
        if n:
            late = _over(math.sqrt(low * high), slo_ms)
            parts.append(
                f'<rect class="bar{late}" x="{x(low) + 0.4:.1f}" width="{max(x(high) - x(low) - 0.8, 0.8):.1f}" '
                f'y="{y(float(n)):.1f}" height="{HEIGHT - BOTTOM - y(float(n)):.1f}"/>'
            )
    shown_slo_ms = slo_ms if slo_ms is not None and edges_ms[0] <= slo_ms <= edges_ms[-1] else None
    parts += _marks(x, marks, shown_slo_ms, TOP)
    return _svg(parts, "Histogram of latency on a logarithmic axis with its percentiles")


def rates_over_time(offered: Floats, achieved: Floats, *, seconds: float) -> str:
    """Draw both rates (B,), requests per second in equal parts of the measured time."""
    x = span(0.0, seconds, start=LEFT, end=WIDTH - RIGHT)
    max_per_s = float(max(offered.max(initial=0.0), achieved.max(initial=0.0)))
    y = span(0.0, max_per_s * 1.08, start=HEIGHT - BOTTOM, end=TOP)
    parts = [_time_axis(x), _axis_y(y, lambda rate: f"{rate:g}/s")]
    parts.append(f'<polyline class="line quiet" points="{_steps(offered, x, y, seconds)}"/>')
    parts.append(f'<polyline class="line" points="{_steps(achieved, x, y, seconds)}"/>')
    tail = max(1, offered.size // 8)
    parts += _right_labels(
        [
            (y(float(offered[-tail:].mean())), "offered", "strong"),
            (y(float(achieved[-tail:].mean())), "achieved", "accent"),
        ]
    )
    return _svg(parts, "Offered and achieved requests per second over time")


def errors_over_time(counts: Mapping[str, Floats], *, seconds: float) -> str:
    """Draw stacked bars by class of error; each array (B,) in equal parts of the measured time."""
    x = span(0.0, seconds, start=LEFT, end=WIDTH - RIGHT)
    stacked = np.sum(list(counts.values()), axis=0)
    y = span(0.0, float(stacked.max(initial=1.0)), start=200 - BOTTOM, end=TOP)
    width = (x(seconds) - x(0.0)) / stacked.size
    below = np.zeros(stacked.size)
    parts = [_time_axis(x, height=200), _axis_y(y, lambda n: f"{n:,.0f}", about=3, whole=True)]
    labels = []
    for shade, (name, values) in enumerate(counts.items()):
        for i in np.flatnonzero(values):
            low, high = y(float(below[i])), y(float(below[i] + values[i]))
            parts.append(
                f'<rect class="bar over s{min(shade, 3)}" x="{x(0.0) + i * width + 0.5:.1f}" y="{high:.1f}" '
                f'width="{max(width - 1.0, 1.0):.1f}" height="{low - high:.1f}"/>'
            )
        below += values
        labels.append((float(TOP + 6 + 18 * shade), f"{name} {int(values.sum()):,}", "bad" if shade == 0 else ""))
    return _svg([*parts, *_right_labels(labels)], "Errors over time by class", height=200)


def log_bars(latency_ms: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return edges (K + 1,) and counts (K,) of bars of equal width on a logarithmic axis."""
    # The few quickest would stretch the axis over empty decades: they are counted in the first bar.
    low, high = float(np.percentile(latency_ms, 0.5)), float(latency_ms.max())
    low, high = max(low * 0.8, 1e-3), max(high * 1.05, 2e-3)
    edges = np.geomspace(low, high, _BARS + 1)
    counts, _ = np.histogram(np.maximum(latency_ms, low), bins=edges)
    return edges, counts.astype(np.int64)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _latency_scale(latency_ms: Floats, slo_ms: float | None) -> Scale:
    """Return a linear scale, unless the slowest would flatten the rest."""
    high = max(float(latency_ms.max(initial=0.0)), slo_ms or 0.0) * 1.06
    low = float(np.percentile(latency_ms, 1.0)) * 0.8 if latency_ms.size else high
    log = high > 12.0 * float(np.median(latency_ms)) if latency_ms.size else False
    return span(low if log else 0.0, high, start=HEIGHT - BOTTOM, end=TOP, log=log)


def _over(ms: float, slo_ms: float | None) -> str:
    return " over" if slo_ms is not None and ms > slo_ms else ""


def _thinned(at_s: Floats, latency_ms: Floats, seconds: float) -> npt.NDArray[np.int64]:
    """Return indices of at most about 1,500 points: the slowest of every moment, and an even sample of the others."""
    if at_s.size <= _MAX_DOTS:
        return np.arange(at_s.size)
    moment = (at_s / max(seconds, 1e-9) * 300).astype(np.int64)
    order = np.lexsort((-latency_ms, moment))
    slowest = order[np.unique(moment[order], return_index=True)[1]]
    even = np.arange(0, at_s.size, -(-at_s.size // (_MAX_DOTS - 300)))
    return np.unique(np.concatenate([slowest, even]))


def _by_time(at_s: Floats, values: Floats, seconds: float, percents: Sequence[float]) -> list[tuple[float, ...]]:
    """Return (middle of the part, percentiles...) of every part of the time that has at least 5 values."""
    parts = max(1, min(_BUCKETS, at_s.size // 12))
    which = np.clip((at_s / max(seconds, 1e-9) * parts).astype(np.int64), 0, parts - 1)
    return [
        ((i + 0.5) * seconds / parts, *map(float, np.percentile(values[which == i], percents)))
        for i in range(parts)
        if (which == i).sum() >= min(5, at_s.size)
    ]


def _steps(values: Floats, x: Scale, y: Scale, seconds: float) -> str:
    width = seconds / values.size
    points = [(i + edge, value) for i, value in enumerate(values.tolist()) for edge in (0, 1)]
    return " ".join(f"{x(i * width):.1f},{y(value):.1f}" for i, value in points)


def _time_axis(x: Scale, *, height: int = HEIGHT) -> str:
    return _axis_x(x, lambda s: f"{s:g} s", height=height)


def _axis_x(x: Scale, text: object, *, height: int = HEIGHT) -> str:
    assert callable(text)
    labels = [
        f'<text x="{x(tick):.1f}" y="{height - BOTTOM + 20}" text-anchor="middle">{escape(text(tick))}</text>'
        for tick in x.ticks(8)
    ]
    line = f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>'
    return line + "".join(labels)


def _axis_y(y: Scale, text: object, *, about: int = 4, whole: bool = False) -> str:
    assert callable(text)
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{escape(text(tick))}</text>'
        for tick in y.ticks(about)
        if not whole or tick == round(tick)
    )


def _right_labels(labels: Iterable[tuple[float, str, str]]) -> list[str]:
    """Draw names beside the ends of their lines, spread where they would touch: (y, text, class)."""
    placed, last = [], -math.inf
    for y, text, kind in sorted(labels):
        last = max(y, last + 16.0)
        placed.append(f'<text class="{kind}" x="{WIDTH - RIGHT + 8}" y="{last + 4:.1f}">{escape(text)}</text>')
    return placed


def _marks(x: Scale, marks: Mapping[str, float], slo_ms: float | None, top: float) -> list[str]:
    """Draw vertical marks with labels above the bars. A label that would touch an earlier one moves one row down, so
    that no mark's line runs through a label."""
    named = [(ms, f"{name} {time_text(ms)}", "strong", "mark") for name, ms in marks.items()]
    if slo_ms is not None:
        named.append((slo_ms, f"SLO {time_text(slo_ms)}", "bad", "slo"))
    parts: list[str] = []
    placed: list[tuple[float, int]] = []  # where each label ends, and its row
    for ms, text, kind, line in sorted(named):
        at = x(ms)
        row = max((taken + 1 for end, taken in placed if at < end), default=0)
        placed.append((at + 8.0 * len(text), row))
        y = top + 10 + 16 * row
        parts.append(
            f'<line class="{line}" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 9:.1f}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="{kind}" x="{at + 4:.1f}" y="{y:.1f}">{escape(text)}</text>'
        )
    return parts


def _svg(parts: Iterable[str], label: str, *, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        + "".join(parts)
        + "</svg>"
    )
