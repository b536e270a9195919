"""Which tensors the messages of a model have (`plait_fabric.layouts`): both ends make this of what they greet each
other with, the model's card and, of an HN, what crosses to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, tensor_names
from plait_disagg.graph.program import Port
from plait_disagg.queue.knobs import WireFormat
from plait_disagg.values import ModelCard
from plait_fabric.layouts import Layout, LayoutError, Part, code_of, layout_of, parse_layout

_NARROWEST_INT8 = 16
"""The row length below which the scale and bias of an int8 row cancel out its advantage over float16."""

_SIDES = {"user": "u", "item": "i"}


@dataclass(frozen=True, slots=True)
class CardLayouts:
    """The layouts of a model's requests and of its answers."""

    inputs: Layout
    outputs: Layout


def layouts_of(card: ModelCard) -> CardLayouts:
    """Return the layouts that follow from a card."""
    outputs = [Part("f4", "i", shape, name) for name, shape in card.outputs.items()]
    return CardLayouts(layout_of_inputs(card.inputs), layout_of(outputs))


def layout_of_inputs(inputs: Sequence[Input]) -> Layout:
    """Return the layout of a request."""
    parts: list[Part] = []
    for item in inputs:
        side = _SIDES[item.side]
        if isinstance(item, Bag):
            parts += [Part("i8", "f", (), item.name), Part("i8", side.upper(), (), item.name + OFFSETS)]
            if item.weighted:
                parts.append(Part("f4", "f", (), item.name + WEIGHTS))
        else:
            parts.append(Part("f4" if isinstance(item, Dense) else "i8", side, item.shape, item.name))
    return layout_of(parts)


def layout_of_crossing(ports: Sequence[Port], inputs: Sequence[Input]) -> Layout:
    """Return the layout of what crosses, as float32; `inputs`: the model's. Raises `LayoutError` for what cannot."""
    flat = frozenset(tensor_names([item for item in inputs if isinstance(item, Bag)]))
    parts = []
    for port in ports:
        _, *tail = port.shape or (0, -1)
        if any(size < 0 for size in tail):
            raise LayoutError(f"{port.name} is no tensor with rows of one shape")
        rows = "f" if port.name in flat else _SIDES.get(port.rows, "f")
        parts.append(Part(code_of(getattr(torch, port.dtype)), rows, tuple(tail), port.name))
    return layout_of(parts)


@dataclass(frozen=True, slots=True)
class CrossingLayout:
    """How a batch crosses. `mergeable`: every tensor has a row per user or per candidate, so that batches laid end to
    end are a batch. An int64 may be offsets, which look as if they had."""

    layout: Layout
    mergeable: bool


@lru_cache(maxsize=64)
def crossing_layout(
    agreed: str, wire: WireFormat, hot_ports: tuple[tuple[str, ...], ...] | None = None
) -> CrossingLayout:
    """Return what the `agreed` layout (its text) is in a wire format, and with slots in place of the rows of those
    ports, by table (`hot_rows`). Raises `LayoutError`."""
    parts = {part.name: part for part in parse_layout(agreed).parts}
    slots, hot = set(), list[Part]()
    for index, ports in enumerate(hot_ports or ()):
        if not ports or any(port not in parts or not parts[port].tail for port in ports):
            raise LayoutError("hot rows of ports that have none")
        tail = parts[ports[0]].tail[-1:]
        hot += [Part("i4", "f", (), new_slots(index)), Part("f4", "f", tail, new_rows(index))]
        parts |= {port: replace(parts[port], code="i4", tail=parts[port].tail[:-1]) for port in ports}
        slots |= {*ports}
    mergeable = all(
        part.rows in ("u", "i") and (part.code in ("f4", "i4", "b1") or part.name in slots) for part in parts.values()
    )
    return CrossingLayout(layout_of([_narrowed(part, wire) for part in (*parts.values(), *hot)]), mergeable)


def _narrowed(part: Part, wire: WireFormat) -> Part:
    if part.code != "f4" or wire == "float32":
        return part
    if wire == "float16":
        return replace(part, code="f2")
    return replace(part, code="q1") if part.tail and part.tail[-1] >= _NARROWEST_INT8 else part


def new_slots(index: int) -> str:
    """Return the name of the slots that a batch fills of a table. No port has it: their names have no dots."""
    return f"hot.{index}.new"


def new_rows(index: int) -> str:
    """Return the name of the rows that fill them, and of those that only pass through."""
    return f"hot.{index}.rows"
