"""Factoring of linear layers over user-side and candidate-side features: the user's share is computed once per user.

    linear(cat([u, v]), W, b)  =  tile(linear(u, W_u, b)) + linear(v, W_v)        W = [W_u, W_v] by columns

In a DLRM with interaction *cat* most columns of the first top layer are the user's, and they are the same for all
candidates. Attention over a user's history, as DIN's, reads more of the kind: a candidate's own vector v repeated along
the T steps, and differences to the steps h. There the layer is taken apart further, and v is multiplied once:

    linear(cat([h, v, h - v, h * v]), [A, B, C, D], b)  =  linear(h, A + C, b)  +  linear(h * v, D)  +  linear(v, B - C)

The sum is rounded in another order (a difference of about 1e-6), so an exact program is left unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from plait_disagg.graph.edit import Draft
from plait_disagg.graph.program import TILE, USER_OF, Arg, Node, Port, Program, Ref, Rows

_EXPANDS = ("aten.expand.default", "aten.expand_as.default")


def factor_linears(program: Program, constants: Mapping[str, torch.Tensor]) -> tuple[Program, dict[str, torch.Tensor]]:
    """Return a tiled `program` with every such layer factored, and its constants (the columns are copies)."""
    work = _LinearFactoring(program.values, Draft(program, constants))
    for node in program.nodes:
        work.add(node)
    return work.draft.finished(program.outputs)


Columns: TypeAlias = tuple[tuple[int, int, int], ...]
"""Columns of a weight, added up: sign, start and end of each block."""

_Side = Literal["user", "narrow", "item"]


@dataclass(frozen=True, slots=True)
class _Share:
    """The values that one side's layer reads, and the columns of the weight that each meets."""

    side: _Side
    parts: tuple[Ref, ...]
    columns: tuple[Columns, ...]

    @property
    def width(self) -> int:
        """Number of columns."""
        return sum(blocks[0][2] - blocks[0][1] for blocks in self.columns)


@dataclass
class _LinearFactoring:
    values: Mapping[str, Port | Node]
    draft: Draft

    def add(self, node: Node) -> None:
        """Add `node`, or in its place its shares, a tile and their sum (under the node's name)."""
        shares = self._shares(node)
        if len(shares) < 2:
            self.draft.add(node)
            return
        addends: list[Ref] = []
        bias = node.args[2] if len(node.args) > 2 else None
        for share in shares:
            made = self._linear(node, share, bias)
            bias = None
            if share.side == "user":
                made = self.draft.add(replace(node, name=f"{made.name}:tiled", op=TILE, args=(made, Ref(USER_OF))))
            addends.append(made)
        total = addends[0]
        for number, addend in enumerate(addends[1:], start=2):
            name = node.name if number == len(addends) else f"{node.name}:sum"
            total = self.draft.add(replace(node, name=name, op="aten.add.Tensor", args=(total, addend)))

    def _shares(self, node: Node) -> list[_Share]:
        """Return the shares of a linear layer over a cat along its last dimension; one or none: not to be factored."""
        cat = self.values[node.parts[0].name] if node.op == "aten.linear.default" and node.rows == "item" else None
        if not isinstance(cat, Node) or cat.op != "aten.cat.default":
            return []
        dim = cat.args[1] if len(cat.args) > 1 else 0
        if not isinstance(dim, int) or dim % len(cat.shape) != len(cat.shape) - 1:
            return []
        found: dict[_Side, dict[str, Columns]] = {"user": {}, "item": {}, "narrow": {}}
        start = 0
        for part in cat.parts:
            end = start + self.values[part.name].shape[-1]
            for side, source, sign in self._terms(part):
                found[side][source] = (*found[side].get(source, ()), (sign, start, end))
            start = end
        return [
            _Share(side, tuple(map(Ref, sources)), tuple(sources.values()))
            for side, sources in found.items()
            if sources
        ]

    def _terms(self, part: Ref, sign: int = 1) -> list[tuple[_Side, str, int]]:
        """Return what `part` is a sum of: side, source and sign. A difference of candidates' own values is one term."""
        node = self.values[part.name]
        if not isinstance(node, Node) or not node.parts:
            return [("item", part.name, sign)]
        source = node.parts[0]
        if node.op == TILE and not node.kwargs.get("copy"):
            return [("user", source.name, sign)]
        if node.op in _EXPANDS and self._is_narrow(source, node):
            return [("narrow", source.name, sign)]
        if node.op == "aten.sub.Tensor" and not node.kwargs:
            _, other = node.args
            if isinstance(other, Ref) and all(self.values[of.name].shape == node.shape for of in (source, other)):
                terms = [*self._terms(source, sign), *self._terms(other, -sign)]
                if all(side != "item" for side, _, _ in terms):
                    return terms
        return [("item", part.name, sign)]

    def _is_narrow(self, source: Ref, expanded: Node) -> bool:
        """Return whether a candidate's value (rows, 1, width) was repeated along its middle dimension only."""
        narrow = self.values[source.name]
        is_item = isinstance(narrow, Node) and narrow.rows == "item"
        wanted = (*expanded.shape[:1], 1, *expanded.shape[2:])
        return is_item and len(expanded.shape) == 3 and narrow.shape == wanted and expanded.shape[1] != 1

    def _linear(self, node: Node, share: _Share, bias: Arg) -> Ref:
        """Add a linear layer over one share, preceded by a cat if it has several parts."""
        weight = node.args[1]
        assert isinstance(weight, Ref)
        name = f"{node.name}:{share.side}"
        rows: Rows = "user" if share.side == "user" else "item"
        numbers = self.draft.tensor(weight.name)
        assert numbers is not None
        columns = [
            functools.reduce(torch.add, [numbers[:, start:end] * sign for sign, start, end in blocks])
            for blocks in share.columns
        ]
        # Not named by the weight: another layer may share it and cut it elsewhere.
        share_of_weight = self.draft.constant(f"{name}:weight", torch.cat(columns, dim=1))
        source = share.parts[0]
        leading = self.values[source.name].shape[:-1] if share.side == "narrow" else node.shape[:-1]
        if len(share.parts) > 1:
            shape = (*leading, share.width)
            joined = replace(node, op="aten.cat.default", args=(share.parts, len(shape) - 1), shape=shape, rows=rows)
            source = self.draft.add(replace(joined, name=f"{name}:cat"))
        given: tuple[Arg, ...] = (source, share_of_weight, bias)
        return self.draft.add(replace(node, name=name, args=given, shape=(*leading, node.shape[-1]), rows=rows))
