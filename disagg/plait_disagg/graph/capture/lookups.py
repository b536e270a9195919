"""Adds lookups in tables to a program in the making."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from plait_disagg.graph.capture.appender import Appender, Making
from plait_disagg.graph.capture.embeddings import BagCall
from plait_disagg.graph.capture.traced import RowsLayout, Traced, side_of
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.program import LOOKUP, ROWS, Arg, Node, Ref
from plait_disagg.graph.rows import PER_ROW, Fact

__all__ = ["Lookups"]


class _LookupMaking(Making, Protocol):
    values: dict[fx.Node, Any]
    constants: dict[str, torch.Tensor]
    tables: dict[str, torch.Tensor]
    names: dict[int, str]
    moved: bool

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
        where = self.where
        weight = self.builder.values.get(call.table)
        ids = self.builder.read(call.ids)
        if not isinstance(weight, torch.Tensor) or not isinstance(ids, Traced):
            raise UnsupportedOperator(call.op, "its table is not a parameter of the module", where)
        call.check_table(weight, where)
        offsets = self._offsets(call, ids, where)
        weights = self._weights(call, ids, where)
        left = self._counted(call, ids) if call.leaves_out(weight) else None
        if left is not None:
            weights = (
                left if weights is None else self._appender.call("aten.mul.Tensor", left, "float32", other=weights)
            )
        table = self.builder.names[id(weight)].removesuffix(".weight")
        self.builder.tables[table] = weight
        pooled = call.mode != "rows"
        shape = ((ROWS,) if pooled else ids.fact.shape) + (weight.shape[1],)
        name = self.builder.name(table)
        args: tuple[Arg, ...] = (ids.ref, offsets, weights.ref if weights is not None else None)
        side = side_of({"ids": ids, "weights": weights})
        kwargs: dict[str, Arg] = {"table": table, "mode": "sum" if left is not None else call.mode}
        self.builder.nodes.append(Node(name=name, op=LOOKUP, args=args, kwargs=kwargs, shape=shape, rows=side))
        fact = Fact(shape, PER_ROW if pooled else ids.fact.counts)
        layout = RowsLayout(shape) if pooled else replace(ids.layout, sizes=(*ids.layout.sizes, weight.shape[1]))
        rows = Traced(Ref(name), fact, side, "float32", layout)
        return rows if left is None or call.mode == "sum" else self._shared_out(rows, left)

    def _weights(self, call: BagCall, ids: Traced, where: str) -> Traced | None:
        """Return the number that each id's row is multiplied with, in the shape of the ids; None for 1."""
        if call.weights is None:
            return None
        made = self.builder.read(call.weights)
        if not isinstance(made, Traced) or (made.fact, made.layout.is_plain) != (ids.fact, True):
            how = "have the shape of the ids, and for a bag with offsets be computed from its own ids"
            raise UnsupportedOperator(call.op, f"per_sample_weights must {how}", where)
        return made

    def _counted(self, call: BagCall, ids: Traced) -> Traced:
        """Return 1.0 for every id that counts and 0.0 for padding."""
        self.builder.moved = True
        counts = self._appender.call("aten.ne.Scalar", ids, "bool", other=call.padding_idx)
        return self._appender.call("aten.to.dtype", counts, "float32", dtype=torch.float32)

    def _shared_out(self, rows: Traced, left: Traced) -> Traced:
        """Return sums divided by the number of ids that count, or by 1 if there are none."""
        call = self._appender.call
        count = call("aten.sum.dim_IntList", left, "float32", (ROWS, 1), dim=(1,), keepdim=True)
        return call("aten.div.Tensor", rows, "float32", other=call("aten.clamp_min.default", count, "float32", min=1))

    @property
    def _appender(self) -> Appender:
        return Appender(self.builder, self.node.name, self.where)

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
