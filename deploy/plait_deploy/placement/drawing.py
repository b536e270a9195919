"""A plan as an SVG: every node with its devices, who holds them, and what is stranded.

A device is a column that fills from below; what is idle stays pale, and the stranded share of a node's idle GPU is
hatched. The bar under the devices is the node's CPU. Lengths are pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from plait_deploy.placement.plan import PlacementPlan, said
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE
from plait_report.charts import element, picture

DRAWN_NODES = 400
"""More nodes are too small to see: those with the most stranded GPU are drawn."""
_WIDTH, _MARGIN = 1200.0, 40.0
_COLOURS = (
    "#3b6fb6", "#e08a3c", "#4f9d69", "#b5534f", "#8467b0", "#3fa0ab", "#c9a227", "#9a6b4f", "#d077a8", "#6b7a8f",
)  # fmt: skip
_OTHER, _IDLE, _MUTED, _CARD, _LINE = "#aab2bd", "#e9edf2", "#66717f", "#ffffff", "#d9dfe6"
_STRANDED = "url(#stranded)"
_HATCHED = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
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


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


class _Canvas:
    """What is drawn so far, and of what: who holds how much of a device, and of a node's CPU.

    `devices[node][g]` is a list of (demand, milli-GPUs), `cpu[node]` milli-cores and `gpu_milli` of all by demand.
    """

    def __init__(self, state: ClusterState, plan: PlacementPlan) -> None:
        self.state, self.plan = state, plan
        self.body: list[str] = []
        self.names = list(dict.fromkeys(each.demand.name for each in plan.assigned))
        self.devices: list[list[list[tuple[int, int]]]] = [[[] for _ in range(node.gpus)] for node in state.nodes]
        self.cpu = [Counter[int]() for _ in state.nodes]
        self.gpu_milli = Counter[int]()
        for each in plan.assigned:
            if each.at is None:
                continue
            index, task = self.names.index(each.demand.name), each.demand.task
            self.cpu[each.at.node][index] += task.cpu_milli
            self.gpu_milli[index] += task.total_milli
            for device in each.at.devices:
                self.devices[each.at.node][device].append((index, task.gpu_milli))

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        """Write a line."""
        self.body.append(element("text", escape(text), kind=kind, x=x, y=y))

    def rect(self, box: _Box, fill: str, *, stroke: str = "", radius: float = 0) -> None:
        """Draw a rectangle."""
        at = {"x": box.x, "y": box.y, "width": box.width, "height": box.height}
        self.body.append(element("rect", **at, fill=fill, stroke=stroke, rx=radius or ""))

    def bar(self, box: _Box, total: float, parts: Iterable[tuple[float, str]], *, upright: bool = False) -> None:
        """Draw parts of a total side by side, or on top of each other."""
        at = 0.0
        for share, fill in ((amount / total, fill) for amount, fill in parts if amount > 1e-9):
            if upright:
                part, stroke = _Box(box.x, box.y + (1 - at - share) * box.height, box.width, share * box.height), _CARD
            else:
                part, stroke = _Box(box.x + at * box.width, box.y, share * box.width, box.height), ""
            self.rect(part, fill, stroke=stroke)
            at += share


def draw(state: ClusterState, plan: PlacementPlan, *, title: str) -> str:
    """Return the SVG of a plan and the state after it."""
    canvas = _Canvas(state, plan)
    y = _head(canvas, title)
    y = _totals(canvas, y)
    y = _legend(canvas, y)
    height = _nodes(canvas, y) + _MARGIN / 2
    label = f"{title}: {plan.after.stranded:.2f} of {plan.after.gpus} GPUs stranded"
    lines = element("rect", width=6, height=6, fill="#f7dcd7") + element("rect", width=2, height=6, fill="#d9604c")
    sheet = [
        element("style", _STYLE),
        element("defs", element("pattern", lines, id="stranded", width=6, height=6, **_HATCHED)),
        element("rect", width=_WIDTH, height=height, fill="#f6f8fa"),
    ]
    return picture(_WIDTH, height, label, [*sheet, *canvas.body], alone=True) + "\n"


def _head(canvas: _Canvas, title: str) -> float:
    plan, after = canvas.plan, canvas.plan.after
    placed = len(plan.assigned) - len(plan.unplaced)
    lead = f"{placed} of {len(plan.assigned)} replicas placed."
    if after.gpus:
        lead += (
            f" Of {after.gpus} GPUs {after.gpus - after.idle:.2f} are in use and {after.idle:.2f} idle; "
            f"{after.stranded:.2f} of these are stranded, {plan.before.stranded:.2f} before."
        )
    canvas.text(_MARGIN, 50, title, "title")
    canvas.text(_MARGIN, 76, lead, "lead")
    return 104


def _totals(canvas: _Canvas, y: float) -> float:
    """Draw all GPUs as one bar, before and after."""
    plan = canvas.plan
    if not plan.after.gpus:
        return y
    for label, use, held in (("before", plan.before, Counter[int]()), ("after", plan.after, canvas.gpu_milli)):
        mine = [(milli / WHOLE, _colour(index)) for index, milli in sorted(held.items())]
        canvas.text(_MARGIN, y + 14, label, "small")
        box = _Box(_MARGIN + 60, y, _WIDTH - 2 * _MARGIN - 60, 20)
        others = max(0.0, use.gpus - use.idle - sum(gpus for gpus, _ in mine))
        free = (use.idle - use.stranded, _IDLE), (use.stranded, _STRANDED)
        canvas.bar(box, use.gpus, [(others, _OTHER), *mine, *free])
        canvas.rect(box, "none", stroke=_LINE, radius=3)
        y += 28
    return y + 8


def _legend(canvas: _Canvas, y: float) -> float:
    """Draw a line for each demand, in three columns or two, and for what is nobody's."""
    entries: list[tuple[str, str, str]] = []
    for index, name in enumerate(canvas.names):
        mine = [each for each in canvas.plan.assigned if each.demand.name == name]
        missing = sum(each.at is None for each in mine)
        note = f"{len(mine)} × {said(mine[0].demand.task)}" + (f"; {missing} not placed" if missing else "")
        entries.append((_colour(index), _short(name, 36), note))
    entries += [(_OTHER, "other programs", ""), (_IDLE, "idle", ""), (_STRANDED, "stranded", "")]
    columns = 3 if all(len(name) + len(note) <= 44 for _, name, note in entries) else 2
    width = (_WIDTH - 2 * _MARGIN) / columns
    for number, (fill, name, note) in enumerate(entries):
        x, line = _MARGIN + number % columns * width, y + number // columns * 24
        canvas.rect(_Box(x, line, 14, 14), fill, radius=3)
        tail = [element("tspan", escape(note), fill=_MUTED, dx=8)] if note else []
        canvas.body.append(element("text", escape(name), *tail, kind="key", x=x + 22, y=line + 12))
    return y + -(-len(entries) // columns) * 24 + 16


def _nodes(canvas: _Canvas, y: float) -> float:
    """Draw the nodes, by GPU model."""
    nodes, state = canvas.state.nodes, canvas.state
    order = np.argsort(-np.array(canvas.plan.after.stranded_by_node), kind="stable")[:DRAWN_NODES]
    shown = sorted(order.tolist())
    if len(shown) < len(nodes):
        canvas.text(_MARGIN, y + 10, f"The {len(shown)} of {len(nodes)} nodes with the most stranded GPU.", "small")
        y += 26
    size = _LARGE if len(shown) <= 24 else _MEDIUM if len(shown) <= 96 else _SMALL
    groups: dict[tuple[bool, str], list[int]] = {}
    for node in shown:
        groups.setdefault((not nodes[node].gpus, state.models[state.model[node]]), []).append(node)
    for (without, model), mine in sorted(groups.items()):
        canvas.text(_MARGIN, y + 12, model or ("Nodes without GPUs" if without else "GPUs"), "group")
        y += 24
        devices = max(1, *(nodes[node].gpus for node in mine))
        width = max(devices * (size.device + size.gap) - size.gap, 110.0 if size.head else 20.0) + 2 * size.pad
        height = size.head + (0 if without else size.height + 6) + size.cpu + 2 * size.pad
        columns = max(1, int((_WIDTH - 2 * _MARGIN + 10) // (width + 10)))
        for number, node in enumerate(mine):
            x = _MARGIN + number % columns * (width + 10)
            _card(canvas, node, _Box(x, y + number // columns * (height + 10), width, height), size)
        y += -(-len(mine) // columns) * (height + 10) + 12
    return y


def _card(canvas: _Canvas, node: int, box: _Box, size: _Size) -> None:
    """Draw one node."""
    state = canvas.state
    name, idle = state.nodes[node].name, int(state.gpu_free[node]) / WHOLE
    stranded = canvas.plan.after.stranded_by_node[node]
    cores = int(state.cpu[node]) / WHOLE
    tip = f"{name}: {idle:.2f} GPUs idle, {stranded:.2f} stranded; {cores:g} CPUs idle"
    canvas.body.append(f"<g><title>{escape(tip)}</title>")
    canvas.rect(box, _CARD, stroke=_LINE, radius=6)
    left, top, width = box.x + size.pad, box.y + size.pad + size.head, box.width - 2 * size.pad
    if size.head:
        canvas.text(left, box.y + size.pad + 8, _short(name, int(width / 6.2)), "node")
    share = stranded / idle if idle > 0 else 0.0
    for device, holders in enumerate(canvas.devices[node]):
        free = int(state.devices[node, device])
        others = WHOLE - free - sum(milli for _, milli in holders)
        parts = [(float(others), _OTHER), *((float(milli), _colour(index)) for index, milli in holders)]
        at = _Box(left + device * (size.device + size.gap), top, size.device, size.height)
        canvas.bar(at, WHOLE, [*parts, (free * share, _STRANDED), (free * (1 - share), _IDLE)], upright=True)
    if canvas.devices[node]:
        top += size.height + 6
    bar, total = _Box(left, top, width, size.cpu), max(1, state.nodes[node].cpu_milli)
    canvas.rect(bar, _IDLE)
    held = canvas.cpu[node]
    other_cpu = total - int(state.cpu[node]) - sum(held.values())
    canvas.bar(bar, total, [(other_cpu, _OTHER), *((milli, _colour(index)) for index, milli in held.items())])
    canvas.body.append("</g>")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _short(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: max(1, characters - 1)] + "…"
