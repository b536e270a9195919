"""The rules of the vocabulary against what the operators do: whatever a rule lets in keeps rows apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.graph.operators import VOCABULARY, overload, schema_of
from plait_disagg.graph.program import ROWS
from plait_disagg.graph.rows import PER_ROW, Fact, MixesRows, OperatorCall

dims = st.integers(-3, 2)
flat_dims = st.lists(dims, max_size=2).map(tuple)
sizes = st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6, 12]), min_size=1, max_size=4).map(tuple)
X = "x"  # stands for the tensor with rows, (rows, 3, 4)
C = torch.linspace(-1, 1, 12).reshape(3, 4)
SQUARE = torch.linspace(-1, 1, 16).reshape(4, 4)

CALLS = {
    "aten.sum.dim_IntList": st.tuples(st.just(X), flat_dims),
    "aten.mean.dim": st.tuples(st.just(X), flat_dims),
    "aten.amax.default": st.tuples(st.just(X), flat_dims),
    "aten.logsumexp.default": st.tuples(st.just(X), flat_dims),
    "aten.softmax.int": st.tuples(st.just(X), dims),
    "aten.cumsum.default": st.tuples(st.just(X), dims),
    "aten.flip.default": st.tuples(st.just(X), flat_dims),
    "aten.linalg_vector_norm.default": st.tuples(st.just(X), st.just(2), flat_dims),
    "aten.transpose.int": st.tuples(st.just(X), dims, dims),
    "aten.permute.default": st.tuples(st.just(X), st.permutations([0, 1, 2]).map(tuple)),
    "aten.unsqueeze.default": st.tuples(st.just(X), st.integers(-4, 3)),
    "aten.select.int": st.tuples(st.just(X), dims, st.integers(0, 2)),
    "aten.slice.Tensor": st.tuples(st.just(X), dims, st.integers(-2, 2), st.integers(1, 4) | st.none()),
    "aten.cat.default": st.tuples(st.sampled_from([(X, X), (X, C.unsqueeze(0))]), dims),
    "aten.stack.default": st.tuples(st.just((X, X)), st.integers(-4, 3)),
    "aten.reshape.default": st.tuples(st.just(X), sizes),
    "aten.expand.default": st.tuples(st.just(X), sizes),
    "aten.repeat.default": st.tuples(st.just(X), st.lists(st.integers(1, 2), min_size=3, max_size=4).map(tuple)),
    "aten.add.Tensor": st.tuples(st.just(X), st.sampled_from([X, C, SQUARE[0], C.unsqueeze(0).unsqueeze(0)])),
    "aten.matmul.default": st.sampled_from([(X, C.T), (SQUARE[:3, :3], X), (X, SQUARE[0]), (C.T, X), (X, X)]),
    "aten.linear.default": st.sampled_from([(X, SQUARE), (X, SQUARE, SQUARE[0]), (SQUARE, X)]),
    "aten.layer_norm.default": st.tuples(st.just(X), st.sampled_from([(4,), (3, 4), (5, 3, 4)])),
    "aten.einsum.default": st.tuples(
        st.sampled_from(["bij,bkj->bik", "bij,ckj->bck", "bij,bij->b", "bij,bij->ij", "bij,bij->jb", "ibj,ibk->ijk"]),
        st.just((X, X)),
    ),
    "aten.index_select.default": st.tuples(st.just(X), dims, st.just(torch.tensor([2, 0]))),
    "aten.tril.default": st.tuples(st.just(X)),
    "aten.diff.default": st.tuples(st.just(X), st.just(1), dims),
    "aten.constant_pad_nd.default": st.tuples(
        st.just(X), st.lists(st.integers(0, 1), min_size=2, max_size=6).map(tuple)
    ),
}


def filled_in(argument, x):
    if isinstance(argument, str) and argument == X:
        return x
    return tuple(filled_in(part, x) for part in argument) if isinstance(argument, tuple) else argument


def as_fact(argument):
    if isinstance(argument, torch.Tensor):
        return Fact(tuple(argument.shape))
    if isinstance(argument, tuple):
        return tuple(as_fact(part) for part in argument)
    return Fact((ROWS, 3, 4), PER_ROW) if isinstance(argument, str) and argument == X else argument


def bound(op, arguments):
    """The arguments by name, as capture hands them to a rule."""
    schema = schema_of(op).arguments
    given = {argument.name: as_fact(value) for argument, value in zip(schema, arguments, strict=False)}
    return {**{argument.name: argument.default_value for argument in schema}, **given}


def accepted(op, arguments, shapes):
    """True if the rule and the check of shapes behind it let the call in."""
    sizes_at_5, sizes_at_7 = shapes
    if len(sizes_at_5) != len(sizes_at_7):
        return False
    out = tuple(ROWS if a == 5 and b == 7 else a if a == b else -2 for a, b in zip(sizes_at_5, sizes_at_7, strict=True))
    if -2 in out:
        return False
    try:
        counts = VOCABULARY[op].rule(OperatorCall(bound(op, arguments), out))
    except MixesRows:
        return False
    return counts is not None and out[:1] == (ROWS,) and ROWS not in out[1:]


@pytest.mark.parametrize("op", sorted(CALLS))
@settings(max_examples=40)
@given(data=st.data())
def test_what_a_rule_lets_in_keeps_rows_apart(op, data):
    """Another order of the rows gives the same rows in that order, for every call that a rule accepts."""
    arguments = data.draw(CALLS[op])
    operator = overload(op)
    x5, x7 = (torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(rows)) for rows in (5, 7))
    try:
        made5, made7 = (operator(*filled_in(arguments, x)) for x in (x5, x7))
    except (RuntimeError, IndexError):
        return
    if accepted(op, arguments, (made5.shape, made7.shape)):
        order = torch.tensor([3, 0, 4, 2, 1])
        torch.testing.assert_close(operator(*filled_in(arguments, x5[order])), made5[order])
        alone = operator(*filled_in(arguments, x5[2:3]))
        torch.testing.assert_close(alone, made5[2:3])
