"""Running a program: it becomes an fx graph, whose generated Python code frees every value after its last use.

Lookups run in stages: all lookups whose ids are ready share one call of `Tables.lookup`, so that tables can serve
them together.

The naive counterpart (`run_reference`) runs one operator after the other. It can also be observed, which is how costs
are measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, Self, TypeAlias

import torch
from torch import fx, nn

from plait_disagg.graph.edit import resolve
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE, overload
from plait_disagg.graph.program import LOOKUP, TILE, Node, Program
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import LookupBags, LookupRequest, Tables

_FREQUENT = (
    "add.Tensor bmm.default cat.default div.Tensor layer_norm.default matmul.default mul.Tensor prelu.default "
    "relu.default reshape.default sigmoid.default softmax.int squeeze.dim stack.default sub.Tensor tanh.default "
    "transpose.int unsqueeze.default"
)
_DIRECT: Mapping[str, Callable[..., Any]] = {
    "aten.linear.default": torch._C._nn.linear,
    **{f"aten.{name}": getattr(torch, name.partition(".")[0]) for name in _FREQUENT.split()},
}
"""Direct bindings of frequent overloads: the same kernel with less overhead (calling an overload costs 2 to 4 us
more, measured, and a request with one candidate makes about twenty calls)."""

_MAKERS = ("aten.zeros.default", "aten.ones.default", "aten.full.default")


class Compiled:
    """A program that can be called, with its constants on its device.

    Not thread-safe if it has lookups (`Tables` is not). `separate_bags`: the bags that it takes as tuples, too, of each
    request's ids and of its offsets (`LookupBags`).
    """

    def __init__(
        self,
        program: Program,
        module: fx.GraphModule,
        constants: Sequence[torch.Tensor],
        separate_bags: frozenset[str] = frozenset(),
    ) -> None:
        self.program = program
        self.separate_bags = separate_bags
        self._inputs = tuple(port.name for port in program.inputs)
        self._outputs = tuple(name for name, _ in program.outputs)
        self._module = module
        self._forward = module.forward
        self._constants = tuple(constants)

    def __call__(self, tensors: Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        """Return the outputs by name. `tensors`: all inputs of the program by name, on its device. Raises `BadId`."""
        with torch.inference_mode():
            made = self._forward(*[tensors[name] for name in self._inputs], *self._constants)
        return dict(zip(self._outputs, made, strict=True))

    @property
    def constant_bytes(self) -> int:
        """The bytes of its constants."""
        return sum(constant.nbytes for constant in self._constants)

    def constant(self, name: str) -> torch.Tensor:
        """Return one of its constants."""
        names = [port.name for port in self.program.constants]
        return self._constants[names.index(name)]

    def as_module(self) -> nn.Module:
        """Return a module over its inputs, in their order, that returns a tuple of its outputs. It shares the
        constants."""
        return _Standalone(self._module, self._constants)

    def with_constants(self, constants: Mapping[str, torch.Tensor]) -> Self:
        """Return the same program with those of `constants` that it reads in place of its own; this one is unchanged.

        Raises `BadProgram` if one does not fit.
        """
        held = [
            _checked(port.name, port.shape, port.dtype, constants).to(old.device) if port.name in constants else old
            for port, old in zip(self.program.constants, self._constants, strict=True)
        ]
        made = copy.copy(self)
        made._constants = tuple(held)
        return made


def compile_program(
    program: Program,
    constants: Mapping[str, torch.Tensor],
    tables: Tables | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Compiled:
    """Compile a program whose lookups `tables` serve. Raises `BadProgram` if a constant is missing or does not fit."""
    held = [_checked(port.name, port.shape, port.dtype, constants).to(device) for port in program.constants]
    root = nn.Module()
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for index, port in enumerate((*program.inputs, *program.constants)):
        values[port.name] = graph.placeholder(f"v{index}")
    for number, (plain, lookups) in enumerate(stages(program)):
        for node in plain:
            values[node.name] = _add(graph, node, values, str(device))
        if lookups:
            if tables is None:
                raise BadProgram(f"{lookups[0].name} looks up in a table, and there are no tables here")
            root.add_module(f"stage{number}", _Stage(lookups, tables))
            asked = tuple(part for node in lookups for part in resolve(node.args, values))
            made = graph.call_module(f"stage{number}", asked)
            for index, node in enumerate(lookups):
                values[node.name] = graph.call_function(getitem, (made, index))
    graph.output(tuple(values[ref.name] for _, ref in program.outputs))
    bags = _looked_up_only(program) if isinstance(tables, FusedTables) else frozenset()
    return Compiled(program, fx.GraphModule(root, graph), held, bags)


def _looked_up_only(program: Program) -> frozenset[str]:
    """Return the bags, without weights, whose ids and offsets go into pooled lookups and nowhere else."""
    ports = {port.name for port in program.inputs}
    bags = {(name, name + OFFSETS) for name in ports if name + OFFSETS in ports}
    elsewhere = {ref.name for _, ref in program.outputs}
    for node in program.nodes:
        if node.op != LOOKUP or node.kwargs["mode"] == "rows" or node.inputs not in bags:
            elsewhere.update(node.inputs)
    return frozenset(name for name, offsets in bags if elsewhere.isdisjoint((name, offsets)))


def stages(program: Program) -> list[tuple[list[Node], list[Node]]]:
    """Return for each stage the operators that can run before its lookups, and the lookups that can then run."""
    level = dict.fromkeys((port.name for port in (*program.inputs, *program.constants)), 0)
    found: dict[int, tuple[list[Node], list[Node]]] = {}
    for node in program.nodes:
        at = max((level[name] for name in node.inputs), default=0)
        is_lookup = node.op == LOOKUP
        level[node.name] = at + 1 if is_lookup else at
        found.setdefault(at, ([], []))[1 if is_lookup else 0].append(node)
    return [found[at] for at in sorted(found)]


def tile_rows(x: torch.Tensor, user_of: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Expand (users, ...) to (candidates, ...): row `user_of[c]` for candidate c.

    A single user's row is copied only if `copy` is set.
    """
    if x.shape[0] == 1 and not copy:
        return x.expand(user_of.shape[0], *x.shape[1:])
    return x.index_select(0, user_of)


class _Standalone(nn.Module):
    """A program's module with its constants as buffers."""

    def __init__(self, module: fx.GraphModule, constants: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._compute = module.forward  # no submodule: tracing would name its constants after it
        for index, constant in enumerate(constants):
            self.register_buffer(f"c{index}", constant, persistent=False)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._compute(*inputs, *self._buffers.values()))


class _Stage(nn.Module):
    """One call of `Tables.lookup`."""

    def __init__(self, nodes: Sequence[Node], tables: Tables) -> None:
        super().__init__()
        self._lookups: list[Mapping[str, Any]] = [node.kwargs for node in nodes]
        self._tables = tables

    def forward(self, *asked: torch.Tensor | tuple[torch.Tensor, ...] | None) -> list[torch.Tensor]:
        """Run the stage's lookups. `asked`: ids, offsets and weights of each lookup in turn."""
        requests, bags = [], []
        for index, of in enumerate(self._lookups):
            ids, offsets, weights = asked[3 * index : 3 * index + 3]
            if isinstance(ids, tuple) and isinstance(offsets, tuple):
                bags.append(LookupBags(table=of["table"], mode=of["mode"], ids=ids, offsets=offsets))
                continue
            requests.append(lookup_request(of, ids, offsets, weights))
        if not bags:
            return self._tables.lookup(requests)
        assert isinstance(self._tables, FusedTables)
        pooled = iter(self._tables.lookup_bags(bags))
        others = iter(self._tables.lookup(requests) if requests else ())
        are_bags = [isinstance(ids, tuple) for ids in asked[::3]]
        return [next(pooled if is_bag else others) for is_bag in are_bags]


def lookup_request(of: Mapping[str, Any], ids: Any, offsets: Any, weights: Any) -> LookupRequest:
    """Return the request of a lookup's arguments, `of` being the named ones: where rows are pooled, ids in equal rows
    are bags, too."""
    if of["mode"] != "rows" and offsets is None:
        offsets = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
        ids, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1)
    return LookupRequest(table=of["table"], mode=of["mode"], ids=ids, offsets=offsets, weights=weights)


def _row_count(x: torch.Tensor, dim: int) -> int:
    return x.shape[dim]


def _add(graph: fx.Graph, node: Node, values: Mapping[str, fx.Node], device: str) -> fx.Node:
    args, kwargs = resolve(node.args, values), resolve(dict(node.kwargs), values)
    if node.op == TILE:
        return graph.call_function(tile_rows, args, kwargs)
    if node.op == SIZE:
        return graph.call_function(_row_count, args)
    if node.op in _MAKERS:
        kwargs["device"] = device
    return graph.call_function(_DIRECT.get(node.op) or overload(node.op), args, kwargs)


def _checked(name: str, shape: tuple[int, ...], dtype: str, constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = constants.get(name)
    if found is None:
        raise BadProgram(f"constant {name} is missing")
    if tuple(found.shape) != shape or str(found.dtype) != f"torch.{dtype}":
        raise BadProgram(f"constant {name} is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}")
    return found.detach()


Watch: TypeAlias = "Callable[[Node, Callable[[], Any]], Any]"
"""Receives a node and the function that computes it; returns the node's value."""


def run_reference(
    program: Program,
    constants: Mapping[str, torch.Tensor],
    tables: Tables | None,
    tensors: Mapping[str, torch.Tensor],
    watch: Watch = lambda _, compute: compute(),
) -> dict[str, torch.Tensor]:
    """Return every value of the program by name, inputs and numbers included. `tensors`: its inputs."""
    values: dict[str, Any] = {name: tensors[name] for name in (port.name for port in program.inputs)}
    values |= {port.name: constants[port.name].detach() for port in program.constants}
    with torch.inference_mode():
        for node in program.nodes:
            args, kwargs = resolve(node.args, values), resolve(dict(node.kwargs), values)
            values[node.name] = watch(node, _computation(node, args, kwargs, tables))
    return values


def _computation(node: Node, args: Any, kwargs: dict[str, Any], tables: Tables | None) -> Callable[[], Any]:
    if node.op == LOOKUP:
        assert tables is not None
        return lambda: tables.lookup([lookup_request(kwargs, *args)])[0]
    if node.op == TILE:
        return lambda: args[0][args[1]]
    if node.op == SIZE:
        return lambda: args[0].shape[0]
    operator = overload(node.op)
    return lambda: operator(*args, **kwargs)
