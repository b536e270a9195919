"""What a table would reject, said before anything is looked up: from which id on a request is, and items that are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from plait_disagg.graph.capture import Captured
from plait_disagg.graph.edit import live
from plait_disagg.graph.program import LOOKUP, Ref
from plait_disagg.graph.reference import run_reference
from plait_disagg.graph.sample_inputs import id_sources
from plait_disagg.package.items import first_bad


def reject_from(captured: Captured, rejecting: Mapping[str, int]) -> dict[str, int]:
    """Return for each input the least id that a table would reject for certain. `rejecting`: rows of those that do.

    Its ids index the table as they are, side by side with other inputs', or from where a field's rows begin.
    """
    bounds: dict[str, int] = {}
    for source in id_sources(captured.program, rejecting, captured.constants):
        first = source.rows - int(source.added.min())
        if source.is_id and first > 0:
            bounds[source.input] = min(first, bounds.get(source.input, first))
    return bounds


def check_items(captured: Captured, rejecting: Mapping[str, int], features: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for an item with which a table would be read outside its rows, whatever is computed of the
    item's inputs before. `rejecting`: rows of the tables that reject; `features`: those of all items (`Items`)."""
    program = captured.program
    for node in program.nodes:
        rows = rejecting.get(str(node.kwargs["table"])) if node.op == LOOKUP else None
        if rows is None:
            continue
        ids, offsets = node.args[:2]
        wanted = tuple((ref.name, ref) for ref in (ids, offsets) if isinstance(ref, Ref))
        needed = live(replace(program, outputs=wanted))
        read = {name for name, _ in wanted} | {name for one in needed.nodes for name in one.inputs}
        inputs = tuple(port for port in program.inputs if port.name in read)
        known = all(port.name in features for port in inputs) and all(one.op != LOOKUP for one in needed.nodes)
        if not known or not isinstance(ids, Ref):
            continue
        values = run_reference(replace(needed, inputs=inputs), captured.constants, None, features)
        made = values[ids.name]
        starts = offsets.name if isinstance(offsets, Ref) else ""
        found = first_bad((made < 0) | (made >= rows), values.get(starts))
        if found is not None:
            by = " and ".join(port.name for port in inputs if port.name != starts)
            number = int(made.reshape(-1)[found[0]])
            raise ValueError(
                f"items: {by} of item {found[1]} is id {number} of table {node.kwargs['table']}, "
                f"which takes 0 to {rows - 1}"
            )
