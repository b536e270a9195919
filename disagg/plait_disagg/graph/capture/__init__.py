"""From a module to a program: `torch.export` traces it, and every operator is checked before it is accepted.

ATen overloads stay as the module called them (nothing is decomposed), so a program reproduces the module bit for
bit. On the way, embedding operators become `plait.lookup`; whatever depends on parameters alone is computed once and
becomes a constant; in-place operators on values that nothing else reads become their functional equivalents;
`split`, `chunk` and `unbind` become slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from plait_disagg.graph.capture.builder import Builder
from plait_disagg.graph.capture.exported import export
from plait_disagg.graph.capture.traced import Traced, dtype_of
from plait_disagg.graph.edit import lookups_of, simplify
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.fold import fold
from plait_disagg.graph.inputs import Input, check_inputs
from plait_disagg.graph.program import ROWS, USER_OF, Port, Program
from plait_disagg.graph.rows import PER_ROW
from plait_disagg.tables.values import Lookup

__all__ = ["Captured", "capture", "obstacles"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A module as a program.

    `constants` (by `Port` name) and `tables` (by `Lookup.table`) are the module's own tensors. `keeps_bits`: no
    operator was rewritten (`rows_first`), so that the program's results are the module's, bit for bit.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    lookups: tuple[Lookup, ...]
    inputs: tuple[Input, ...]
    keeps_bits: bool = True


def capture(module: nn.Module, inputs: Sequence[Input]) -> Captured:
    """Capture the module's `forward` (in evaluation mode, called with the tensors of `inputs` by name) as a program.

    Every input and every output has one row per candidate. Raises `UnsupportedOperator`, or ValueError for an
    invalid declaration. The module is not changed.
    """
    return _finished(_built(module, inputs, lenient=False), inputs)


def obstacles(module: nn.Module, inputs: Sequence[Input]) -> tuple[UnsupportedOperator, ...]:
    """Return everything for which `capture` would refuse the module, in the order of its operators; each once.

    What comes behind a refused operator is judged as if that kept rows apart. Raises ValueError for an invalid
    declaration.
    """
    try:
        builder = _built(module, inputs, lenient=True)
    except UnsupportedOperator as refused:  # the trace itself
        return (refused,)
    try:
        _finished(builder, inputs)
    except UnsupportedOperator as refused:
        builder.met.append(refused)
    ordered = [refused for refused in builder.refusals if refused in builder.met]
    ordered += [refused for refused in builder.met if refused not in builder.refusals]
    return tuple({str(refused): refused for refused in ordered}.values())


def _built(module: nn.Module, inputs: Sequence[Input], *, lenient: bool) -> Builder:
    check_inputs(inputs)
    if module.training:
        raise UnsupportedOperator(type(module).__name__, "it is in training mode: call module.eval() first")
    exported = export(module, inputs)
    builder = Builder(exported, inputs, lenient)
    with torch.no_grad():
        for node in exported.live_nodes():
            builder.add(node)
    return builder


def _finished(builder: Builder, inputs: Sequence[Input]) -> Captured:
    """Return the program, with its outputs named."""
    outputs = []
    for name, node in builder.exported.outputs():
        value = builder.read(node) if node is not None else None
        if not isinstance(value, Traced) or value.fact.counts != PER_ROW or not value.layout.is_plain:
            raise UnsupportedOperator("output", f"{name} does not have one row per candidate")
        outputs.append((name, value.ref))
    used = {ref for node in builder.nodes for ref in node.inputs}
    constants = {name: tensor for name, tensor in builder.constants.items() if name in used}
    user_of = Port(name=USER_OF, shape=(ROWS,), dtype="int64", rows="item")
    program = Program(
        inputs=(*builder.ports.values(), user_of),
        constants=tuple(
            Port(name=name, shape=tuple(tensor.shape), dtype=dtype_of(tensor), rows="none")
            for name, tensor in constants.items()
        ),
        nodes=tuple(builder.nodes),
        outputs=tuple(outputs),
    )
    program, constants = fold(simplify(program), constants, builder.tables)
    lookups = lookups_of(program)
    read = {lookup.table for lookup in lookups}
    return Captured(
        program=program,
        constants=constants,
        tables={name: table for name, table in builder.tables.items() if name in read},
        lookups=lookups,
        inputs=tuple(inputs),
        keeps_bits=not builder.moved,
    )
