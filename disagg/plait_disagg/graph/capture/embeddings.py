"""Embedding operators in a trace: which table, which ids, and how they are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait_disagg.graph.capture.lower import bind
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.tables.values import Mode

_MODES: tuple[Mode, ...] = ("sum", "mean", "max")
_EMBEDDING = "aten.embedding.default"
_BAGS = ("aten.embedding_bag.padding_idx", "aten.embedding_bag.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class BagCall:
    """One embedding operator. With `equal_rows`, the ids are `(rows, k)` and every row is a bag of k."""

    op: str
    table: fx.Node
    ids: fx.Node
    mode: Mode
    offsets: fx.Node | None = None
    weights: fx.Node | None = None
    include_last: bool = False
    padding_idx: int | None = None
    equal_rows: bool = False

    def leaves_out(self, weight: torch.Tensor) -> bool:
        """Return whether ids equal to `padding_idx` must be left out of the bag: in a sum, a row of zeros may stay."""
        if self.padding_idx is None or self.mode == "rows":
            return False
        return self.mode != "sum" or bool(weight[self.padding_idx].any())

    def check_table(self, weight: torch.Tensor, where: str) -> None:
        """Raise `UnsupportedOperator` if the table cannot be served."""
        if weight.dtype != torch.float32 or weight.ndim != 2:
            raise UnsupportedOperator(
                self.op, f"its table is {weight.dtype} with {weight.ndim} dimensions, not float32 with 2", where
            )
        if self.leaves_out(weight) and self.mode != "sum" and not (self.mode == "mean" and self.equal_rows):
            why = "padding_idx takes ids out of the bag, and how many are left is not known here"
            raise UnsupportedOperator(
                self.op, f"{why}; give it ids of shape (rows, k), or send bags without padding", where
            )


def is_lookup(op: str) -> bool:
    """Return whether an operator looks up in a table."""
    return op == _EMBEDDING or op in _BAGS


def bag_call(node: fx.Node) -> BagCall | None:
    """Return what an embedding operator looks up, or None for any other operator."""
    op = str(node.target)
    if op == _EMBEDDING:
        bound, _ = bind(node)
        return BagCall(op=op, table=bound["weight"], ids=bound["indices"], mode="rows")
    if op not in _BAGS:
        return None
    bound, _ = bind(node)
    ids, offsets = bound["indices"], bound["offsets"]
    padding = bound.get("padding_idx")
    rows, weights = _equal_rows(ids, offsets), bound["per_sample_weights"]
    if rows is not None and weights is not None:
        weights = _unflattened(weights)
    return BagCall(
        op=op,
        table=bound["weight"],
        ids=ids if rows is None else rows,
        offsets=None if rows is not None else offsets,
        weights=weights,
        mode=_MODES[int(bound["mode"])],
        include_last=bool(bound["include_last_offset"]),
        padding_idx=None if padding is None or padding < 0 else int(padding),
        equal_rows=rows is not None,
    )


def _equal_rows(ids: Any, offsets: Any) -> fx.Node | None:
    """Return the `(rows, k)` ids of a call that flattens them and makes offsets 0, k, 2k, ...

    This is how EmbeddingBag treats 2-D input.
    """
    source = _unflattened(ids)
    if source is None or str(offsets.target) != "aten.arange.start_step":
        return None
    start, _, step = offsets.args[:3]
    return source if start == 0 and step == source.meta["val"].shape[1] else None


def _unflattened(flat: fx.Node) -> fx.Node | None:
    """Return the matrix whose numbers `flat` has in one row, or None."""
    if str(flat.target) not in ("aten.reshape.default", "aten.view.default") or flat.meta["val"].ndim != 1:
        return None
    source = flat.args[0]
    return source if isinstance(source, fx.Node) and source.meta["val"].ndim == 2 else None
