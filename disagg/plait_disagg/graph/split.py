"""From one program and the names of its CN nodes to two programs and the tensors that cross between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plait_disagg.graph.cut import check_cut, crossing_values
from plait_disagg.graph.edit import live
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import USER_OF, Port, Program, Ref
from plait_disagg.graph.small_tables import placed


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The two halves of a program.

    `cn` takes the request and makes what crosses (its outputs, by the same names); `hn` takes that and `USER_OF`
    and makes the model's outputs.
    """

    cn: Program
    hn: Program


def split(program: Program, cn_nodes: Iterable[str]) -> Halves:
    """Split a program so that `cn_nodes` run on the CN and the others on the HN. Raises `BadCut` if they cannot.

    The HN's program may have rows of small tables as constants (`small_tables.placed`)."""
    chosen = frozenset(cn_nodes)
    check_cut(program, chosen)
    program = placed(program, chosen)
    chosen &= {node.name for node in program.nodes}
    crossing = tuple(_port(program, name) for name in crossing_values(program, chosen))
    users = tuple(port for port in program.inputs if port.name == USER_OF)
    cn_outputs = tuple((port.name, Ref(port.name)) for port in crossing)
    cn_side = tuple(node for node in program.nodes if node.op == SIZE or node.name in chosen)
    hn_side = tuple(node for node in program.nodes if node.op == SIZE or node.name not in chosen)
    return Halves(
        cn=live(replace(program, nodes=cn_side, outputs=cn_outputs)),
        hn=live(replace(program, inputs=(*crossing, *users), nodes=hn_side)),
    )


def _port(program: Program, name: str) -> Port:
    value = program.values[name]
    return Port(name=name, shape=value.shape, dtype=value.dtype, rows=value.rows)
