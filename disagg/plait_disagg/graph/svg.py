"""A drawing of a cut: SVG text without any library.

The CN's boxes are on the left, the HN's on the right, and between them what crosses, with its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from plait_disagg.graph.report import CrossingValues, CutReport, ValueGroup, human_bytes, shape_text, shortened

_BOX_WIDTH, _BOX_HEIGHT, _STEP, _TOP = 330, 46, 66, 118
_CN_X, _HN_X, _WIDTH = 40, 690, 1080
"""Positions in pixels. The boxes of each side are stacked in execution order."""

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2430 } .title { font-size: 17px; font-weight: 600 }
.small { font-size: 11px; fill: #5b6472 } .bytes { font-size: 12px; font-weight: 600 }
.small, .bytes { paint-order: stroke; stroke: white; stroke-width: 2px }
.panel { fill: #f6f7f9; stroke: #dfe3e8 } .none { fill: #eceff3; stroke: #9aa3af } .input { stroke-dasharray: 4 3 }
.user { fill: #fde9c8; stroke: #d19a3c } .item { fill: #d7e8fb; stroke: #4a86c5 }
path { fill: none; stroke: #8a93a0; stroke-width: 1.2 }
.crossuser { stroke: #c07f12; stroke-width: 2 } .crossitem { stroke: #2f6fb3; stroke-width: 2 }
"""


def cut_svg(report: CutReport, *, title: str, candidates: int = 64) -> str:
    """Return the drawing as SVG.

    Labels show the bytes of one request of `candidates` (one of the report's). User-side boxes are amber,
    candidate-side ones blue, inputs dashed.
    """
    places = _places(report.groups)
    height = max((y for _, y in places.values()), default=0) + _BOX_HEIGHT + 40
    total = human_bytes(report.bytes_at(candidates))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _marker(),
        _text(_CN_X, 30, f"{title}: {total} cross for one user and {candidates} candidates", "title"),
        *_legend(),
        *_panel(_CN_X, height, "CN: beside the tables"),
        *_panel(_HN_X, height, "HN: the dense part"),
        *_edges(report, places),
        *_crossings(report, places, candidates),
        *[_box(group, *places[index]) for index, group in enumerate(report.groups)],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _places(groups: Sequence[ValueGroup]) -> dict[int, tuple[int, int]]:
    """Return the position (x, y) of each group's box."""
    below = {"cn": _TOP, "hn": _TOP}
    places = {}
    for index, group in enumerate(groups):
        places[index] = (_CN_X if group.place == "cn" else _HN_X, below[group.place])
        below[group.place] += _STEP
    return places


def _box(group: ValueGroup, x: int, y: int) -> str:
    kind = f"{group.rows} input" if group.is_input else group.rows
    detail = shortened(group.members) if not group.is_input else "from the request"
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6"/>'
        + _text(x + 12, y + 20, _clipped(group.title, 46))
        + _text(x + 12, y + 36, _clipped(detail, 54), "small")
    )


def _edges(report: CutReport, places: dict[int, tuple[int, int]]) -> list[str]:
    """Return the lines between boxes of one side: straight to the next box, otherwise around the others."""
    lines = []
    for index, group in enumerate(report.groups):
        x, y = places[index]
        near = [reader for reader in group.readers if report.groups[reader].place == group.place]
        lines += [_edge(x, y, places[reader][1], left=group.place == "cn") for reader in near]
    return lines


def _edge(x: int, y: int, y_reader: int, *, left: bool) -> str:
    if y_reader - y == _STEP:
        middle = x + _BOX_WIDTH // 2
        return f'<path d="M{middle} {y + _BOX_HEIGHT} V{y_reader - 2}" marker-end="url(#arrow)"/>'
    side, out = (x, -1) if left else (x + _BOX_WIDTH, 1)
    bend = side + out * min(34, 10 + (y_reader - y) // 14)
    start, end = y + _BOX_HEIGHT // 2 + 8, y_reader + _BOX_HEIGHT // 2 - 8
    return f'<path d="M{side} {start} C{bend} {start} {bend} {end} {side + out * 2} {end}" marker-end="url(#arrow)"/>'


def _crossings(report: CutReport, places: dict[int, tuple[int, int]], candidates: int) -> list[str]:
    """Return one line from each CN box to each HN box that reads it, labelled with its bytes where it leaves."""
    parts, labels = [], []
    seen: dict[int, int] = {}
    for crossing in report.crossings:
        group = report.groups[crossing.group]
        x, y = places[crossing.group]
        line = seen.get(crossing.group, 0)
        seen[crossing.group] = line + 1
        start_x, start_y = x + _BOX_WIDTH, y + 20 + 18 * line
        for reader in group.readers:
            if report.groups[reader].place == "hn":
                end_x, end_y = places[reader][0], places[reader][1] + _BOX_HEIGHT // 2
                straight = start_x + 185  # under the label
                bend = f"C{straight + 75} {start_y} {end_x - 75} {end_y} {end_x - 2} {end_y}"
                curve = f"M{start_x} {start_y} H{straight} {bend}"
                parts.append(f'<path class="cross{crossing.rows}" d="{curve}" marker-end="url(#arrow)"/>')
        labels += _label(crossing, start_x + 18, start_y, candidates)
    return parts + labels


def _label(crossing: CrossingValues, x: int, y: int, candidates: int) -> list[str]:
    return [
        _text(x, y - 4, human_bytes(crossing.bytes_at[candidates]), "bytes"),
        _text(x, y + 13, _clipped(shape_text(crossing), 40), "small"),
    ]


def _panel(x: int, height: int, title: str) -> list[str]:
    left = x - 28 if x == _CN_X else x - 12
    rect = f'<rect class="panel" x="{left}" y="84" width="{_BOX_WIDTH + 40}" height="{height - 100}" rx="10"/>'
    return [rect, _text(x, 106, title)]


def _legend() -> list[str]:
    parts = []
    for x, kind, what in ((_CN_X, "user", "once per user"), (_CN_X + 130, "item", "per candidate")):
        parts.append(
            f'<rect class="{kind}" x="{x}" y="48" width="14" height="14" rx="3"/>' + _text(x + 20, 59, what, "small")
        )
    return parts


def _marker() -> str:
    return (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#6b7380"/></marker></defs>'
    )


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    of_class = f' class="{kind}"' if kind else ""
    return f'<text{of_class} x="{x}" y="{y}">{escape(text)}</text>'


def _clipped(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
