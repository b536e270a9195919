"""The charts of the tuning report: inline SVG generated from numbers. Colours come from the page's classes (`style`).

Every chart is drawn in a `Frame` whose unit is one pixel of the target screen, so that text keeps its size: a page
shows either the wide drawing or the narrow one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from plait_autoconfig.report.formatting import signed_percent
from plait_loadtest.report.scale import Scale, span

Kind = Literal["ok", "over", "failed", "reference", "confirm"]
"""In this order: kept every limit; exceeded one; gave no measurement; the reference configuration; a candidate
measured again."""

_PADDING = 0.08  # of the range of the data, so that no dot lies on an axis
_LOG_FROM = 12.0  # times the median: beyond it a linear axis would show the outlier alone
_LABEL_PX = 56  # a label on the x axis and the air around it


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A drawing's size and the margins for its axes, in pixels."""

    width: int
    height: int
    left: int = 58
    right: int = 20
    top: int = 30
    bottom: int = 48

    @property
    def floor(self) -> int:
        """The position of the x axis."""
        return self.height - self.bottom

    @property
    def end(self) -> int:
        """The right end of the x axis."""
        return self.width - self.right

    def x(self, low: float, high: float) -> Scale:
        """Return a scale along the x axis."""
        return span(low, high, start=self.left, end=self.end)

    def y(self, values: Sequence[float]) -> Scale:
        """Return a scale along the y axis with padding around all values; logarithmic if one of them is an outlier."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        middle = sorted(values)[len(values) // 2] if values else 1.0
        if low > 0.0 and high > _LOG_FROM * middle:
            return span(low / 1.3, high * 1.3, start=self.floor, end=self.top, log=True)
        air = _PADDING * ((high - low) or abs(high) or 1.0)
        low = 0.0 if 0.0 <= low < 0.35 * high else low - air
        return span(low, high + air, start=self.floor, end=self.top)


WIDE = Frame(width=960, height=320)
NARROW = Frame(width=330, height=260, left=46, right=10)
SMALL = Frame(width=300, height=180, left=46, right=12, top=14, bottom=44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A trial. `y` None: it has no measurement, and is drawn as a cross on the floor. `text` is shown on hover."""

    x: float
    y: float | None
    kind: Kind
    text: str
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StairStep:
    """From `x` on, the best known value is `y`, and lies between `low` and `high`."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The titles of the axes, and a sentence that describes the drawing to those who cannot see it."""

    x: str
    y: str
    label: str


def best_so_far(
    dots: Sequence[Dot], steps: Sequence[StairStep], axes: Axes, *, default: float | None, frame: Frame = WIDE
) -> str:
    """Draw every trial over time, the best known value as a staircase with its interval, and the default's value."""
    last = max((dot.x for dot in dots), default=1.0)
    x = frame.x(0.4, last + 0.6)
    values = [dot.y for dot in dots if dot.y is not None] + [v for step in steps for v in (step.low, step.high)]
    y = frame.y(values if default is None else [*values, default])
    parts = [_axis_y(frame, y, axes.y), _axis_x(frame, x, axes.x, whole=True)]
    ends = [*(step.x for step in steps[1:]), last + 0.5][: len(steps)]
    for step, end in zip(steps, ends, strict=True):
        top, bottom = y(step.high), y(step.low)
        parts.append(
            f'<rect class="band" x="{x(step.x):.1f}" width="{x(end) - x(step.x):.1f}" y="{top:.1f}" '
            f'height="{max(bottom - top, 0.5):.1f}"/>'
        )
    if default is not None:
        parts.append(_level(frame, y(default), "default"))
    corners = [(at, step.y) for step, end in zip(steps, ends, strict=True) for at in (step.x, end)]
    parts.append(_polyline(corners, x, y))
    return _svg(frame, [*parts, *(_dot(frame, dot, x, y) for dot in dots)], axes.label)


def trade_off(
    dots: Sequence[Dot],
    front: Sequence[tuple[float, float]],
    axes: Axes,
    *,
    limit: tuple[str, float, bool] | None = None,
    frame: Frame = WIDE,
) -> str:
    """Draw one metric against another: all trials, the front as a line, and a limit of the x metric.

    `front`: corners in the order of x. `limit`: its text, its value, and whether what lies to its right is
    infeasible.
    """
    measured = [(dot.x, dot.y) for dot in dots if dot.y is not None]
    xs = [at for at, _ in measured] + ([] if limit is None else [limit[1]])
    x, y = _padded(frame, xs), frame.y([value for _, value in measured])
    parts = [_axis_y(frame, y, axes.y), _axis_x(frame, x, axes.x)]
    if limit is not None:
        parts.append(_limit(frame, x, *limit))
    parts.append(_polyline(front, x, y))
    return _svg(frame, [*parts, *(_dot(frame, dot, x, y) for dot in dots if dot.y is not None)], axes.label)


def drift(points: Sequence[tuple[float, float, str]], axes: Axes, *, bound: float, frame: Frame = WIDE) -> str:
    """Draw the reference over time, as (minutes, ratio to its first measurement, text), and the noise band."""
    x = frame.x(0.0, max((at for at, _, _ in points), default=1.0) * 1.02)
    y = frame.y([ratio for _, ratio, _ in points] + [1.0 - bound, 1.0 + bound])
    dots = [Dot(x=at, y=ratio, kind="reference", text=text) for at, ratio, text in points]
    parts = [
        _axis_y(frame, y, axes.y, signed_percent),
        _axis_x(frame, x, axes.x),
        *(_level(frame, y(edge), "slo") for edge in (1.0 - bound, 1.0 + bound)),
        _polyline([(at, ratio) for at, ratio, _ in points], x, y),
    ]
    return _svg(frame, [*parts, *(_dot(frame, dot, x, y) for dot in dots)], axes.label)


def knob_slice(dots: Sequence[Dot], axes: Axes, *, names: Sequence[str] = (), frame: Frame = SMALL) -> str:
    """Draw the goal over one knob. `names`: of a knob with few values, whose dots then have their indices as `x`."""
    x = frame.x(-0.6, len(names) - 0.4) if names else _padded(frame, [dot.x for dot in dots])
    y = frame.y([dot.y for dot in dots if dot.y is not None])
    axis = _named_axis(frame, x, names, axes.x) if names else _axis_x(frame, x, axes.x)
    return _svg(frame, [_axis_y(frame, y, axes.y), axis, *(_dot(frame, dot, x, y) for dot in dots)], axes.label)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _padded(frame: Frame, values: Sequence[float]) -> Scale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = _PADDING * ((high - low) or abs(high) or 1.0)
    return frame.x(0.0 if 0.0 <= low < 0.35 * high else low - air, high + air)


def _dot(frame: Frame, dot: Dot, x: Scale, y: Scale) -> str:
    title = f"<title>{escape(dot.text)}</title>"
    at = x(dot.x)
    if dot.y is None:
        floor = frame.floor - 8
        shape = f"M{at - 4:.1f} {floor - 4}l8 8m0 -8l-8 8"
        return f'<path class="dot failed" d="{shape}">{title}</path>'
    chosen, radius = (" chosen", 6.5) if dot.chosen else ("", 4.5)
    return f'<circle class="dot {dot.kind}{chosen}" cx="{at:.1f}" cy="{y(dot.y):.1f}" r="{radius}">{title}</circle>'


def _polyline(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    drawn = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    return f'<polyline class="line" points="{drawn}"/>' if drawn else ""


def _level(frame: Frame, at: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{frame.left}" x2="{frame.end}" y1="{at:.1f}" y2="{at:.1f}"/>'


def _limit(frame: Frame, x: Scale, text: str, value: float, right: bool) -> str:
    at = x(value)
    start, end = (at, float(frame.end)) if right else (float(frame.left), at)
    on_left = at > (frame.left + frame.end) / 2
    return (
        f'<rect class="refused" x="{start:.1f}" width="{max(end - start, 0.0):.1f}" y="{frame.top}" '
        f'height="{frame.floor - frame.top}"/>'
        f'<line class="slo" x1="{at:.1f}" x2="{at:.1f}" y1="{frame.top}" y2="{frame.floor}"/>'
        f'<text class="bad" x="{at - 6 if on_left else at + 6:.1f}" y="{frame.top + 14}" '
        f'text-anchor="{"end" if on_left else "start"}">{escape(text)}</text>'
    )


def _axis_x(frame: Frame, x: Scale, name: str, *, whole: bool = False) -> str:
    ticks = x.ticks(max(2, (frame.end - frame.left) // _LABEL_PX))
    labels = [(x(tick), f"{tick:g}") for tick in ticks if not whole or tick == round(tick)]
    return _labelled_axis(frame, labels, name)


def _named_axis(frame: Frame, x: Scale, names: Sequence[str], name: str) -> str:
    """Draw an axis of named values; only every n-th name where not all fit."""
    room_px = (frame.end - frame.left) / max(len(names), 1)
    widest_px = 7.0 * max(map(len, names), default=1) + 8.0
    every = max(1, round(widest_px / room_px + 0.49))
    return _labelled_axis(frame, [(x(float(i)), text) for i, text in enumerate(names) if i % every == 0], name)


def _labelled_axis(frame: Frame, labels: Iterable[tuple[float, str]], name: str) -> str:
    texts = [
        f'<text x="{at:.1f}" y="{frame.floor + 18}" text-anchor="middle">{escape(text)}</text>' for at, text in labels
    ]
    line = f'<line class="axis" x1="{frame.left}" x2="{frame.end}" y1="{frame.floor}" y2="{frame.floor}"/>'
    title = f'<text class="name" x="{frame.end}" y="{frame.height - 8}" text-anchor="end">{escape(name)}</text>'
    return line + "".join(texts) + title


def _axis_y(frame: Frame, y: Scale, name: str, text: Callable[[float], str] | None = None) -> str:
    said = text or (lambda value: f"{value:g}" if abs(value) < 1e5 else f"{value:.3g}")
    lines = [
        f'<line class="grid" x1="{frame.left}" x2="{frame.end}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{frame.left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{escape(said(tick))}</text>'
        for tick in y.ticks(4)
    ]
    return "".join(lines) + f'<text class="name" x="2" y="14">{escape(name)}</text>'


def _svg(frame: Frame, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )
