"""Factoring of linear layers over user-side and candidate-side features: the user's share is computed once per user.

    linear(cat([u, v]), W, b)  =  tile(linear(u, W_u, b)) + linear(v, W_v)        W = [W_u, W_v] by columns

In a DLRM with interaction *cat* most columns of the first top layer are the user's, and they are the same for all
candidates. The sum is rounded in another order (a difference of about 1e-6), so an exact program is left unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from plait_disagg.graph.edit import live
from plait_disagg.graph.program import TILE, USER_OF, Arg, Node, Port, Program, Ref, Rows

__all__ = ["factor_linears"]


def factor_linears(program: Program, constants: Mapping[str, torch.Tensor]) -> tuple[Program, dict[str, torch.Tensor]]:
    """Return a tiled `program` with every such layer factored, and its constants (the columns are copies)."""
    work = _LinearFactoring(program, dict(constants))
    nodes = tuple(made for node in program.nodes for made in work.replaced(node))
    ports = (*program.constants, *work.ports)
    factored = live(replace(program, nodes=nodes, constants=ports))
    return factored, {port.name: work.constants[port.name] for port in factored.constants}


@dataclass(frozen=True, slots=True)
class _Share:
    """The parts of a cat that belong to one side, and their columns of the weight."""

    rows: Rows
    parts: tuple[Ref, ...]
    columns: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Number of columns."""
        return sum(end - start for start, end in self.columns)


@dataclass
class _LinearFactoring:
    program: Program
    constants: dict[str, torch.Tensor]
    ports: list[Port] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.program.nodes}
        self.shapes = {port.name: port.shape for port in self.program.inputs}
        self.shapes |= {node.name: node.shape for node in self.program.nodes}

    def replaced(self, node: Node) -> tuple[Node, ...]:
        """Return what replaces `node`: itself, or the two shares, a tile and their sum (under the node's name)."""
        shares = self._shares(node)
        if shares is None:
            return (node,)
        user, item = shares
        bias = node.args[2] if len(node.args) > 2 else None
        user_nodes = self._linear(node, user, bias)
        item_nodes = self._linear(node, item, None)
        tiled = replace(node, name=f"{node.name}:user:tiled", op=TILE, args=(Ref(f"{node.name}:user"), Ref(USER_OF)))
        addends: tuple[Arg, ...] = (Ref(tiled.name), Ref(f"{node.name}:item"))
        return (*user_nodes, *item_nodes, tiled, replace(node, op="aten.add.Tensor", args=addends))

    def _shares(self, node: Node) -> tuple[_Share, _Share] | None:
        """Return the user's and the candidates' share of a linear layer over a cat of both along its last dimension."""
        if node.op != "aten.linear.default" or node.rows != "item" or not isinstance(node.args[0], Ref):
            return None
        cat = self.nodes.get(node.args[0].name)
        if cat is None or cat.op != "aten.cat.default" or not isinstance(cat.args[0], tuple):
            return None
        dim = cat.args[1] if len(cat.args) > 1 else 0
        if not isinstance(dim, int) or dim % len(cat.shape) != len(cat.shape) - 1:
            return None
        parts, columns, start = [], [], 0
        for part in cat.args[0]:
            assert isinstance(part, Ref)
            end = start + self.shapes[part.name][-1]
            parts.append(part)
            columns.append((start, end))
            start = end
        untiled = [self._untiled(part) for part in parts]
        user = [(ref, span) for ref, span in zip(untiled, columns, strict=True) if ref is not None]
        item = [(part, span) for part, ref, span in zip(parts, untiled, columns, strict=True) if ref is None]
        if not user or not item:
            return None
        return _share("user", user), _share("item", item)

    def _untiled(self, part: Ref) -> Ref | None:
        """Return the user-side value that `part` repeats, or None if it is a candidate's own."""
        node = self.nodes.get(part.name)
        if node is None or node.op != TILE or node.kwargs.get("copy"):
            return None
        source = node.args[0]
        return source if isinstance(source, Ref) else None

    def _linear(self, node: Node, share: _Share, bias: Arg) -> tuple[Node, ...]:
        """Return a linear layer over one share, preceded by a cat if it has several parts."""
        weight = node.args[1]
        assert isinstance(weight, Ref)
        name = f"{node.name}:{share.rows}"
        columns = f"{name}:weight"  # not by the weight: another layer may share it and cut it elsewhere
        self._add_columns(columns, self.constants[weight.name], share)
        before: tuple[Node, ...] = ()
        source = share.parts[0]
        if len(share.parts) > 1:
            source = Ref(f"{name}:cat")
            shape = (*node.shape[:-1], share.width)
            args: tuple[Arg, ...] = (share.parts, len(shape) - 1)
            before = (replace(node, name=source.name, op="aten.cat.default", args=args, shape=shape, rows=share.rows),)
        given: tuple[Arg, ...] = (source, Ref(columns), bias)
        return (*before, replace(node, name=name, args=given, rows=share.rows))

    def _add_columns(self, name: str, weight: torch.Tensor, share: _Share) -> None:
        if name not in self.constants:
            made = torch.cat([weight[:, start:end] for start, end in share.columns], dim=1).contiguous()
            self.constants[name] = made
            dtype = str(made.dtype).removeprefix("torch.")
            self.ports.append(Port(name=name, shape=tuple(made.shape), dtype=dtype, rows="none"))


def _share(rows: Rows, found: list[tuple[Ref, tuple[int, int]]]) -> _Share:
    return _Share(rows, tuple(ref for ref, _ in found), tuple(span for _, span in found))
