"""Small rewrites on the way from a trace to a program: arguments by name, functional equivalents, parts of a split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait_disagg.graph.capture.source_lines import source_line
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.operators import VOCABULARY, overload
from plait_disagg.graph.program import ROWS, Arg, DType
from plait_disagg.graph.rows import DROPS

ATEN_LONGEST = 2**62
"""From here on the end of a slice means: to the end."""

_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that specify where and how a tensor is stored; a program runs wherever its constants are."""

_KEEPS_ROWS = frozenset(
    {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default"}
)

_DATA_SIZE = "the size of its result depends on the data; multiply by a mask, or choose with torch.where"
_NUMBER = "it makes a number of the data; keep it a tensor, with one number for each row"
_RANDOM = "it is random; a score must not be"
_ALL_ROWS = "it works over all rows at once; name a dim"

_WHY: Mapping[str, str] = {
    **dict.fromkeys(("nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim"), _DATA_SIZE),
    **dict.fromkeys(("item", "_local_scalar_dense"), _NUMBER),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "bernoulli", "multinomial", "randperm"), _RANDOM),
    **dict.fromkeys(("sum", "mean", "max", "min", "std", "var", "prod", "any", "all", "median"), _ALL_ROWS),
    "native_dropout": DROPS,
    "embedding_renorm_": "max_norm changes the table while it is read; normalise the rows before packaging",
    "_native_multi_head_attention": "its fused form cannot be looked into",
    "index_put": "it writes rows by their place; choose with torch.where instead",
    "index_put_": "it writes rows by their place; choose with torch.where instead",
}


_DROPOUTS = frozenset(
    {"aten.alpha_dropout.default", "aten.feature_dropout.default", "aten.feature_alpha_dropout.default"}
)
"""Operators that do nothing in evaluation mode, as dropout does, which has their arguments."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A call of an overload in the vocabulary. `given`: the arguments to pass; the others keep their defaults."""

    op: str
    arguments: Mapping[str, Any]
    given: frozenset[str]

    def arrange(self, plain: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return the `plain` arguments in the schema's order, without device placement."""
        schema = overload(self.op)._schema  # type: ignore[attr-defined]
        by_place = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        last = max((index for index, name in enumerate(by_place) if name in self.given), default=-1)
        args = [_encoded(plain[name], name) for name in by_place[: last + 1]]
        kwargs = {
            argument.name: _encoded(plain[argument.name], argument.name)
            for argument in schema.arguments
            if argument.kwarg_only and argument.name in self.given - _PLACEMENT and plain[argument.name] is not None
        }
        if self.op in _KEEPS_ROWS and shape[:1] == (ROWS,) and _has_rows(self.arguments):
            args[1] = shape  # ROWS is -1: as many as there are
        return tuple(args), kwargs


def bind(node: fx.Node) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the arguments of a traced call by name, defaults included, and which of them were given."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    given = set(node.kwargs)
    for index, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and index < len(node.args):
            bound[argument.name] = node.args[index]
            given.add(argument.name)
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound, frozenset(given)


def functional_name(node: fx.Node) -> str:
    """Return the overload's name or, for an operator that changes its operand in place, its functional equivalent's.

    Raises `UnsupportedOperator` if another reader could see the change.
    """
    target: Any = node.target
    name = str(target)
    if name == "aten.detach_.default":  # changes no data; stands behind every tensor literal
        return "aten.detach.default"
    if not target._schema.is_mutable:
        return _plain(_contiguous_clone(node, name))
    functional = _plain(functional_base(name))
    source = node.args[0] if node.args else None
    private = isinstance(source, fx.Node) and len(source.users) == 1 and source.op == "call_function"
    operator = VOCABULARY.get(str(source.target)) if private and isinstance(source, fx.Node) else None
    if operator is not None and operator.view:
        private = False
    if functional == name or not private:
        raise UnsupportedOperator(
            name, "it changes a value in place that may be read elsewhere: write it out of place", source_line(node)
        )
    return functional


def functional_base(name: str) -> str:
    """Return the name of an overload without the underscore of those that change their operand in place."""
    base, _, which = name.rpartition(".")
    return f"{base[:-1]}.{which}" if base.endswith("_") and not base.endswith("__") else name


def changes_what_is_seen(node: fx.Node) -> bool:
    """Return whether an operator changes a value in place that another reader could see."""
    if not node.target._schema.is_mutable:  # type: ignore[union-attr]
        return False
    try:
        functional_name(node)
    except UnsupportedOperator:
        return True
    return not node.users and any(len(read.users) > 1 for read in node.all_input_nodes)


def _plain(name: str) -> str:
    return "aten.dropout.default" if name in _DROPOUTS else name


_SPLITS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.split.sizes"})
_PARTED = _SPLITS | {
    "aten.unbind.int",
    "aten.max.dim",
    "aten.min.dim",
    "aten._native_batch_norm_legit_no_training.default",
}


_PLACED = frozenset({"aten.to.dtype_layout", "aten.to.device", "aten.to.other"})
"""Operators that move a tensor to a device: a program runs wherever its constants are, and keeps the dtype."""


def has_lowered_parts(name: str) -> bool:
    """Return whether an operator, or the parts of its result, can be lowered to another one."""
    return name in _PARTED or name in _PLACED or name in _DROPOUTS or f"{name}:0" in VOCABULARY


def lower_placement(node: fx.Node, lowered: Lowered) -> Lowered:
    """Return a cast in place of an operator that moves a tensor to a device; any other call unchanged."""
    if lowered.op not in _PLACED:
        return lowered
    made = {"self": lowered.arguments["self"], "dtype": node.meta["val"].dtype}
    rest = {"non_blocking": False, "copy": False, "memory_format": None}
    return Lowered("aten.to.dtype", {**rest, **made}, frozenset(made))


def lower_part(parent: fx.Node, index: int, arguments: Mapping[str, Any], where: str) -> Lowered:
    """Lower part `index` of the result of an operator with several results.

    Raises `UnsupportedOperator` if it is not a plain part.
    """
    name = str(parent.target)
    if name in _SPLITS:
        source, dim = arguments["self"], arguments["dim"]
        sizes = [part.shape[dim] for part in parent.meta["val"]]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise UnsupportedOperator(name, "it splits the rows", where)
        start = int(sum(sizes[:index]))
        made = {"self": source, "dim": dim, "start": start, "end": start + int(sizes[index]), "step": 1}
        return Lowered("aten.slice.Tensor", made, frozenset({"self", "dim", "start", "end"}))
    if name == "aten.unbind.int":
        made = {"self": arguments["self"], "dim": arguments["dim"], "index": index}
        return Lowered("aten.select.int", made, frozenset(made))
    if name in ("aten.max.dim", "aten.min.dim") and index == 0:
        made = {"self": arguments["self"], "dim": (arguments["dim"],), "keepdim": arguments["keepdim"]}
        return Lowered("aten.amax.default" if "max" in name else "aten.amin.default", made, frozenset(made))
    if name == "aten._native_batch_norm_legit_no_training.default" and index == 0:  # as functionalisation writes it
        made = {**arguments, "training": False, "cudnn_enabled": False}
        return Lowered("aten.batch_norm.default", made, frozenset(made))
    if f"{name}:{index}" in VOCABULARY:
        return Lowered(f"{name}:{index}", arguments, frozenset(arguments))
    several = "it returns several tensors, and this one is not in the vocabulary"
    raise UnsupportedOperator(name, why_unknown(name) if is_explained(name) else several, where)


def is_explained(op: str) -> bool:
    """Return whether the author of a model receives what to write instead of an operator."""
    name, _, which = op.removeprefix("aten.").partition(".")
    return name in _WHY and which == "default"


def why_unknown(op: str) -> str:
    """Explain to the author of a model why an operator is not in the vocabulary."""
    name = op.split(".")[1] if op.startswith("aten.") and op.count(".") == 2 else op
    return _WHY.get(name, "it is not in the vocabulary of operators that are known to keep rows apart")


def _contiguous_clone(node: fx.Node, name: str) -> str:
    """Return the name for a clone: clone(memory_format=contiguous_format) is what contiguous() does."""
    given = node.kwargs.get("memory_format")
    if given in (None, torch.preserve_format, torch.contiguous_format):
        return "aten.contiguous.default" if name == "aten.clone.default" and given is torch.contiguous_format else name
    raise UnsupportedOperator(name, f"memory format {given} is not kept", source_line(node))


def _has_rows(arguments: Mapping[str, Any]) -> bool:
    return getattr(getattr(arguments["self"], "fact", None), "counts", None) is not None


def _encoded(value: Any, name: str) -> Any:
    if name in _PLACEMENT:
        return None if name != "non_blocking" else False
    if isinstance(value, torch.dtype):
        return DType(str(value).removeprefix("torch."))
    if isinstance(value, tuple | list):
        return tuple(_encoded(part, "") for part in value)
    return value
