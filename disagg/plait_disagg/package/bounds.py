"""From which id on a request is rejected, by input: what its table would reject, said before anything is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from plait_disagg.graph.capture import Captured
from plait_disagg.graph.program import LOOKUP, Node, Ref
from plait_disagg.tables.values import OutOfRange

__all__ = ["reject_from"]

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
