"""Calls by the names of their arguments, and what a traced call becomes before it is added to a program: its functional
equivalent, a cast in place of a move to a device, slices in place of the parts of a split, and of an embedding operator
which ids of which table it pools, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.operators import VOCABULARY, schema_of
from plait_disagg.graph.program import Arg, DType
from plait_disagg.graph.rows import DROPS
from plait_disagg.tables.values import Mode

ATEN_LONGEST = 2**62
"""From here on the end of a slice means: to the end."""

_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that specify where and how a tensor is stored; a program runs wherever its constants are."""

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
class Call:
    """A call of an overload. `given`: the arguments to pass, by the schema's names; the others keep their defaults."""

    op: str
    given: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments in the schema's order."""
        return {one.name: self.given.get(one.name, one.default_value) for one in schema_of(self.op).arguments}

    def arranged(self, plain: Callable[[Any], Any]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
        """Return the arguments as a program holds them, without device placement. `plain`: what stands for a value."""
        schema, made = schema_of(self.op).arguments, {name: plain(value) for name, value in self.arguments.items()}
        by_place = [one.name for one in schema if not one.kwarg_only]
        last = max((index for index, name in enumerate(by_place) if name in self.given), default=-1)
        args = [_encoded(made[name], name) for name in by_place[: last + 1]]
        kwargs = {
            one.name: _encoded(made[one.name], one.name)
            for one in schema
            if one.kwarg_only and one.name in self.given.keys() - _PLACEMENT and made[one.name] is not None
        }
        return tuple(args), kwargs


def bind(node: fx.Node) -> Call:
    """Return a traced call by the names of its arguments."""
    schema = schema_of(str(node.target)).arguments
    given = dict(zip((one.name for one in schema if not one.kwarg_only), node.args, strict=False)) | node.kwargs
    return Call(str(node.target), {one.name: given[one.name] for one in schema if one.name in given})


def functional_name(node: fx.Node) -> str:
    """Return the overload's name or, for an operator that changes its operand in place, its functional equivalent's:
    nobody else sees such a change (`changes_what_is_seen`)."""
    target: Any = node.target
    name = str(target)
    if name == "aten.detach_.default":  # changes no data; stands behind every tensor literal
        return "aten.detach.default"
    return _plain(functional_base(name) if target._schema.is_mutable else _contiguous_clone(node, name))


def functional_base(name: str) -> str:
    """Return the name of an overload without the underscore of those that change their operand in place."""
    base, _, which = name.rpartition(".")
    return f"{base[:-1]}.{which}" if base.endswith("_") and not base.endswith("__") else name


def changes_what_is_seen(node: fx.Node) -> bool:
    """Return whether an operator changes a value in place that another reader could see."""
    target: Any = node.target
    name, source = str(target), node.args[0] if node.args else None
    if not target._schema.is_mutable or name == "aten.detach_.default":
        return False
    private = isinstance(source, fx.Node) and len(source.users) == 1 and source.op == "call_function"
    operator = VOCABULARY.get(str(source.target)) if isinstance(source, fx.Node) else None
    if not private or (operator is not None and operator.view) or functional_base(name) == name:
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


def placed_anywhere(node: fx.Node, call: Call) -> Call:
    """Return a cast in place of an operator that moves a tensor to a device; any other call unchanged."""
    if call.op not in _PLACED:
        return call
    return Call("aten.to.dtype", {"self": call.given["self"], "dtype": node.meta["val"].dtype})


def part_of(parent: fx.Node, index: int, call: Call) -> Call:
    """Return a call that makes part `index` of the result of an operator with several results, called as `call` says.

    Raises `UnsupportedOperator` if it is not a plain part.
    """
    name, given = call.op, call.arguments
    if name in _SPLITS:
        dim = given["dim"]
        sizes = [part.shape[dim] for part in parent.meta["val"]]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise UnsupportedOperator(name, "it splits the rows")
        start = int(sum(sizes[:index]))
        end = start + int(sizes[index])
        return Call("aten.slice.Tensor", {"self": given["self"], "dim": dim, "start": start, "end": end})
    if name == "aten.unbind.int":
        return Call("aten.select.int", {"self": given["self"], "dim": given["dim"], "index": index})
    if name in ("aten.max.dim", "aten.min.dim") and index == 0:
        made = {"self": given["self"], "dim": (given["dim"],), "keepdim": given["keepdim"]}
        return Call("aten.amax.default" if "max" in name else "aten.amin.default", made)
    if name == "aten._native_batch_norm_legit_no_training.default" and index == 0:  # as functionalisation writes it
        return Call("aten.batch_norm.default", {**given, "training": False, "cudnn_enabled": False})
    if f"{name}:{index}" in VOCABULARY:
        return Call(f"{name}:{index}", given)
    several = "it returns several tensors, and this one is not in the vocabulary"
    raise UnsupportedOperator(name, why_unknown(name) if is_explained(name) else several)


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
    raise UnsupportedOperator(name, f"memory format {given} is not kept")


def _encoded(value: Any, name: str) -> Any:
    if name in _PLACEMENT:
        return None if name != "non_blocking" else False
    if isinstance(value, torch.dtype):
        return DType(str(value).removeprefix("torch."))
    if isinstance(value, tuple | list):
        return tuple(_encoded(part, "") for part in value)
    return value


_MODES: tuple[Mode, ...] = ("sum", "mean", "max")
_EMBEDDING = "aten.embedding.default"
_BAGS = ("aten.embedding_bag.padding_idx", "aten.embedding_bag.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class BagCall:
    """One embedding operator. With `equal_rows`, the ids are `(rows, k)` and every row is a bag of k."""

    op: str
    table: fx.Node
    ids: fx.Node
    mode: Mode
    offsets: fx.Node | None = None
    weights: fx.Node | None = None
    include_last: bool = False
    padding_idx: int | None = None
    equal_rows: bool = False

    def leaves_out(self, weight: torch.Tensor) -> bool:
        """Return whether ids equal to `padding_idx` must be left out of the bag: in a sum, a row of zeros may stay."""
        if self.padding_idx is None or self.mode == "rows":
            return False
        return self.mode != "sum" or bool(weight[self.padding_idx].any())

    def check_table(self, weight: torch.Tensor) -> None:
        """Raise `UnsupportedOperator` if the table cannot be served."""
        if weight.dtype != torch.float32 or weight.ndim != 2:
            shape = f"{weight.dtype} with {weight.ndim} dimensions"
            raise UnsupportedOperator(self.op, f"its table is {shape}, not float32 with 2")
        if self.leaves_out(weight) and self.mode != "sum" and not (self.mode == "mean" and self.equal_rows):
            why = "padding_idx takes ids out of the bag, and how many are left is not known here"
            raise UnsupportedOperator(self.op, f"{why}; give it ids of shape (rows, k), or send bags without padding")


def is_lookup(op: str) -> bool:
    """Return whether an operator looks up in a table."""
    return op == _EMBEDDING or op in _BAGS


def bag_call(node: fx.Node) -> BagCall | None:
    """Return what an embedding operator looks up, or None for any other operator."""
    op = str(node.target)
    if op == _EMBEDDING:
        bound = bind(node).arguments
        return BagCall(op=op, table=bound["weight"], ids=bound["indices"], mode="rows")
    if op not in _BAGS:
        return None
    bound = bind(node).arguments
    ids, offsets = bound["indices"], bound["offsets"]
    padding = bound.get("padding_idx")
    rows, weights = _equal_rows(ids, offsets), bound["per_sample_weights"]
    if rows is not None and weights is not None:
        weights = _unflattened(weights)
    return BagCall(
        op=op,
        table=bound["weight"],
        ids=ids if rows is None else rows,
        offsets=None if rows is not None else offsets,
        weights=weights,
        mode=_MODES[int(bound["mode"])],
        include_last=bool(bound["include_last_offset"]),
        padding_idx=None if padding is None or padding < 0 else int(padding),
        equal_rows=rows is not None,
    )


def _equal_rows(ids: Any, offsets: Any) -> fx.Node | None:
    """Return the `(rows, k)` ids of a call that flattens them and makes offsets 0, k, 2k, ...

    This is how EmbeddingBag treats 2-D input.
    """
    source = _unflattened(ids)
    if source is None or str(offsets.target) != "aten.arange.start_step":
        return None
    start, _, step = offsets.args[:3]
    return source if start == 0 and step == source.meta["val"].shape[1] else None


def _unflattened(flat: fx.Node) -> fx.Node | None:
    """Return the matrix whose numbers `flat` has in one row, or None."""
    if str(flat.target) not in ("aten.reshape.default", "aten.view.default") or flat.meta["val"].ndim != 1:
        return None
    source = flat.args[0]
    return source if isinstance(source, fx.Node) and source.meta["val"].ndim == 2 else None
