"""Whether the halves of a package take what they say that they take, and need no more memory than there may be.

What a program allocates is found without allocating it: its operators run on tensors that have shapes and no data. A
stored program is untrusted, and a few words of it (`aten.ones([2**36])`) may ask for more memory than there is. The
sizes that it declares prove nothing, so every operator is asked for the shape of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait_disagg.graph.edit import flat_values
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.inputs import OFFSETS, ports_of
from plait_disagg.graph.operators import SIZE
from plait_disagg.graph.program import ROWS, USER_OF, Node, Port, Program, Ref
from plait_disagg.package.manifest import Manifest
from plait_disagg.tables.protocols import LookupRequest

MAX_BYTES = 16 << 30
"""Of everything that one request keeps at the same time: a hundred times what models of today keep for 10,000 rows."""

_MIN_ROWS = 4_096
"""A batch of several requests has so many rows by default, however few one of them may have."""

_USER_OF = Port(name=USER_OF, shape=(ROWS,), dtype="int64", rows="item")


def check_cn(program: Program, manifest: Manifest, widths: Mapping[str, int]) -> None:
    """Check the CN program against the model's inputs and the row lengths of its tables. Raises `BadProgram`."""
    _check_ports(program, (*ports_of(manifest.inputs), _USER_OF))
    check_memory(program, widths=widths, users=1, candidates=_rows(manifest))


def check_hn(program: Program, cn: Program, manifest: Manifest) -> None:
    """Check the HN program against what the CN program sends. Raises `BadProgram`."""
    crossing = [(name, cn.values[ref.name]) for name, ref in cn.outputs]
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


def check_memory(
    program: Program, *, widths: Mapping[str, int], users: int, candidates: int, max_bytes: int = MAX_BYTES
) -> None:
    """Raise `BadProgram` if a request of that size could need more than `max_bytes`, or if a value has another shape
    or dtype than it declares.

    `widths`: the row length of each table. Sizes that depend on the request are numbers of rows or products with them,
    so that between one row and the largest request nothing is larger than at both ends.
    """
    _check_numbers(program)
    for user_rows, item_rows in ((1, 1), (users, candidates)):
        _run(program, widths, user_rows, item_rows, max_bytes)


def _check_numbers(program: Program) -> None:
    """Check that numbers of rows are used as sizes only, never as an index, a bound or an operand."""
    numbers = {node.name for node in program.nodes if node.op == SIZE}
    for node in program.nodes:
        if node.op == SIZE and node.args[1:] != (0,):
            raise BadProgram(f"{node.name}: {SIZE} counts rows, which are the first dimension")
        for argument in (*node.args, *node.kwargs.values()):
            if isinstance(argument, Ref) and argument.name in numbers:
                raise BadProgram(f"{node.name}: it uses the number of rows as a number")


def _run(program: Program, widths: Mapping[str, int], users: int, candidates: int, max_bytes: int) -> None:
    """Run the program on shapes; every value counts until its last reader has run, as `Compiled` keeps it."""
    last_reader = {name: index for index, node in enumerate(program.nodes) for name in node.inputs}
    last_reader |= {ref.name: len(program.nodes) for _, ref in program.outputs}
    places = {node.name: index for index, node in enumerate(program.nodes)}
    held: dict[str, int] = {}
    held_bytes = 0

    def watch(node: Node, compute: Callable[[], Any]) -> Any:
        nonlocal held_bytes
        allocations.bytes = 0
        try:
            made = compute()
        except BadProgram:
            raise
        except Exception as error:  # operators refuse with whatever fits them
            raise BadProgram(f"{node.name}: {node.op} does not run: {str(error)[:200]}") from error
        needed = (held_bytes + allocations.bytes) / 2**30
        if needed > max_bytes / 2**30:
            raise BadProgram(
                f"{node.name}: a request of {candidates} candidates would need {needed:,.0f} GiB here, more than "
                f"{max_bytes / 2**30:,.0f} GiB"
            )
        if isinstance(made, torch.Tensor):
            _check_declared(node, made)
            held[node.name] = made.nbytes
            held_bytes += made.nbytes
        for name in (node.name, *node.inputs):
            if last_reader.get(name, 0) <= places[node.name]:
                held_bytes -= held.pop(name, 0)
        return made

    given = _ports(program, users, candidates)
    with _Allocations() as allocations:
        run_reference(program, given, _Shapes(widths), given, watch)


def _ports(program: Program, users: int, candidates: int) -> dict[str, torch.Tensor]:
    flat = flat_values(program)
    offsets = {name + OFFSETS for name in flat}
    values: dict[str, torch.Tensor] = {}
    for port in (*program.inputs, *program.constants):
        rows = users if port.rows == "user" else candidates
        count = rows + 1 if port.name in offsets else rows
        shape = tuple(count if size == ROWS else size for size in port.shape)
        try:
            values[port.name] = torch.empty(shape, dtype=getattr(torch, port.dtype), device="meta")
        except (RuntimeError, OverflowError) as error:
            raise BadProgram(f"{port.name}: no tensor has the shape {shape}") from error
    return values


class _Shapes:
    """The `Tables` of rows without data. `widths`: the row length of each table."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths = widths

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Return the rows' shapes. Raises `BadProgram` for a table that is not there."""
        made = []
        for request in requests:
            if request.table not in self._widths:
                raise BadProgram(f"there is no table {request.table[:60]!r}")
            rows = request.ids.shape if request.offsets is None else (len(request.offsets) - 1,)
            made.append(torch.empty(*rows, self._widths[request.table], device="meta"))
        return made


def _check_declared(node: Node, made: torch.Tensor) -> None:
    is_so = made.ndim == len(node.shape) and all(
        size == declared or (declared == ROWS and place == 0)
        for place, (size, declared) in enumerate(zip(made.shape, node.shape, strict=True))
    )
    if not is_so or made.dtype is not getattr(torch, node.dtype):
        raise BadProgram(
            f"{node.name}: {node.op} makes {made.dtype} {tuple(made.shape)}, which is not the {node.dtype} "
            f"{node.shape} that it declares"
        )


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has nothing allocated, and counts the bytes of all results, those in between included: `einsum` makes larger ones
    than it returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if any(one.name == "device" for one in func._schema.arguments) else {}
        made = func(*args, **{**(kwargs or {}), **device})
        if not func.is_view:
            self.bytes += sum(each.nbytes for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        return made
