"""The one place that calls `torch.export` and reads its trace, in which every operator knows its line in the model."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from plait_disagg.graph.capture.decomposed import decomposed
from plait_disagg.graph.capture.draft import RowsLayout
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, named_outputs, tensor_names
from plait_disagg.graph.program import ROWS

_ROWS = 41
"""The number of rows of the traced example. The trace keeps sizes symbolic; a prime that is no model's width makes
it obvious if one was fixed."""

_TORCH = str(Path(torch.__file__).parent)
_BATCH_FIRST = "give it batch_first=True: its rows are taken for tokens"
_INSTEAD = dict.fromkeys(("MultiheadAttention", "TransformerEncoderLayer", "GRU", "LSTM", "RNN"), _BATCH_FIRST)
"""What to write in place of a layer of torch that cannot be served."""


def export(module: nn.Module, inputs: Sequence[Input]) -> Exported:
    """Trace `module`.

    In: a module, and the inputs that it declares. Out: the operators of its `forward`, in which sizes are numbers or
    symbols, as far as possible those that a program holds (`decomposed`).
    Raises `UnsupportedOperator` if it cannot be traced or fixes its number of rows.
    """
    tensors = example_tensors(inputs, rows=_ROWS)
    _check_signature(module, inputs)
    shapes = {name: {0: Dim.AUTO} for name in tensors}
    try:
        with torch.no_grad(), _no_fast_path():
            traced = torch.export.export(_ByName(module), (dict(tensors),), dynamic_shapes=(shapes,), strict=False)
        program = decomposed(traced)
    except Exception as error:  # whatever the tracer or the module itself says
        raise UnsupportedOperator(
            "torch.export", f"cannot trace {type(module).__name__}.forward: {_said(error)}", _raised_at(error)
        ) from error
    return Exported(program, inputs, tensors)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Let nn.MultiheadAttention and nn.TransformerEncoder be traced as single operators instead of one fused one."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _AuthorsLines(TorchFunctionMode):
    """Lets every operator of the trace know its line in the model: torch keeps only frames of functions `forward`."""

    def __torch_function__(self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
            frame = frame.f_back
        is_own = frame is None or frame.f_code.co_filename == __file__
        set_stack_trace([] if frame is None or is_own else [_line_of(frame)])
        return func(*args, **(kwargs or {}))


def _line_of(frame: FrameType) -> str:
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{number}: {linecache.getline(path, number).strip()}"


def source_line(node: fx.Node) -> str:
    """Return `file:line: code` of the model's author, or an empty string if the trace does not know it."""
    return node.stack_trace or ""


def block_line(node: fx.Node) -> str:
    """Return the first `source_line` of the block of operators that a `with` has put into a graph of its own."""
    block = cast("fx.GraphModule", getattr(node.graph.owning_module, str(node.target)))
    return next(filter(None, map(source_line, block.graph.nodes)), "")


def module_hint(node: fx.Node) -> str:
    """Return what to use instead of a torch layer that cannot be served, if the operator is inside one."""
    for _, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
        name = str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
        if name in _INSTEAD:
            return f" (inside nn.{name}: {_INSTEAD[name]})"
    return ""


class _ByName(nn.Module):
    """A wrapper that takes one dict, so that any forward can be traced, including one with `**ids`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensors: dict[str, torch.Tensor]) -> Any:
        with preserve_node_meta(), _AuthorsLines():
            return self.module(**tensors)


class Exported:
    """A trace. Sizes in it are numbers or symbols; which symbols count rows is derived from the inputs."""

    def __init__(self, program: ExportedProgram, inputs: Sequence[Input], tensors: Mapping[str, torch.Tensor]) -> None:
        """Read a trace that was made with `tensors`. Raises `UnsupportedOperator` if it holds for one number of rows
        only."""
        self._program = program
        self._specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        names = program.graph_signature.user_inputs
        self.inputs: dict[str, str] = dict(zip(names, _names_in_order(program, tensors), strict=True))
        fronts: dict[str, Any] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in self.inputs:
                name, front = self.inputs[node.name], node.meta["val"].shape[0]
                if not isinstance(front, torch.SymInt):
                    raise UnsupportedOperator("forward", f"it works only with {front} in the first dimension of {name}")
                fronts[name] = front
        bags = [item for item in inputs if isinstance(item, Bag)]
        self._counts = {str(fronts[name]) for name in tensor_names(bags)}
        self._row_symbols: list[torch.SymInt] = [
            fronts[item.name + OFFSETS] - 1 if isinstance(item, Bag) else fronts[item.name] for item in inputs
        ]
        self._row_counts = {str(symbol) for symbol in self._row_symbols}

    def live_nodes(self) -> Iterator[fx.Node]:
        """Return the nodes that the outputs need, in order."""
        nodes = list(self._program.graph.nodes)
        live: set[fx.Node] = {node for node in nodes if node.op in ("output", "placeholder")}
        for node in reversed(nodes):
            if node in live:
                live.update(node.all_input_nodes)
        return (node for node in nodes if node in live)

    def constant(self, node: fx.Node) -> tuple[str, torch.Tensor] | None:
        """Return the name and tensor of a parameter, buffer or constant, or None for an input."""
        spec = self._specs[node.name]
        if spec.kind == InputKind.USER_INPUT:
            return None
        name = spec.target or ""  # empty for what orders checks that a decomposition adds
        found = self._program.state_dict.get(name, self._program.constants.get(name))
        if not isinstance(found, torch.Tensor):
            raise UnsupportedOperator(node.name, f"{spec.kind} is not a tensor")
        return name.removeprefix("module."), found.detach()

    def outputs(self) -> dict[str, fx.Node | None]:
        """Return the outputs by public name."""
        spec = self._program.call_spec.out_spec
        made = self._program.graph.output_node().args[0]
        assert isinstance(made, tuple | list)
        assert spec is not None
        tree = _pytree.tree_unflatten(list(made)[-spec.num_leaves :], spec)  # before them, what orders checks
        named = named_outputs(tree)
        if any(value is not None and not isinstance(value, fx.Node) for value in named.values()):
            raise UnsupportedOperator("output", "forward must return a tensor, a tuple of tensors or a dict of tensors")
        return named

    def is_row_count(self, number: Any) -> bool:
        """Return whether a symbolic number is the number of rows."""
        return str(number) in self._row_counts

    def layout(self, node: fx.Node, op: str) -> tuple[RowsLayout, int] | None:
        """Return the traced shape of a node's result and how many numbers its dimension of rows has for each row.

        None if no dimension or more than one varies with the number of rows alone.
        """
        made = _tensor_of(node, op)
        varying = [dim for dim, size in enumerate(made.shape) if isinstance(size, torch.SymInt)]
        factor = self._rows_in(cast(torch.SymInt, made.shape[varying[0]])) if len(varying) == 1 else None
        if factor is None:
            return None
        at = varying[0]
        return RowsLayout(tuple(ROWS if dim == at else int(size) for dim, size in enumerate(made.shape)), at), factor

    def _rows_in(self, size: torch.SymInt) -> int | None:
        """Return how many times the number of rows a size is, if that is a number."""
        for front in self._row_symbols:
            ratio = (size.node.expr / front.node.expr).simplify()
            if ratio.is_Integer and ratio > 0:
                return int(ratio)
        return None

    def shape(self, node: fx.Node, op: str) -> tuple[int, ...]:
        """Return the shape of a node's result, with `ROWS` where it counts rows or a bag's ids or offsets."""
        return tuple(self._size(size, op) for size in _tensor_of(node, op).shape)

    def _size(self, size: Any, op: str) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        if str(size) in self._row_counts or str(size) in self._counts:
            return ROWS
        if len(self._counts & {str(symbol) for symbol in size.node.expr.free_symbols}) > 1:
            how = "look each up by itself (a KeyedJaggedTensor takes its parts by key, in jt_dict)"
            raise UnsupportedOperator(op, f"it joins bags, whose sizes are the request's: {how}")
        raise UnsupportedOperator(op, f"its result has a size {size}: rows must stay the first dimension by themselves")


def _tensor_of(node: fx.Node, op: str) -> torch.Tensor:
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor):
        raise UnsupportedOperator(op, "it makes something else than one tensor")
    return made


def example_tensors(inputs: Sequence[Input], *, rows: int) -> dict[str, torch.Tensor]:
    """Return zeros of the declared shapes; bags differ in size, so that no two sizes are equal by accident."""
    tensors: dict[str, torch.Tensor] = {}
    for index, item in enumerate(inputs):
        if isinstance(item, Bag):
            count = 2 * rows + 2 * index + 1
            tensors[item.name] = torch.zeros(count, dtype=torch.int64)
            tensors[item.name + OFFSETS] = torch.arange(rows + 1).clamp(max=count)
            if item.weighted:
                tensors[item.name + WEIGHTS] = torch.ones(count)
        else:
            dtype = torch.float32 if isinstance(item, Dense) else torch.int64
            tensors[item.name] = torch.zeros((rows, *item.shape), dtype=dtype)
    assert tuple(tensors) == tensor_names(inputs)
    return tensors


def _names_in_order(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the declared names in the order of the trace's inputs."""
    spec = program.call_spec.in_spec
    assert spec is not None
    (places,), _ = _pytree.tree_unflatten(list(range(len(tensors))), spec)
    return sorted(places, key=lambda name: int(places[name]))


def _check_signature(module: nn.Module, inputs: Sequence[Input]) -> None:
    """Raise `UnsupportedOperator`, naming the input, if `forward` does not take exactly the declared tensors."""
    parameters = inspect.signature(module.forward).parameters.values()
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    takes = ", ".join(one.name for one in parameters if one.kind is not one.VAR_KEYWORD) or "nothing"
    where = f"forward of {type(module).__name__}"
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    for item in () if takes_any else inputs:
        for name in tensor_names((item,)):
            if name not in named:
                part = f"{name!r}, the {name.removeprefix(item.name + '_')} of the bag {item.name!r}"
                what = f"the input {name!r}" if name == item.name else part
                raise UnsupportedOperator("forward", f"{where} has no parameter for {what}; it takes {takes}")
    given = tensor_names(inputs)
    for name, one in named.items():
        if one.default is one.empty and name not in given:
            raise UnsupportedOperator("forward", f"{where} takes {name!r}, and no input of that name is declared")


def _said(error: Exception) -> str:
    """Return what a failed trace says, for the author of the model."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | IndexError | AttributeError | TypeError):  # whose texts alone say little
        text = f"{type(error).__name__}: {text}"
    if "FakeTensor" in text and any(
        frame.filename.endswith("modules/rnn.py") for frame in traceback.extract_tb(error.__traceback__)
    ):
        return "it packs a history by its length: run the layer over all steps and read the one at length - 1"
    if "data-dependent" in text.lower():
        why = "it decides by the data of all rows (as `if x.any():` does)"
        return f"{why}; compute both ways and choose for each row with torch.where. torch says: {text[:200]}"
    return text[:600]


def _raised_at(error: BaseException) -> str:
    frame, found = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(_TORCH) and name != __file__ and not name.startswith("<"):
            found = f"{name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found
