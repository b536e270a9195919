"""Whether the halves of a package take what they say that they take, and need no more memory than there may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.inputs import ports_of
from plait_disagg.graph.memory import check_memory
from plait_disagg.graph.program import ROWS, USER_OF, Node, Port, Program
from plait_disagg.package.manifest import Manifest

_MIN_ROWS = 4_096
"""A batch of several requests has so many rows by default, however few one of them may have."""

_USER_OF = Port(name=USER_OF, shape=(ROWS,), dtype="int64", rows="item")


def check_cn(program: Program, manifest: Manifest, widths: Mapping[str, int]) -> None:
    """Check the CN program against the model's inputs and the row lengths of its tables. Raises `BadProgram`."""
    _check_ports(program, (*ports_of(manifest.inputs), _USER_OF))
    check_memory(program, widths=widths, users=1, candidates=_rows(manifest))


def check_hn(program: Program, cn: Program, manifest: Manifest) -> None:
    """Check the HN program against what the CN program sends. Raises `BadProgram`."""
    made: list[Port | Node] = [*cn.inputs, *cn.nodes]
    values = {value.name: value for value in made}
    crossing = [(name, values[ref.name]) for name, ref in cn.outputs]
    sent = (Port(name=name, shape=value.shape, dtype=value.dtype, rows=value.rows) for name, value in crossing)
    _check_ports(program, (*sent, _USER_OF))
    check_memory(program, widths={}, users=1, candidates=_rows(manifest))


def _rows(manifest: Manifest) -> int:
    return max(manifest.largest_candidates, _MIN_ROWS)


def _check_ports(program: Program, given: Iterable[Port]) -> None:
    known = {port.name: port for port in given}
    for port in program.inputs:
        if port != known.get(port.name):
            raise BadProgram(f"{port.name}: the program is not given the {port.dtype} {port.shape} that it reads")
