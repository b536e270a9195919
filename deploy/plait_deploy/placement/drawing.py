"""A plan as an SVG: every node with its devices, who holds them, and what is stranded.

A device is a column that fills from below; what is idle stays pale, and the stranded share of a node's idle GPU is
hatched. Under the devices lies a bar of the node's CPU. Lengths are pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from plait_deploy.placement.plan import PlacementPlan, Use, said
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE

DRAWN_NODES = 400
"""More nodes are too small to see: those with the most stranded GPU are drawn."""
_WIDTH, _MARGIN = 1200.0, 40.0
_COLOURS = (
    "#3b6fb6", "#e08a3c", "#4f9d69", "#b5534f", "#8467b0", "#3fa0ab", "#c9a227", "#9a6b4f", "#d077a8", "#6b7a8f",
)  # fmt: skip
_OTHER, _IDLE, _INK, _MUTED, _CARD, _LINE = "#aab2bd", "#e9edf2", "#1f2933", "#66717f", "#ffffff", "#d9dfe6"
_STYLE = (
    "text{font-family:Inter,'Segoe UI',system-ui,'DejaVu Sans',sans-serif;fill:#1f2933}"
    ".title{font-size:22px;font-weight:600}.lead{font-size:14px;fill:#66717f}.key{font-size:13px}"
    ".small{font-size:12px;fill:#66717f}.group{font-size:14px;font-weight:600}.node{font-size:11px;fill:#66717f}"
)


@dataclass(frozen=True, slots=True)
class _Size:
    """The measures of a node's card."""

    device: float
    gap: float
    height: float
    cpu: float
    pad: float
    head: float


_LARGE = _Size(device=20, gap=5, height=84, cpu=6, pad=12, head=20)
_MEDIUM = _Size(device=11, gap=3, height=48, cpu=4, pad=8, head=16)
_SMALL = _Size(device=5, gap=1.5, height=24, cpu=3, pad=4, head=0)


class _Held:
    """Who holds how much of a device, and of a node's CPU: `devices[node][g]` is a list of (demand, milli-GPUs)."""

    def __init__(self, state: ClusterState, plan: PlacementPlan) -> None:
        self.names = list(dict.fromkeys(each.demand.name for each in plan.assigned))
        self.devices: list[list[list[tuple[int, int]]]] = [[[] for _ in range(node.gpus)] for node in state.nodes]
        self.cpu: list[dict[int, int]] = [{} for _ in state.nodes]
        for each in plan.assigned:
            if each.at is None:
                continue
            index = self.names.index(each.demand.name)
            cpu = self.cpu[each.at.node]
            cpu[index] = cpu.get(index, 0) + each.demand.task.cpu_milli
            for device in each.at.devices:
                self.devices[each.at.node][device].append((index, each.demand.task.gpu_milli))

    def gpu_by_demand(self) -> dict[int, float]:
        """Return the GPUs that each demand holds."""
        total: dict[int, float] = {}
        for node in self.devices:
            for device in node:
                for index, milli in device:
                    total[index] = total.get(index, 0.0) + milli / WHOLE
        return total


def draw(state: ClusterState, plan: PlacementPlan, *, title: str) -> str:
    """Return the SVG of a plan and the state after it."""
    held = _Held(state, plan)
    body: list[str] = []
    y = _head(body, plan, title)
    y = _totals(body, plan, held, y)
    y = _legend(body, plan, held, y)
    y = _nodes(body, state, plan, held, y)
    height = y + _MARGIN / 2
    label = f"{title}: {plan.after.stranded:.2f} of {plan.after.gpus} GPUs stranded"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(label, quote=True)}">',
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="stranded" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f7dcd7"/>'
            '<rect width="2" height="6" fill="#d9604c"/></pattern></defs>',
            f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#f6f8fa"/>',
            *body,
            "</svg>\n",
        ]
    )


def _head(body: list[str], plan: PlacementPlan, title: str) -> float:
    after = plan.after
    placed = len(plan.assigned) - len(plan.unplaced)
    lead = (
        f"{placed} of {len(plan.assigned)} replicas placed. Of {after.gpus} GPUs {after.gpus - after.idle:.2f} are in "
        f"use and {after.idle:.2f} idle; {after.stranded:.2f} of these are stranded, {plan.before.stranded:.2f} before."
    )
    body.append(_text(_MARGIN, 50, title, "title"))
    body.append(_text(_MARGIN, 76, lead, "lead"))
    return 104


def _totals(body: list[str], plan: PlacementPlan, held: _Held, y: float) -> float:
    """Draw all GPUs as one bar, before and after."""
    left, width = _MARGIN + 60, _WIDTH - 2 * _MARGIN - 60
    if not plan.after.gpus:
        return y
    rows: list[tuple[str, Use, Mapping[int, float]]] = [
        ("before", plan.before, {}),
        ("after", plan.after, held.gpu_by_demand()),
    ]
    for label, use, mine in rows:
        body.append(_text(_MARGIN, y + 14, label, "small"))
        others = max(0.0, use.gpus - use.idle - sum(mine.values()))
        parts = [(others, _OTHER), *((gpus, _colour(index)) for index, gpus in sorted(mine.items()))]
        parts += [(use.idle - use.stranded, _IDLE), (use.stranded, "url(#stranded)")]
        x = left
        for gpus, fill in parts:
            if gpus > 1e-9:
                body.append(_rect(x, y, gpus / use.gpus * width, 20, fill))
                x += gpus / use.gpus * width
        body.append(_rect(left, y, width, 20, "none", stroke=_LINE, radius=3))
        y += 28
    return y + 8


def _legend(body: list[str], plan: PlacementPlan, held: _Held, y: float) -> float:
    """Draw a line for each demand, in three columns, and for what is nobody's."""
    entries: list[tuple[str, str, str]] = []
    for index, name in enumerate(held.names):
        mine = [each for each in plan.assigned if each.demand.name == name]
        missing = sum(each.at is None for each in mine)
        note = f"{len(mine)} x {said(mine[0].demand.task)}" + (f"; {missing} not placed" if missing else "")
        entries.append((_colour(index), name, note))
    entries += [(_OTHER, "other programs", ""), (_IDLE, "idle", ""), ("url(#stranded)", "stranded", "")]
    column = (_WIDTH - 2 * _MARGIN) / 3
    for number, (fill, name, note) in enumerate(entries):
        x, line = _MARGIN + number % 3 * column, y + number // 3 * 24
        body.append(_rect(x, line, 14, 14, fill, radius=3))
        tail = f'<tspan fill="{_MUTED}">  {escape(note)}</tspan>' if note else ""
        body.append(f'<text class="key" x="{x + 22:g}" y="{line + 12:g}">{escape(_short(name, 26))}{tail}</text>')
    return y + -(-len(entries) // 3) * 24 + 16


def _nodes(body: list[str], state: ClusterState, plan: PlacementPlan, held: _Held, y: float) -> float:
    """Draw the nodes, by GPU model."""
    order = np.argsort(-np.array(plan.after.stranded_by_node), kind="stable")[:DRAWN_NODES]
    shown = sorted(order.tolist())
    if len(shown) < len(state.nodes):
        note = f"The {len(shown)} of {len(state.nodes)} nodes with the most stranded GPU."
        body.append(_text(_MARGIN, y + 10, note, "small"))
        y += 26
    size = _LARGE if len(shown) <= 24 else _MEDIUM if len(shown) <= 96 else _SMALL
    for model, name in enumerate(state.models):
        mine = [node for node in shown if state.model[node] == model]
        if not mine:
            continue
        widest = max(1, *(state.nodes[node].gpus for node in mine))
        with_gpus = max(state.nodes[node].gpus for node in mine)
        body.append(_text(_MARGIN, y + 12, name or ("GPUs" if with_gpus else "CPU nodes"), "group"))
        y += 24
        width = max(widest * (size.device + size.gap) - size.gap, 60.0 if size.head else 20.0) + 2 * size.pad
        height = size.head + (size.height if with_gpus else 0) + size.cpu + 2 * size.pad + (6 if with_gpus else 0)
        columns = max(1, int((_WIDTH - 2 * _MARGIN + 10) // (width + 10)))
        for number, node in enumerate(mine):
            x = _MARGIN + number % columns * (width + 10)
            _card(body, state, plan, held, node, (x, y + number // columns * (height + 10), width, height), size)
        y += -(-len(mine) // columns) * (height + 10) + 12
    return y


def _card(
    body: list[str],
    state: ClusterState,
    plan: PlacementPlan,
    held: _Held,
    node: int,
    box: tuple[float, float, float, float],
    size: _Size,
) -> None:
    """Draw one node."""
    x, y, width, height = box
    name, idle = state.nodes[node].name, int(state.gpu_free[node]) / WHOLE
    stranded = plan.after.stranded_by_node[node]
    body.append(f"<g><title>{escape(name)}: {idle:.2f} GPUs idle, {stranded:.2f} stranded</title>")
    body.append(_rect(x, y, width, height, _CARD, stroke=_LINE, radius=6))
    if size.head:
        body.append(_text(x + size.pad, y + size.pad + 8, _short(name, int((width - 2 * size.pad) / 6)), "node"))
    top, left = y + size.pad + size.head, x + size.pad
    share = stranded / idle if idle > 0 else 0.0
    for device, holders in enumerate(held.devices[node]):
        free = int(state.devices[node, device])
        at = left + device * (size.device + size.gap)
        others = WHOLE - free - sum(milli for _, milli in holders)
        parts = [(others, _OTHER), *((milli, _colour(index)) for index, milli in holders)]
        _column(body, at, top, size, [*parts, (free * share, "url(#stranded)"), (free * (1 - share), _IDLE)])
    if held.devices[node]:
        top += size.height + 6
    _cpu_bar(body, state, held, node, (left, top, width - 2 * size.pad, size.cpu))
    body.append("</g>")


def _column(body: list[str], x: float, top: float, size: _Size, parts: Sequence[tuple[float, str]]) -> None:
    """Draw a device: parts in milli-GPUs, from below."""
    bottom = top + size.height
    for milli, fill in parts:
        if milli > 0:
            tall = milli / WHOLE * size.height
            bottom -= tall
            body.append(_rect(x, bottom, size.device, tall, fill, stroke=_CARD))


def _cpu_bar(
    body: list[str], state: ClusterState, held: _Held, node: int, box: tuple[float, float, float, float]
) -> None:
    x, y, width, height = box
    total = max(1, state.nodes[node].cpu_milli)
    body.append(_rect(x, y, width, height, _IDLE))
    others = total - int(state.cpu[node]) - sum(held.cpu[node].values())
    for milli, fill in [(others, _OTHER), *((milli, _colour(index)) for index, milli in held.cpu[node].items())]:
        if milli > 0:
            body.append(_rect(x, y, milli / total * width, height, fill))
            x += milli / total * width


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _short(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: max(1, characters - 1)] + "…"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", radius: float = 0) -> str:
    edge = f' stroke="{stroke}"' if stroke else ""
    corner = f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{edge}{corner}/>'
