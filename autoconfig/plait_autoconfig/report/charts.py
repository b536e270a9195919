"""What the tuning report draws: every trial over time, one metric against another, the drift, the goal over a knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait_autoconfig.jobs.state import Interval
from plait_autoconfig.report.formatting import signed_percent
from plait_report.charts import SMALL, Chart, Frame

Kind = Literal["ok", "over", "failed", "reference", "confirm"]
"""In this order: kept every limit; exceeded one; gave no measurement; the reference configuration; a candidate
measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A trial. `y` None: it has no measurement, and is drawn as a cross on the floor. `text` is shown on hover."""

    x: float
    y: float | None
    kind: Kind
    text: str
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The titles of the axes, and a sentence that describes the drawing to those who cannot see it."""

    x: str
    y: str
    label: str


def best_so_far(
    dots: Sequence[Dot], steps: Sequence[tuple[float, Interval]], axes: Axes, *, default: float | None, frame: Frame
) -> str:
    """Draw every trial over time, the best known value as a staircase with its interval, and the default's value.

    `steps`: from where on the best is known to be what."""
    last = max((dot.x for dot in dots), default=1.0)
    bands = [tuple(best.value if edge is None else edge for edge in (best.low, best.high)) for _, best in steps]
    values = [*_measured(dots), *(edge for band in bands for edge in band)]
    chart = Chart(frame, frame.x(0.4, last + 0.6), frame.y_around(values if default is None else [*values, default]))
    chart.axis_y(name=axes.y)
    chart.axis_x(name=axes.x, whole=True)
    ends = [*(x for x, _ in steps[1:]), last + 0.5][: len(steps)]
    for (x, _), end, (low, high) in zip(steps, ends, bands, strict=True):
        chart.box((x, end), (low, high), "band")
    if default is not None:
        chart.level(default, "default")
    chart.line([(at, best.value) for (x, best), end in zip(steps, ends, strict=True) for at in (x, end)])
    return _drawn(chart, dots, axes)


def trade_off(
    dots: Sequence[Dot], front: Sequence[tuple[float, float]], axes: Axes, *, limit: tuple[str, float, bool] | None,
    frame: Frame,
) -> str:  # fmt: skip
    """Draw one metric against another: all trials, the front as a line, and a limit of the x metric.

    `front`: corners in the order of x. `limit`: its text, its value, and whether what lies to its right is
    infeasible.
    """
    measured = [dot for dot in dots if dot.y is not None]
    xs = [dot.x for dot in measured] + ([] if limit is None else [limit[1]])
    chart = Chart(frame, frame.x_around(xs), frame.y_around(_measured(dots)))
    chart.axis_y(name=axes.y)
    chart.axis_x(name=axes.x)
    if limit is not None:
        chart.region(limit[1], limit[0], right=limit[2])
    chart.line(front)
    return _drawn(chart, measured, axes)


def drift(points: Sequence[tuple[float, float, str]], axes: Axes, *, bound: float, frame: Frame) -> str:
    """Draw the reference over time, as (minutes, ratio to its first measurement, text), and the noise band."""
    edges = [1.0 - bound, 1.0 + bound]
    x = frame.x(0.0, max((at for at, _, _ in points), default=1.0) * 1.02)
    chart = Chart(frame, x, frame.y_around([*(ratio for _, ratio, _ in points), *edges]))
    chart.axis_y(signed_percent, axes.y)
    chart.axis_x(name=axes.x)
    for edge in edges:
        chart.level(edge, "slo")
    chart.line((at, ratio) for at, ratio, _ in points)
    return _drawn(chart, [Dot(x=at, y=ratio, kind="reference", text=text) for at, ratio, text in points], axes)


def knob_slice(dots: Sequence[Dot], axes: Axes, *, names: Sequence[str] = (), frame: Frame = SMALL) -> str:
    """Draw the goal over one knob. `names`: of a knob with few values, whose dots then have their indices as `x`."""
    x = frame.x(-0.6, len(names) - 0.4) if names else frame.x_around([dot.x for dot in dots])
    chart = Chart(frame, x, frame.y_around(_measured(dots)))
    chart.axis_y(name=axes.y)
    if names:
        # Only every n-th name where not all fit.
        room_px, widest_px = (frame.end - frame.left) / len(names), 7.0 * max(map(len, names)) + 8.0
        every = max(1, round(widest_px / room_px + 0.49))
        chart.axis_x_at([(float(i), text) for i, text in enumerate(names) if i % every == 0], axes.x)
    else:
        chart.axis_x(name=axes.x)
    return _drawn(chart, dots, axes)


def _measured(dots: Sequence[Dot]) -> list[float]:
    return [dot.y for dot in dots if dot.y is not None]


def _drawn(chart: Chart, dots: Sequence[Dot], axes: Axes) -> str:
    """Return the drawing with the dots on top."""
    for dot in dots:
        if dot.y is None:
            chart.cross(dot.x, "dot failed", title=dot.text)
        else:
            chosen, radius = (" chosen", 6.5) if dot.chosen else ("", 4.5)
            chart.dot(dot.x, dot.y, f"dot {dot.kind}{chosen}", radius=radius, title=dot.text)
    return chart.svg(axes.label)
