"""Drawings: inline SVG made of numbers, without scripts. Colours come from the classes of the page's style.

A `Chart` maps data to a `Frame`, whose unit is one pixel of a wide screen. Nothing is drawn outside of its axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_PADDING = 0.08  # of the range of the data, so that no dot lies on an axis
_LOG_FROM = 12.0  # times the median: beyond it a linear axis would show the outlier alone
_LABEL_PX = 56  # a label on the x axis and the air around it


# ---- axes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps `low`..`high` of the data to `start`..`end` pixels; `log`: logarithmically (`low` above 0)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixels of a value; values outside are drawn at the edge."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside: 1, 2, 5 times powers of ten, roughly `about` of them."""
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    """Return multiples of a round step."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten; only the powers if those are many, and even steps if they are few."""
    if high < 6.0 * low:
        return linear_ticks(low, high, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if high < 1000.0 * low else (1.0,)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def span(low: float, high: float, *, start: float, end: float, log: bool = False) -> Scale:
    """Return a scale that includes both ends and has a non-zero width."""
    if log:
        low = max(low, 1e-6)
        return Scale(low=low, high=max(high, low * 1.5), start=start, end=end, log=True)
    return Scale(low=low, high=high if high > low else low + 1.0, start=start, end=end)


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

    def x(self, low: float, high: float, *, log: bool = False) -> Scale:
        """Return a scale along the x axis."""
        return span(low, high, start=self.left, end=self.end, log=log)

    def y(self, low: float, high: float, *, log: bool = False) -> Scale:
        """Return a scale along the y axis."""
        return span(low, high, start=self.floor, end=self.top, log=log)

    def x_around(self, values: Sequence[float]) -> Scale:
        """Return a scale along the x axis with padding around all values."""
        return self.x(*_padded(values))

    def y_around(self, values: Sequence[float]) -> Scale:
        """Return a scale along the y axis with padding around all values; logarithmic if one of them is an outlier."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        middle = sorted(values)[len(values) // 2] if values else 1.0
        if low > 0.0 and high > _LOG_FROM * middle:
            return self.y(low / 1.3, high * 1.3, log=True)
        return self.y(*_padded(values))


WIDE = Frame(width=960, height=320)
NARROW = Frame(width=330, height=260, left=46, right=10)
SMALL = Frame(width=300, height=180, left=46, right=12, top=14, bottom=44)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = _PADDING * ((high - low) or abs(high) or 1.0)
    return (0.0 if 0.0 <= low < 0.35 * high else low - air), high + air


def time_text(milliseconds: float) -> str:
    """Return `850 us`, `12 ms` or `1.5 s`: short, for axes and marks."""
    if milliseconds == 0:
        return "0"
    if milliseconds >= 1000.0:
        return f"{milliseconds / 1000.0:.3g} s"
    if milliseconds < 0.9995:
        return f"{milliseconds * 1000.0:.3g} µs"
    return f"{milliseconds:.3g} ms"


def number_text(value: float) -> str:
    """Return a number for an axis, short."""
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.3g}"


# ---- elements --------------------------------------------------------------------------------------------------------


def element(name: str, *content: str, **attributes: float | str) -> str:
    """Return an SVG element. `content` is markup; attributes are escaped, `kind` is its class, and `_` stands for `-`
    in their names. Numbers have at most two decimals."""
    said = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value != "")
    return f"<{name}{said}>{''.join(content)}</{name}>" if content else f"<{name}{said}/>"


def picture(width: float, height: float, label: str, content: Iterable[str], *, alone: bool = False) -> str:
    """Return a whole SVG. `label` is for those who cannot see it. `alone`: it is a file, not part of a page."""
    own = {"xmlns": "http://www.w3.org/2000/svg", "width": f"{width:g}", "height": f"{height:g}"} if alone else {}
    return element("svg", *content, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label, **own)


def _name(key: str) -> str:
    return "class" if key == "kind" else key.replace("_", "-")


def _value(value: float | str) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


# ---- charts ----------------------------------------------------------------------------------------------------------


class Chart:
    """A drawing with two axes. What is added later lies over what was added before; positions are data, not pixels."""

    def __init__(self, frame: Frame, x: Scale, y: Scale) -> None:
        self.frame, self.x, self.y = frame, x, y
        self._parts: list[str] = []

    def axis_x(self, text: Callable[[float], str] = number_text, name: str = "", *, whole: bool = False) -> None:
        """Draw the x axis with a number at round values."""
        ticks = self.x.ticks(max(2, (self.frame.end - self.frame.left) // _LABEL_PX))
        self.axis_x_at([(tick, text(tick)) for tick in ticks if not whole or tick == round(tick)], name)

    def axis_x_at(self, labels: Iterable[tuple[float, str]], name: str = "") -> None:
        """Draw the x axis with these labels."""
        frame = self.frame
        self._line("axis", frame.left, frame.end, frame.floor, frame.floor)
        for value, text in labels:
            self._text(self.x(value), frame.floor + 18, text, anchor="middle")
        if name:
            self._text(frame.end, frame.height - 8, name, "name", anchor="end")

    def axis_y(
        self,
        text: Callable[[float], str] = number_text,
        name: str = "",
        *,
        about: int = 4,
        whole: bool = False,
    ) -> None:
        """Draw lines across with a number each at round values."""
        for tick in self.y.ticks(about):
            if not whole or tick == round(tick):
                self.level(tick, "grid")
                self._text(self.frame.left - 8, self.y(tick) + 4, text(tick), anchor="end")
        if name:
            self._text(2, 14, name, "name")

    def dot(self, x: float, y: float, kind: str, *, radius: float, title: str = "") -> None:
        """Draw a circle; `title` is shown on hover."""
        named = [element("title", escape(title))] if title else []
        self._parts.append(element("circle", *named, kind=kind, cx=self.x(x), cy=self.y(y), r=radius))

    def cross(self, x: float, kind: str, *, title: str) -> None:
        """Draw what has no height as a cross on the floor."""
        shape = f"M{self.x(x) - 4:.1f} {self.frame.floor - 12}l8 8m0 -8l-8 8"
        self._parts.append(element("path", element("title", escape(title)), kind=kind, d=shape))

    def line(self, points: Iterable[tuple[float, float]], kind: str = "line") -> None:
        """Draw a line through the points."""
        self._shape("polyline", points, kind)

    def steps(self, values: Sequence[float], width: float, kind: str = "line") -> None:
        """Draw a line that is level for `width` at each value, from 0 on."""
        self.line([((i + edge) * width, value) for i, value in enumerate(values) for edge in (0, 1)], kind)

    def band(self, points: Sequence[tuple[float, float, float]]) -> None:
        """Fill what lies between two lines: (x, low, high)."""
        upper, lower = [(x, high) for x, _, high in points], [(x, low) for x, low, _ in points]
        self._shape("polygon", upper + lower[::-1], "band")

    def box(self, x: tuple[float, float], y: tuple[float, float], kind: str, *, gap: float = 0.0) -> None:
        """Fill a rectangle, `gap` pixels narrower than its two ends on the x axis; at least a pixel is seen."""
        left, right, top, bottom = self.x(x[0]), self.x(x[1]), self.y(y[1]), self.y(y[0])
        self._parts.append(
            element(
                "rect",
                kind=kind,
                x=left + gap / 2,
                width=max(right - left - gap, 0.8),
                y=top,
                height=max(bottom - top, 0.5),
            )
        )

    def level(self, y: float, kind: str) -> None:
        """Draw a line across the whole width."""
        self._line(kind, self.frame.left, self.frame.end, self.y(y), self.y(y))

    def region(self, x: float, text: str, *, right: bool) -> None:
        """Shade what lies to the right (or left) of a limit on the x axis, and write the limit beside its line."""
        frame, at = self.frame, self.x(x)
        start, end = (at, float(frame.end)) if right else (float(frame.left), at)
        height = frame.floor - frame.top
        self._parts.append(
            element("rect", kind="refused", x=start, width=max(end - start, 0.0), y=frame.top, height=height)
        )
        self._line("slo", at, at, frame.top, frame.floor)
        on_left = at > (frame.left + frame.end) / 2
        self._text(at - 6 if on_left else at + 6, frame.top + 14, text, "bad", anchor="end" if on_left else "start")

    def marks(self, marks: Iterable[tuple[float, str, str, str]]) -> None:
        """Draw marks on the x axis with labels in the top margin: (x, text, class of the text, class of the line). A
        label that would touch an earlier one moves one row down, so that no mark's line runs through a label."""
        placed: list[tuple[float, int]] = []  # where each label ends, and its row
        for x, text, kind, line in sorted(marks):
            at = self.x(x)
            row = max((taken + 1 for end, taken in placed if at < end), default=0)
            placed.append((at + 8.0 * len(text), row))
            y = 28 + 16 * row
            self._line(line, at, at, y - 9, self.frame.floor)
            self._text(at + 4, y, text, kind)

    def labels(self, labels: Iterable[tuple[float, str, str]]) -> None:
        """Write names in the right margin beside the ends of their lines, spread where they would touch: (y, text,
        class)."""
        last = -math.inf
        for at, text, kind in sorted((self.y(y), text, kind) for y, text, kind in labels):
            last = max(at, last + 16.0)
            self._text(self.frame.end + 8, last + 4, text, kind)

    def svg(self, label: str) -> str:
        """Return the drawing."""
        title = element("title", escape(label))
        return picture(self.frame.width, self.frame.height, label, [title, *self._parts])

    def _shape(self, name: str, points: Iterable[tuple[float, float]], kind: str) -> None:
        drawn = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        if drawn:
            self._parts.append(element(name, kind=kind, points=drawn))

    def _line(self, kind: str, x1: float, x2: float, y1: float, y2: float) -> None:
        self._parts.append(element("line", kind=kind, x1=x1, x2=x2, y1=y1, y2=y2))

    def _text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "") -> None:
        self._parts.append(element("text", escape(text), kind=kind, x=x, y=y, text_anchor=anchor))


def figure(drawing: str, narrow: str = "", *, keys: Mapping[str, str] | None = None) -> str:
    """Return a drawing as a figure; `narrow` takes its place on narrow screens. `keys`: the legend, from the class of a
    dot (or `level`) to what it means."""
    shown = f'<div class="wide">{drawing}</div><div class="narrow">{narrow}</div>' if narrow else drawing
    said = "".join(f"<span>{_key(kind)}{escape(text)}</span>" for kind, text in (keys or {}).items())
    return f"<figure>{shown}</figure>" + (f'<p class="legend">{said}</p>' if said else "")


def _key(kind: str) -> str:
    shape = element("circle", kind=f"dot {kind}", cx=7, cy=7, r=4.5)
    if kind == "failed":
        shape = element("path", kind="dot failed", d="M3 3l8 8m0 -8l-8 8")
    elif kind == "level":
        shape = element("line", x1=0, x2=14, y1=7, y2=7)
    return element("svg", shape, viewBox="0 0 14 14", aria_hidden="true")
