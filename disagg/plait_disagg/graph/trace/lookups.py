"""Adds lookups in tables to a program in the making."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.program import LOOKUP, ROWS, Arg, Node, Ref
from plait_disagg.graph.rows import PER_ROW, Fact, RowCount
from plait_disagg.graph.trace.appender import Appender, Making
from plait_disagg.graph.trace.bags import BagCall
from plait_disagg.graph.trace.traced import Layout, Traced, dtype_of

__all__ = ["Lookups"]


class _LookupMaking(Making, Protocol):
    values: dict[fx.Node, Any]
    constants: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]
    names: dict[int, str]

    def read(self, node: fx.Node) -> Any:
        """Return what a node of the trace became."""


@dataclass(frozen=True, slots=True)
class Lookups:
    """Adds the lookup of one node of the trace."""

    builder: _LookupMaking
    node: fx.Node
    where: str

    def add(self, call: BagCall) -> Traced:
        """Add one lookup and return its rows. Raises `UnsupportedOperator` if it cannot be served."""
        where, node = self.where, self.node
        weight = self.builder.values.get(call.table)
        ids = self.builder.read(call.ids)
        if not isinstance(weight, torch.Tensor) or not isinstance(ids, Traced):
            raise UnsupportedOperator(call.op, "its table is not a parameter of the module", where)
        call.check_table(weight, where)
        if call.mode == "rows" and self._same_for_all(ids):
            return self._add_constant_rows(node, ids, weight, where)
        offsets = self._offsets(call, ids, where)
        weights = self.builder.read(call.weights) if call.weights is not None else None
        if isinstance(weights, torch.Tensor) or (weights is not None and weights.fact.counts != ids.fact.counts):
            raise UnsupportedOperator(call.op, "per_sample_weights must be computed from the bag's own ids", where)
        table = self.builder.names[id(weight)].removesuffix(".weight")
        self.builder.tables[table] = weight
        pooled = call.mode != "rows"
        shape = ((ROWS,) if pooled else ids.fact.shape) + (weight.shape[1],)
        name = self.builder.name(table)
        args: tuple[Arg, ...] = (ids.ref, offsets, weights.ref if weights is not None else None)
        kwargs: dict[str, Arg] = {"table": table, "mode": call.mode}
        self.builder.nodes.append(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=ids.rows))
        fact = Fact(shape, PER_ROW if pooled else ids.fact.counts)
        layout = Layout(shape) if pooled else replace(ids.layout, sizes=(*ids.layout.sizes, weight.shape[1]))
        return Traced(Ref(name), fact, ids.rows, "float32", layout)

    def _same_for_all(self, ids: Traced) -> bool:
        """Return whether ids are a constant that was expanded over the rows, such as positions."""
        made = next((node for node in self.builder.nodes if node.name == ids.ref.name), None)
        source = made.args[0] if made is not None and made.op == "aten.expand.default" else None
        return ids.layout.is_plain and isinstance(source, Ref) and source.name in self.builder.constants

    def _add_constant_rows(self, node: fx.Node, ids: Traced, weight: torch.Tensor, where: str) -> Traced:
        """Look up now what is the same for all rows, and expand that: a constant, which no request has to send."""
        made = next(made for made in self.builder.nodes if made.name == ids.ref.name)
        source = made.args[0]
        assert isinstance(source, Ref)
        held = self.builder.constants[source.name]
        rows = self.builder.named(weight[held.reshape((1,) * (ids.layout.ndim - held.dim()) + held.shape)], node.name)
        shape = (*ids.layout.sizes, int(weight.shape[1]))
        given = {"self": rows, "size": (RowCount(), *shape[1:])}
        appender = Appender(self.builder, node.name, where)
        return appender.append("aten.expand.default", given, frozenset(given), Layout(shape), dtype_of(weight))

    def _offsets(self, call: BagCall, ids: Traced, where: str) -> Ref | None:
        """Return the bag's own offsets, or None for ids in equal rows or ids that are not pooled."""
        if call.mode == "rows" or call.equal_rows:
            if not ids.layout.is_plain and call.mode != "rows":
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            if ids.fact.counts is None or (call.mode != "rows" and ids.fact.ndim != 2):
                raise UnsupportedOperator(call.op, "its ids must have one row per candidate", where)
            return None
        value = self.builder.read(call.offsets) if call.offsets is not None else None
        kind, _, bag = (ids.fact.counts or "").partition(":")
        wanted = f"{'offsets' if call.include_last else 'starts'}:{bag}"
        if kind != "ids" or not isinstance(value, Traced) or value.fact.counts != wanted:
            how = "as they are (include_last_offset=True) or without the last (offsets[:-1])"
            raise UnsupportedOperator(call.op, f"a bag must be looked up with its own offsets, {how}", where)
        return Ref(bag + OFFSETS)
