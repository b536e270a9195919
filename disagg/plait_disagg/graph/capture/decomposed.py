"""Operators of a trace that a program cannot hold become those that they are made of.

torch.export's own table of decompositions says what an operator is made of. Where that table stops at an operator that
writes into a part of its operand, as `x[:, 0] = y` does behind the scenes, ours says it as a cat or a choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.export.exported_program import default_decompositions

from plait_disagg.graph.capture.calls import (
    ATEN_LONGEST,
    changes_what_is_seen,
    functional_base,
    has_lowered_parts,
    is_explained,
    is_lookup,
)
from plait_disagg.graph.capture.rows_first import MAKERS
from plait_disagg.graph.operators import VOCABULARY

_RECURRENT = frozenset({"aten.gru.input", "aten.lstm.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"})
"""Layers over a history, unrolled: its length is a number in the trace."""


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """Take a trace apart as far as a program asks for.

    In: a trace. Out: one with unknown operators as what they are made of, recurrent layers unrolled, and without
    changes in place that another reader could see; what torch has no parts for stays, to be refused by its name.
    """
    nodes = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if not any(_has_parts(node.target) or changes_what_is_seen(node) for node in nodes):
        return program
    with torch.no_grad():
        made: ExportedProgram = program.run_decompositions(dict(_table()))
    return made


def _has_parts(target: torch._ops.OpOverload) -> bool:
    name = str(target)  # the table is large, and most models need none of it
    return (name in _RECURRENT or name in _OURS or _is_unknown(name)) and target in _table()


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    """Return what computes each operator that a program does not hold, as far as that is known."""
    made = {target: how for target, how in dict(default_decompositions()).items() if _is_unknown(str(target))}
    for name in (*_RECURRENT, *_OURS):
        packet, which = name.removeprefix("aten.").split(".")
        target = getattr(getattr(torch.ops.aten, packet), which)
        made[target] = _OURS[name] if name in _OURS else get_decompositions([target])[target]
    return made


def _is_unknown(op: str) -> bool:
    known = op in VOCABULARY or functional_base(op) in VOCABULARY or has_lowered_parts(op) or op in MAKERS
    return op.startswith("aten.") and not known and not is_explained(op) and not is_lookup(op)


def _copied(into: torch.Tensor, source: torch.Tensor, *_: bool) -> torch.Tensor:
    """Return what `into.copy_(source)` leaves."""
    return source.to(into.dtype).expand(into.shape)


def _filled(into: torch.Tensor, value: Any) -> torch.Tensor:
    """Return what `into.fill_(value)` leaves."""
    if isinstance(value, torch.Tensor):
        return value.to(into.dtype).expand(into.shape)
    return torch.full_like(into, value)


def _slice_scattered(
    into: torch.Tensor, source: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, *step: int
) -> Any:
    """Return what writing a slice leaves: the parts before and behind it, and the source between them."""
    length = into.shape[dim]
    if start in (None, 0) and (end is None or (isinstance(end, int) and end >= ATEN_LONGEST)) and step in ((), (1,)):
        return _copied(into, source)
    if step not in ((), (1,)) or any(not isinstance(size, int) for size in (length, start or 0, end or 0)):
        return NotImplemented
    first, last, _ = slice(start, end).indices(length)
    last = max(first, last)
    parts = (into.narrow(dim, 0, first), source.to(into.dtype), into.narrow(dim, last, length - last))
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _select_scattered(into: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Any:
    """Return what writing one index of a dimension leaves."""
    if not isinstance(into.shape[dim], int):
        return NotImplemented
    at = index % into.shape[dim]
    return _slice_scattered(into, source.unsqueeze(dim), dim, at, at + 1)


def _index_written(into: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> Any:
    """Return what `into[mask] = number` leaves; other writes by index have no form that keeps rows apart."""
    masks = [index for index in indices if index is not None]
    whole = len(masks) == len(indices) == 1 and masks[0].dtype == torch.bool
    if not whole or accumulate or tuple(map(str, values.shape)) not in ((), ("1",)):
        return NotImplemented
    mask = masks[0].reshape(masks[0].shape + (1,) * (into.dim() - masks[0].dim()))
    return torch.where(mask, values.to(into.dtype).reshape(()), into)


def _instance_normed(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """Return every row's channels normalised by their own numbers, or by the statistics that the layer has kept."""
    weight, bias, mean, var, use_input_stats, momentum, eps, _ = given
    if not use_input_stats:
        return torch.batch_norm(x, weight, bias, mean, var, False, momentum, eps, False)
    dims = list(range(2, x.dim()))
    centred = x - x.mean(dims, keepdim=True)
    made = centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    shape = (1, -1) + (1,) * len(dims)
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape)


_OURS: Mapping[str, Callable[..., Any]] = {
    "aten.copy.default": _copied,
    "aten.fill.Scalar": _filled,
    "aten.fill.Tensor": _filled,
    "aten.slice_scatter.default": _slice_scattered,
    "aten.select_scatter.default": _select_scattered,
    "aten.index_put.default": _index_written,
    "aten.instance_norm.default": _instance_normed,
}
