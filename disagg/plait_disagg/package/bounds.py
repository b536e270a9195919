"""What a table would reject, said before anything is looked up: from which id on a request is, and items that are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from plait_disagg.graph.capture import Captured
from plait_disagg.graph.edit import live
from plait_disagg.graph.program import LOOKUP, Node, Ref
from plait_disagg.graph.reference import run_reference
from plait_disagg.package.items import first_bad
from plait_disagg.tables.values import OutOfRange

_KEEPS_IDS = frozenset(
    {
        "aten.to.dtype",
        "aten._to_copy.default",
        "aten.view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.contiguous.default",
    }
)
"""Operators behind which ids are what they were; casts to float32 and back, for tables of at most 2^24 rows."""

_EXACT_ROWS = 1 << 24


def reject_from(captured: Captured, policies: OutOfRange | Mapping[str, OutOfRange]) -> dict[str, int]:
    """Return for each input the least id that a table would reject for certain.

    Its ids index the table as they are, side by side with other inputs', or from where a field's rows begin; tables
    whose policy is not to reject do not count.
    """
    inputs = {port.name for port in captured.program.inputs}
    nodes = {node.name: node for node in captured.program.nodes}
    bounds: dict[str, int] = {}
    for node in captured.program.nodes:
        if node.op != LOOKUP or not isinstance(node.args[0], Ref):
            continue
        table = str(node.kwargs["table"])
        policy = policies if isinstance(policies, str) else policies.get(table, "error")
        rows = int(captured.tables[table].shape[0])
        for name, added in _sources(node.args[0], torch.zeros(1, dtype=torch.int64), rows, nodes, captured.constants):
            first = rows - int(added.min())
            if policy == "error" and name in inputs and first > 0:
                bounds[name] = min(first, bounds.get(name, first))
    return bounds


def check_items(
    captured: Captured, policies: OutOfRange | Mapping[str, OutOfRange], features: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError for an item with which a table would be read outside its rows, whatever is computed of the
    item's inputs before. `features`: those of all items (`Items`)."""
    program = captured.program
    for node in program.nodes:
        if node.op != LOOKUP:
            continue
        ids, offsets = node.args[:2]
        table = str(node.kwargs["table"])
        wanted = tuple((ref.name, ref) for ref in (ids, offsets) if isinstance(ref, Ref))
        needed = live(replace(program, outputs=wanted))
        read = {name for name, _ in wanted} | {name for one in needed.nodes for name in one.inputs}
        inputs = tuple(port for port in program.inputs if port.name in read)
        known = all(port.name in features for port in inputs) and all(one.op != LOOKUP for one in needed.nodes)
        policy = policies if isinstance(policies, str) else policies.get(table, "error")
        if policy != "error" or not known or not isinstance(ids, Ref):
            continue
        values = run_reference(replace(needed, inputs=inputs), captured.constants, None, features)
        made, rows = values[ids.name], int(captured.tables[table].shape[0])
        starts = offsets.name if isinstance(offsets, Ref) else ""
        found = first_bad((made < 0) | (made >= rows), values.get(starts))
        if found is not None:
            by = " and ".join(port.name for port in inputs if port.name != starts)
            number = int(made.reshape(-1)[found[0]])
            raise ValueError(
                f"items: {by} of item {found[1]} is id {number} of table {table}, which takes 0 to {rows - 1}"
            )


def _sources(
    ids: Ref, added: torch.Tensor, rows: int, nodes: Mapping[str, Node], constants: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the values that ids are, with what was added to them on the way."""
    node = nodes.get(ids.name)
    if node is None:
        yield ids.name, added
        return
    parts, width = node.args[0], node.shape[-1] if node.shape else 0
    if isinstance(parts, Ref) and _is_same_id(node, rows):
        yield from _sources(parts, added, rows, nodes, constants)
    elif isinstance(parts, Ref) and (constant := _added(node, constants)) is not None:
        yield from _sources(parts, added + constant, rows, nodes, constants)
    elif node.op == "aten.cat.default" and isinstance(parts, tuple) and len(parts) == width:
        last = len(node.args) > 1 and node.args[1] in (-1, len(node.shape) - 1)
        shares = added.expand(*added.shape[:-1], width).unbind(-1) if added.shape[-1] in (1, width) else ()
        for part, share in zip(parts, shares, strict=False):
            if last and isinstance(part, Ref):
                yield from _sources(part, share.reshape(-1), rows, nodes, constants)


def _added(node: Node, constants: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the constant that an addition adds to ids, None for any other operator."""
    other = node.args[1] if node.op == "aten.add.Tensor" and node.dtype.startswith("int") else None
    constant = constants.get(other.name) if isinstance(other, Ref) and not node.kwargs else None
    return constant if constant is not None and constant.numel() else None


def _is_same_id(node: Node, rows: int) -> bool:
    exact = node.dtype == "int64" or (node.dtype in ("float32", "float64", "int32") and rows <= _EXACT_ROWS)
    return node.op in _KEEPS_IDS and exact
