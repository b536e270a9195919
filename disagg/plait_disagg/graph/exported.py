"""The one place that calls `torch.export` and reads its trace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree

from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS, Bag, Dense, Input, tensor_names
from plait_disagg.graph.program import ROWS

__all__ = ["Exported", "example_tensors", "export", "module_hint", "source_line"]

_ROWS = 41
"""The number of rows of the traced example. The trace keeps sizes symbolic; a prime that is no model's width makes
it obvious if one was fixed."""

_ATTENTION = "it swaps rows and tokens; use scaled_dot_product_attention on (rows, heads, tokens, features)"
_RECURRENT = "recurrent layers are not served; attention or pooling over the history is"
_INSTEAD: Mapping[str, str] = {
    "MultiheadAttention": _ATTENTION,
    "TransformerEncoderLayer": _ATTENTION,
    "GRU": _RECURRENT,
    "LSTM": _RECURRENT,
    "RNN": _RECURRENT,
}

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n?([^\n]*)')
_TORCH = str(Path(torch.__file__).parent)


def export(module: nn.Module, inputs: Sequence[Input]) -> Exported:
    """Trace `module`. Raises `UnsupportedOperator` if it cannot be traced or fixes its number of rows."""
    tensors = example_tensors(inputs, rows=_ROWS)
    shapes = {name: {0: Dim.AUTO} for name in tensors}
    try:
        with torch.no_grad():
            program = torch.export.export(_ByName(module), (dict(tensors),), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever the tracer or the module itself says
        text = " ".join(str(error).split())[:600]
        raise UnsupportedOperator(
            "torch.export", f"cannot trace {type(module).__name__}.forward: {text}", _raised_at(error)
        ) from error
    exported = Exported(program, tensors)
    exported.check_rows(inputs)
    return exported


class _ByName(nn.Module):
    """A wrapper that takes one dict, so that any forward can be traced, including one with `**ids`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensors: dict[str, torch.Tensor]) -> Any:
        return self.module(**tensors)


class Exported:
    """A trace. Sizes in it are numbers or symbols; which symbols count rows is derived from the inputs."""

    def __init__(self, program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> None:
        self._program = program
        self._specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._tensors = tensors
        names = program.graph_signature.user_inputs
        self._inputs = dict(zip(names, _names_in_order(program, tensors), strict=True))
        self._fronts: dict[str, Any] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in self._inputs:
                self._fronts[self._inputs[node.name]] = node.meta["val"].shape[0]
        self._row_counts: set[str] = set()
        self._counts: set[str] = set()

    def check_rows(self, inputs: Sequence[Input]) -> None:
        """Find out which symbols count what. Raises `UnsupportedOperator` if the trace holds for one number of rows
        only."""
        for name, front in self._fronts.items():
            if not isinstance(front, torch.SymInt):
                raise UnsupportedOperator("forward", f"it works only with {front} in the first dimension of {name}")
        for item in inputs:
            if isinstance(item, Bag):
                self._counts |= {str(self._fronts[item.name]), str(self._fronts[item.name + OFFSETS])}
                self._row_counts.add(str(self._fronts[item.name + OFFSETS] - 1))
            else:
                self._row_counts.add(str(self._fronts[item.name]))

    def live_nodes(self) -> Iterator[fx.Node]:
        """Return the nodes that the outputs need, in order.

        Raises `UnsupportedOperator` for an in-place change that another reader can see.
        """
        nodes = list(self._program.graph.nodes)
        live: set[fx.Node] = {node for node in nodes if node.op in ("output", "placeholder")}
        for node in reversed(nodes):
            if node in live:
                live.update(node.all_input_nodes)
            else:
                _check_unseen(node)
        return (node for node in nodes if node in live)

    def constant(self, node: fx.Node) -> tuple[str, torch.Tensor] | None:
        """Return the name and tensor of a parameter, buffer or constant, or None for an input."""
        spec = self._specs[node.name]
        if spec.kind == InputKind.USER_INPUT or spec.target is None:
            return None
        found = self._program.state_dict.get(spec.target, self._program.constants.get(spec.target))
        if not isinstance(found, torch.Tensor):
            raise UnsupportedOperator(node.name, f"{spec.kind} is not a tensor")
        return spec.target.removeprefix("module."), found.detach()

    def input_name(self, node: fx.Node) -> str:
        """Return the input's name in the declaration."""
        return str(self._inputs[node.name])

    def outputs(self) -> list[tuple[str, fx.Node | None]]:
        """Return the outputs by public name: the keys of a dict; score for a single tensor; score_0, score_1, ... for a
        tuple."""
        spec = self._program.call_spec.out_spec
        made = self._program.graph.output_node().args[0]
        assert isinstance(made, tuple | list)
        assert spec is not None
        tree = _pytree.tree_unflatten(list(made), spec)
        if isinstance(tree, fx.Node):
            return [("score", tree)]
        if isinstance(tree, Mapping):
            named = [(str(key), value) for key, value in tree.items()]
        elif isinstance(tree, tuple | list):
            named = [(f"score_{index}", value) for index, value in enumerate(tree)]
        else:
            named = [("score", None)]
        if any(value is not None and not isinstance(value, fx.Node) for _, value in named):
            raise UnsupportedOperator("output", "forward must return a tensor, a tuple of tensors or a dict of tensors")
        return named

    def is_row_count(self, number: Any) -> bool:
        """Return whether a symbolic number is the number of rows."""
        return str(number) in self._row_counts

    def shape(self, node: fx.Node, op: str, where: str) -> tuple[int, ...]:
        """Return the shape of a node's result, with `ROWS` where it counts rows or a bag's ids or offsets."""
        made = node.meta.get("val")
        if not isinstance(made, torch.Tensor):
            raise UnsupportedOperator(op, "it makes something else than one tensor", where)
        return tuple(self._size(size, op, where) for size in made.shape)

    def _size(self, size: Any, op: str, where: str) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        if str(size) in self._row_counts or str(size) in self._counts:
            return ROWS
        raise UnsupportedOperator(
            op, f"its result has a size {size}: rows must stay the first dimension by themselves", where
        )


def example_tensors(inputs: Sequence[Input], *, rows: int) -> dict[str, torch.Tensor]:
    """Return zeros of the declared shapes; bags differ in size, so that no two sizes are equal by accident."""
    tensors: dict[str, torch.Tensor] = {}
    for index, item in enumerate(inputs):
        if isinstance(item, Bag):
            count = 2 * rows + 2 * index + 1
            tensors[item.name] = torch.zeros(count, dtype=torch.int64)
            tensors[item.name + OFFSETS] = torch.arange(rows + 1).clamp(max=count)
        else:
            dtype = torch.float32 if isinstance(item, Dense) else torch.int64
            tensors[item.name] = torch.zeros((rows, *item.shape), dtype=dtype)
    assert tuple(tensors) == tensor_names(inputs)
    return tensors


def source_line(node: fx.Node) -> str:
    """Return `file:line: code` of the model's author, or an empty string if the trace does not know it."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return f"{own[-1][0]}:{own[-1][1]}: {own[-1][2].strip()}" if own else ""


def module_hint(node: fx.Node) -> str:
    """Return what to use instead of a torch layer that cannot be served, if the operator is inside one."""
    for _, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
        name = str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
        if name in _INSTEAD:
            return f" (inside nn.{name}: {_INSTEAD[name]})"
    return ""


def _names_in_order(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the declared names in the order of the trace's inputs."""
    spec = program.call_spec.in_spec
    assert spec is not None
    (places,), _ = _pytree.tree_unflatten(list(range(len(tensors))), spec)
    return sorted(places, key=lambda name: int(places[name]))


def _check_unseen(node: fx.Node) -> None:
    """Reject a dead operator that changes a value which others read; its effect would be lost."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for read in node.all_input_nodes:
        if len(read.users) > 1:
            raise UnsupportedOperator(
                str(node.target), "it changes a value in place that is read elsewhere", source_line(node)
            )


def _raised_at(error: BaseException) -> str:
    frame, found = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(_TORCH) and name != __file__ and not name.startswith("<"):
            found = f"{name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found
