"""Whether the halves of a package take what they say that they take, and need no more memory than there may be.

What a program allocates is found without allocating it: its operators run on tensors that have shapes and no data. A
stored program is untrusted, and a few words of it (`aten.ones([2**36])`) may ask for more memory than there is. The
sizes that it declares prove nothing, so every operator is asked for the shape of its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait_disagg.graph.edit import flat_values, resolve
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.inputs import OFFSETS, ports_of
from plait_disagg.graph.operators import SIZE, overload, schema_of
from plait_disagg.graph.program import LOOKUP, ROWS, TILE, USER_OF, Node, Port, Program, Ref
from plait_disagg.package.manifest import Manifest

MAX_BYTES = 16 << 30
"""Of everything that one request keeps at the same time: a hundred times what models of today keep for 10,000 rows."""

_ONE_HOT = "aten.one_hot.default"

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
    """Run the program on shapes; every value is kept until its last reader has run, as `Compiled` does."""
    last_reader = {name: index for index, node in enumerate(program.nodes) for name in node.inputs}
    last_reader |= {ref.name: len(program.nodes) for _, ref in program.outputs}
    held: dict[str, int] = {}
    held_bytes = 0
    with torch.no_grad(), _Allocations() as allocations:
        values = _ports(program, users, candidates)
        for index, node in enumerate(program.nodes):
            allocations.bytes = 0
            values[node.name] = made = _result(node, values, widths)
            if held_bytes + allocations.bytes > max_bytes:
                needed = (held_bytes + allocations.bytes) / 2**30
                raise BadProgram(
                    f"{node.name}: a request of {candidates} candidates would need {needed:,.0f} GiB here, more than "
                    f"{max_bytes / 2**30:,.0f} GiB"
                )
            if isinstance(made, torch.Tensor):
                _check_declared(node, made)
                held[node.name] = _bytes_of(made)
                held_bytes += held[node.name]
            for name in (node.name, *node.inputs):
                if last_reader.get(name, index) <= index and name in held:
                    held_bytes -= held.pop(name)
                    values.pop(name)


def _ports(program: Program, users: int, candidates: int) -> dict[str, Any]:
    flat = flat_values(program)
    offsets = {name + OFFSETS for name in flat}
    values: dict[str, Any] = {}
    for port in (*program.inputs, *program.constants):
        rows = users if port.rows == "user" else candidates
        count = rows + 1 if port.name in offsets else rows
        values[port.name] = _empty(port, tuple(count if size == ROWS else size for size in port.shape))
    return values


def _empty(port: Port, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=getattr(torch, port.dtype), device="meta")
    except (RuntimeError, OverflowError) as error:
        raise BadProgram(f"{port.name}: no tensor has the shape {shape}") from error


def _result(node: Node, values: Mapping[str, Any], widths: Mapping[str, int]) -> Any:
    """Return the node's result without its data. Raises `BadProgram` if the operator refuses its operands."""
    args = resolve(node.args, values)
    kwargs = {key: resolve(value, values) for key, value in node.kwargs.items()}
    try:
        if node.op == SIZE:
            return args[0].shape[0]
        if node.op == LOOKUP:
            return _looked_up(node, args, widths)
        if node.op == TILE:
            return args[0].new_empty((args[1].shape[0], *args[0].shape[1:]))
        if node.op == _ONE_HOT:  # it looks at its data, and there are none
            return args[0].new_empty((*args[0].shape, args[1]))
        if any(argument.name == "device" for argument in schema_of(node.op).arguments):
            kwargs["device"] = "meta"
        return overload(node.op)(*args, **kwargs)
    except BadProgram:
        raise
    except Exception as error:  # operators refuse with whatever fits them
        raise BadProgram(f"{node.name}: {node.op} does not run: {str(error)[:200]}") from error


def _looked_up(node: Node, args: tuple[Any, ...], widths: Mapping[str, int]) -> torch.Tensor:
    ids, offsets, _ = args
    table = str(node.kwargs["table"])
    if table not in widths:
        raise BadProgram(f"{node.name}: there is no table {table[:60]!r}")
    if node.kwargs["mode"] == "rows":
        shape = (*ids.shape, widths[table])
    else:
        shape = (ids.shape[0] if offsets is None else offsets.shape[0] - 1, widths[table])
    return torch.empty(shape, dtype=torch.float32, device="meta")


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


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all results, those in between included: `einsum` makes larger ones than it returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(_bytes_of(each) for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        return made
