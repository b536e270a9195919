"""From one program and the names of its CN nodes to two programs and the tensors that cross between them.

Raw inputs arrive at the CN; constants and `USER_OF` are available on both sides. Nothing flows back: once a value is
made on the HN, everything that reads it runs there. Tables live on the CN, but for small ones that are offered
(`small_tables.py`). Outputs leave from the HN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plait_disagg.graph.edit import live, reads
from plait_disagg.graph.errors import BadCut
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import USER_OF, Port, Program, Ref
from plait_disagg.graph.small_tables import is_bound, placed


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


def crossing_values(program: Program, cn_nodes: frozenset[str]) -> tuple[str, ...]:
    """Return the inputs and results of `cn_nodes` that the HN reads or that are outputs, in program order."""
    needed = {ref.name for _, ref in program.outputs}
    for name, read in reads(program).items():
        if name not in cn_nodes:
            needed.update(read)
    made = [port.name for port in program.inputs] + [node.name for node in program.nodes if node.name in cn_nodes]
    return tuple(name for name in made if name in needed)


def check_cut(program: Program, cn_nodes: frozenset[str]) -> None:
    """Raise `BadCut` if a value would flow back, a lookup would run on the HN, or a name is not a node."""
    made_by = reads(program)
    unknown = cn_nodes - made_by.keys()
    if unknown:
        raise BadCut(f"{min(unknown)} is no node of the program")
    for node in program.nodes:
        if is_bound(node) and node.name not in cn_nodes:
            raise BadCut(f"{node.name} looks up in a table and must run on the CN")
        if node.name in cn_nodes:
            back = [name for name in made_by[node.name] if name in made_by and name not in cn_nodes]
            if back:
                raise BadCut(f"{node.name} on the CN reads {back[0]}, which is made on the HN")


def _port(program: Program, name: str) -> Port:
    value = program.values[name]
    return Port(name=name, shape=value.shape, dtype=value.dtype, rows=value.rows)
