"""Which programs OpenVINO may compute: those whose operators are proven to give torch's numbers.

Its CPU plugin holds int64 as int32, and has formulas of its own for what looks like one operator in torch: a program
with any other operator stays with torch. `tests/property/test_dense_proven.py` proves each of `PROVEN`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plait_disagg.graph.execute import Compiled
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import TILE, USER_OF, Arg, Node, Port, Ref

_DIVISIONS = frozenset({"aten.div.Tensor", "aten.div.Scalar"})
_INDEX = "aten.index.Tensor"
_RESHAPES = frozenset({"aten.view.default", "aten.reshape.default"})

_WORDS = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar linear.default "
    "addmm.default mm.default bmm.default relu.default sigmoid.default tanh.default amax.default amin.default "
    "cat.default stack.default view.default reshape.default unsqueeze.default permute.default sum.dim_IntList mean.dim "
    "flatten.using_ints unflatten.int squeeze.dim squeeze.dims transpose.int slice.Tensor select.int index.Tensor"
)
PROVEN = frozenset({*(f"aten.{word}" for word in _WORDS.split()), TILE, SIZE})
"""Operators over float32. Sizes are only those of a shape: where a batch fills a part of its program, they count all
rows. Divisors are constants other than 0; an index is a constant without negative numbers (with
several indices OpenVINO takes these wrong), or the ids of a small table's rows, which were checked against the table
before."""

_DIVISOR = (2.0**-126, 2.0**126)
"""A divisor's least and largest size: OpenVINO multiplies by its reciprocal, which must be a normal number."""


def unproven(compiled: Compiled) -> str | None:
    """Return what of a program OpenVINO may not compute, as the log says it, or None."""
    program = compiled.program
    constants = {port.name: port for port in program.constants}
    values: dict[str, Port | Node] = {**{port.name: port for port in program.inputs}, **constants}
    for node in program.nodes:
        reason = _why_not(node, values, constants, compiled)
        if reason:
            return f"{node.name} ({node.op}): {reason}"
        values[node.name] = node
    return None


def _why_not(
    node: Node, values: Mapping[str, Port | Node], constants: Mapping[str, Port], compiled: Compiled
) -> str | None:
    if node.op not in PROVEN:
        return "the operator is not proven to be equal"
    if node.op == SIZE:
        return None
    if node.dtype != "float32":
        return f"its result is {node.dtype}"
    if node.kwargs and node.op != TILE:
        return f"{', '.join(node.kwargs)} is not proven to be equal"
    for name in node.inputs:
        value = values[name]
        is_size = isinstance(value, Node) and value.op == SIZE and node.op in _RESHAPES
        integer_is_proven = is_size or name == USER_OF or _indexes(node, value, constants, compiled)
        if value.dtype != "float32" and not integer_is_proven:
            return f"{name} is {value.dtype}"
    if node.op in _DIVISIONS and not _divides(node.args[1], compiled, constants):
        return "its divisor is not a constant, or too small or large"
    return None


def _indexes(node: Node, index: Port | Node, constants: Mapping[str, Port], compiled: Compiled) -> bool:
    """Return whether a tensor of integers is no more than the index of an indexing: a constant, or ids as they
    crossed (`graph.small_tables`) that index a constant."""
    source = node.args[0]
    if node.op != _INDEX or not isinstance(index, Port) or not isinstance(source, Ref) or source.name == index.name:
        return False
    if index.name in constants:
        return not compiled.constant(index.name).lt(0).any()
    return index.dtype == "int32" and source.name in constants


def _divides(divisor: Arg, compiled: Compiled, constants: Mapping[str, Port]) -> bool:
    if isinstance(divisor, Ref):
        if divisor.name not in constants:
            return False
        size = compiled.constant(divisor.name).abs()
    else:
        size = torch.tensor(divisor, dtype=torch.float64).abs()
    return bool(((size >= _DIVISOR[0]) & (size <= _DIVISOR[1])).all())
