"""What a cut is, what it costs, and which cuts are allowed. A cut is the set of nodes that run on the CN.

Raw inputs arrive at the CN; constants and `USER_OF` are available on both sides. Nothing flows back: once a value is
made on the HN, everything that reads it runs there. Tables live on the CN, but for small ones that are offered
(`small_tables.py`). Outputs leave from the HN.

    cost = sum of CN times + sum of HN times + crossing bytes / link rate

A value that crosses is paid for once, however many nodes read it. The way back of the answer costs the same for
every cut and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from plait_disagg.graph.edit import reads
from plait_disagg.graph.errors import BadCut
from plait_disagg.graph.program import Program
from plait_disagg.graph.small_tables import is_bound


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A tiled program and what its parts cost for one request of `candidates`.

    `value_bytes`: bytes of every input and node result. `cn_s`, `hn_s`: seconds of every node on either side.
    """

    program: Program
    value_bytes: Mapping[str, int]
    cn_s: Mapping[str, float]
    hn_s: Mapping[str, float]
    link_bytes_per_s: float


Cutter: TypeAlias = Callable[[CutProblem], frozenset[str]]
"""Returns the names of the nodes that run on the CN, a cut that `check_cut` accepts. Pure: the same problem has the
same answer."""


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
