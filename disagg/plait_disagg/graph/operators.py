"""The vocabulary: the operators that a program may hold, what each does to rows, and what kind of work it is.

A name is an ATen overload (`aten.linear.default`), called as the eager module calls it, so that results are
bit-exact; `aten.topk.default:1` is the second of its results. Capture and the reader of stored programs reject
everything else, so a package cannot call any other operator.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from plait_disagg.graph import rows
from plait_disagg.graph.program import LOOKUP, TILE
from plait_disagg.graph.rows import Rule

Kind = Literal["gemm", "attention", "elementwise", "reduction", "layout", "lookup", "tile", "size"]
"""gemm and attention are what a GPU is for; lookup is what a CPU with a lot of memory is for."""

SIZE = "aten.sym_size.int"
"""The only operator that returns a number: how many rows a tensor has."""

RESHAPES = frozenset(
    {
        "aten.view.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
        "aten.unflatten.int",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    }
)
"""Operators that keep all numbers in their order."""

_NAME = re.compile(r"aten\.([A-Za-z][A-Za-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the vocabulary. `view`: its result may share memory with an operand."""

    name: str
    kind: Kind
    rule: Rule
    view: bool = False


def _words(kind: Kind, rule: Rule, names: str, *, view: bool = False) -> dict[str, Operator]:
    made = {}
    for word in names.split():
        name = f"aten.{word}" if "." in word else f"aten.{word}.default"
        made[name] = Operator(name, kind, rule, view)
    return made


def _parts(names: str, count: int) -> dict[str, Operator]:
    """Return an operator for each part of the result of operators along a dimension that return several tensors."""
    made = _words("reduction", rows.along("dim"), names)
    return {
        f"{name}:{part}": replace(operator, name=f"{name}:{part}")
        for name, operator in made.items()
        for part in range(count)
    }


_TABLE: dict[str, Operator] = {
    **_words(
        "elementwise",
        rows.pointwise,
        "abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square sin cos tan tanh sigmoid "
        "relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardsigmoid hardswish softplus "
        "log_sigmoid erf logit sign sgn round floor ceil trunc frac clamp clamp.Tensor clamp_min clamp_max "
        "threshold nan_to_num isnan isinf isfinite softshrink hardshrink add.Tensor add.Scalar mul.Tensor "
        "mul.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode rsub.Scalar rsub.Tensor sub.Scalar "
        "true_divide.Tensor pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar maximum minimum fmod.Scalar "
        "fmod.Tensor remainder.Scalar remainder.Tensor floor_divide floor_divide.Scalar eq.Scalar eq.Tensor "
        "ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor "
        "logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar "
        "bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not "
        "bitwise_right_shift.Tensor_Scalar bitwise_left_shift.Tensor_Scalar where.self where.ScalarSelf "
        "where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor lerp.Scalar lerp.Tensor addcmul addcdiv "
        "__and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar to.dtype "
        "_to_copy type_as clone zeros_like ones_like full_like",
    ),
    **_words("elementwise", rows.subtracted, "sub.Tensor"),
    **_words("elementwise", rows.differences, "diff"),
    **_words("elementwise", rows.weighted("weight"), "prelu"),
    **_words("elementwise", rows.one_count, "zeros ones full new_zeros new_ones new_full"),
    **_words("elementwise", rows.evaluated("training", rows.NORMALISES), "batch_norm"),
    **_words("elementwise", rows.evaluated("train", rows.DROPS), "dropout"),
    **_words("elementwise", rows.square, "tril triu"),
    **_words("elementwise", rows.pointwise, "contiguous alias detach lift_fresh_copy", view=True),
    **_words(
        "reduction",
        rows.along("dim"),
        "sum.dim_IntList mean.dim amax amin var.correction std.correction prod.dim_int any.dim all.dim logsumexp cumsum"
        " softmax.int _softmax log_softmax.int _log_softmax linalg_vector_norm norm.ScalarOpt_dim argmax argmin"
        " cosine_similarity glu",
    ),
    **_words("layout", rows.along("dims"), "flip roll"),
    **_words("reduction", rows.normalised, "layer_norm rms_norm"),
    **_words("layout", rows.joined, "cat stack"),
    **_words("layout", rows.reshaped, "view reshape _unsafe_view flatten.using_ints unflatten.int expand", view=True),
    **_words("layout", rows.pointwise, "expand_as view_as", view=True),
    **_words("layout", rows.sliced, "slice.Tensor", view=True),
    **_words("layout", rows.along("dim"), "squeeze.dim squeeze.dims select.int narrow", view=True),
    **_words("layout", rows.along("dim0", "dim1"), "transpose.int", view=True),
    **_words("layout", rows.permuted, "permute", view=True),
    **_words("layout", rows.unsqueezed, "unsqueeze", view=True),
    **_words("layout", rows.repeated, "repeat"),
    **_words("layout", rows.indexed, "index.Tensor"),
    **_words("layout", rows.gathered, "gather index_select"),
    **_words("layout", rows.scattered, "scatter.src scatter.value scatter_add scatter_reduce.two"),
    **_words("layout", rows.unpadded, "constant_pad_nd pad"),
    **_words("layout", rows.reshaped, "one_hot"),
    **_words(
        "layout", rows.constant_only, "arange arange.start arange.start_step eye tril_indices triu_indices linspace"
    ),
    **_words("gemm", rows.linear, "linear"),
    **_words("gemm", rows.convolved, "conv1d conv2d"),
    **_words("reduction", rows.pooled(1), "max_pool1d avg_pool1d adaptive_avg_pool1d"),
    **_words("reduction", rows.pooled(2), "max_pool2d avg_pool2d adaptive_avg_pool2d"),
    **_words("elementwise", rows.weighted("boundaries", what="its boundaries depend"), "bucketize.Tensor"),
    **_words("reduction", rows.weighted("weight", "bias", over_rows="it normalises over the rows"), "group_norm"),
    **_words("reduction", rows.along("dim"), "argsort argsort.stable"),
    **_parts("topk sort sort.stable max.dim min.dim median.dim mode kthvalue cummax cummin", 2),
    **_parts("var_mean.correction std_mean.correction", 2),
    **_words("gemm", rows.weighted("mat2", "self"), "addmm"),
    **_words("gemm", rows.multiplied("self", "mat2"), "mm bmm"),
    **_words("gemm", rows.multiplied("self", "other"), "matmul"),
    **_words("gemm", rows.multiplied("self", "vec"), "mv"),
    **_words("gemm", rows.einsum, "einsum"),
    **_words("attention", rows.attention, "scaled_dot_product_attention"),
}


class _Vocabulary(Mapping[str, Operator]):
    """The table, and by rule every other overload that torch itself calls elementwise."""

    def __getitem__(self, op: str) -> Operator:
        found = _TABLE.get(op) or _elementwise(op)
        if found is None:
            raise KeyError(op)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


@functools.cache
def _elementwise(op: str) -> Operator | None:
    """Return an operator for an overload with torch's tag `pointwise` that changes nothing in place, or None."""
    named = _NAME.fullmatch(op)
    found = getattr(getattr(torch.ops.aten, named[1], None), named[2], None) if named else None
    if not isinstance(found, torch._ops.OpOverload):
        return None
    tags, schema = found.tags, found._schema
    random = torch.Tag.nondeterministic_seeded in tags
    if torch.Tag.pointwise not in tags or random or schema.is_mutable or len(schema.returns) != 1:
        return None
    return Operator(op, "elementwise", rows.pointwise)


VOCABULARY: Mapping[str, Operator] = _Vocabulary()
"""Every ATen overload that a program may call, except `SIZE`."""

_VIEWS: Mapping[str, Callable[..., Any]] = {
    "aten.view.default": torch.reshape,
    "aten.view_as.default": torch.Tensor.reshape_as,
}

_OURS: Mapping[str, Kind] = {LOOKUP: "lookup", TILE: "tile", SIZE: "size"}


def kind_of(op: str) -> Kind:
    """Return the kind of work of a program's operator. Raises KeyError if it is not in the vocabulary."""
    return _OURS[op] if op in _OURS else VOCABULARY[op].kind


def overload(op: str) -> Callable[..., Any]:
    """Return the ATen overload of that name. Raises KeyError if it is not in the vocabulary.

    A view is a reshape: a tensor that is tiled, on a GPU or without data may have other strides than the module's.
    """
    if op != SIZE and op not in VOCABULARY:
        raise KeyError(op)
    name, _, part = op.partition(":")
    _, packet, which = name.split(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), which)
    return _part_of(found, int(part)) if part else _VIEWS.get(op, found)


def schema_of(op: str) -> Any:
    """Return torch's schema of an overload, in the vocabulary or not."""
    namespace, packet, which = op.partition(":")[0].split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)._schema


@functools.cache
def _part_of(whole: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return the function that calls an overload and returns one of its results."""

    def part(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)[index]

    return part
