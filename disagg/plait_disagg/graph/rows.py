"""Row independence: what every operator must satisfy before a program may contain it.

A batch holds the candidates of several requests and user-side values are computed once per user, so a row must not
depend on any other row. Each rule here looks at one call (shapes and arguments, no data) and returns what the first
dimension of the result counts, or raises `MixesRows` with the reason. The first dimension of a value *counts* one
of:

    rows            a row per user or candidate
    ids:NAME        the flat ids of bag NAME
    offsets:NAME    its offsets (rows + 1)
    starts:NAME, ends:NAME      its offsets without the last, without the first
    None            nothing: no dimension varies with the request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils._pytree import tree_leaves

from plait_disagg.graph.program import ROWS

PER_ROW = "rows"

_IN_TRAINING = (
    "although the module is in evaluation mode: give it training=self.training, and eval() to a part that was set to "
    "training again"
)
DROPS = f"it drops numbers at random, {_IN_TRAINING}"
NORMALISES = f"it normalises over the rows, {_IN_TRAINING}"


class MixesRows(Exception):
    """The call would let one row see another, or moves rows out of the first dimension. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known about a tensor: its shape, with `ROWS` where it varies (only in front), and what that counts."""

    shape: tuple[int, ...]
    counts: str | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class RowCount:
    """The number of rows, as a size argument."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call: its arguments by the names of the schema (tensors as `Fact`), and the shape of its result."""

    arguments: Mapping[str, Any]
    out: tuple[int, ...]

    def tensor(self, name: str) -> Fact:
        """Return the tensor argument of that name."""
        found = self.arguments[name]
        if not isinstance(found, Fact):
            raise MixesRows(f"{name} must be a tensor")
        return found

    def varying(self) -> list[Fact]:
        """Return the tensor arguments that have a dimension that counts something."""
        return [
            part for part in tree_leaves(dict(self.arguments)) if isinstance(part, Fact) and part.counts is not None
        ]


Rule: TypeAlias = Callable[[OperatorCall], "str | None"]


def pointwise(call: OperatorCall) -> str | None:
    """Check an elementwise operator with broadcasting."""
    for fact in call.varying():
        if fact.ndim != len(call.out):
            raise MixesRows(f"broadcasting moves the rows: {_text(fact.shape)} against {_text(call.out)}")
    return one_count(call)


def one_count(call: OperatorCall) -> str | None:
    """Return what all varying arguments count; if there are none, rows if a size argument is the row count."""
    counts = {fact.counts for fact in call.varying()}
    for odd in counts:
        if odd is not None and odd.partition(":")[0] in ("offsets", "starts", "ends"):
            raise MixesRows("offsets of a bag may only go into an embedding bag, or be subtracted to give its lengths")
    if len(counts) > 1:
        raise MixesRows(f"its operands count different things: {', '.join(sorted(map(str, counts)))}")
    return counts.pop() if counts else (PER_ROW if call.out[:1] == (ROWS,) else None)


def only_if(holds: Callable[[OperatorCall], bool], why: str) -> Rule:
    """Return a rule for operators whose calls keep rows apart if that holds."""

    def rule(call: OperatorCall) -> str | None:
        if not holds(call):
            raise MixesRows(why)
        return one_count(call)

    return rule


def along(*names: str) -> Rule:
    """Return a rule for operators along the dimensions in the arguments `names`: they must be given and not be the
    first."""

    def rule(call: OperatorCall) -> str | None:
        varying = call.varying()
        for fact in varying:
            for name in names:
                _check_dims(call.arguments.get(name), fact.ndim, name)
        return one_count(call)

    return rule


def joined(call: OperatorCall) -> str | None:
    """Check cat and stack: along any dimension but the first, and all parts vary or none does."""
    parts = [part for part in call.arguments["tensors"] if isinstance(part, Fact)]
    _check_dims(call.arguments["dim"], len(call.out), "dim")
    if any(part.counts for part in parts) and not all(part.counts for part in parts):
        raise MixesRows("it joins something with one row per candidate to something without rows")
    return one_count(call)


def reshaped(call: OperatorCall) -> str | None:
    """Check view, reshape, flatten, ...: the first dimension is unchanged."""
    counts = one_count(call)
    if counts is not None and (call.out[:1] != (ROWS,) or ROWS in call.out[1:]):
        raise MixesRows(
            f"it moves the rows: the result is {_text(call.out)}; rows must stay the first dimension by themselves"
        )
    return counts


def sliced(call: OperatorCall) -> str | None:
    """Check slice: any dimension but the first, except that a bag's offsets may lose their last or first."""
    source = call.tensor("self")
    first, last = call.arguments.get("start") or 0, call.arguments.get("end")
    if source.counts is None or call.arguments["dim"] % source.ndim:
        return one_count(call)
    if call.arguments.get("step", 1) == 1 and first == 0 and (last is None or last >= 2**62):
        return source.counts
    kind, _, name = source.counts.partition(":")
    if kind == "offsets" and (first, last) == (0, -1):
        return f"starts:{name}"
    if kind == "offsets" and first == 1 and (last is None or last >= 2**62):
        return f"ends:{name}"
    raise MixesRows("it takes some rows and leaves others")


def subtracted(call: OperatorCall) -> str | None:
    """Check sub: elementwise; ends - starts of a bag are its lengths, one per row."""
    left, right = call.arguments.get("self"), call.arguments.get("other")
    if isinstance(left, Fact) and isinstance(right, Fact) and left.counts and right.counts:
        ends, _, name = left.counts.partition(":")
        if ends == "ends" and right.counts == f"starts:{name}":
            return PER_ROW
    return pointwise(call)


def differences(call: OperatorCall) -> str | None:
    """Check diff: a bag's offsets give its lengths; otherwise along any dimension but the first."""
    source = call.tensor("self")
    plain = call.arguments.get("n", 1) == 1 and call.arguments.get("prepend") is None
    if source.counts and source.counts.startswith("offsets:") and plain and call.arguments.get("append") is None:
        return PER_ROW
    return along("dim")(call)


def repeated(call: OperatorCall) -> str | None:
    """Check repeat: the rows are repeated once only."""
    source, times = call.tensor("self"), call.arguments["repeats"]
    if source.counts and (len(times) != source.ndim or times[0] != 1):
        raise MixesRows("it repeats the rows")
    return one_count(call)


_AWAY = "it moves the rows away from the first dimension"

permuted = only_if(
    lambda call: not call.tensor("self").counts or call.arguments["dims"][0] % call.tensor("self").ndim == 0, _AWAY
)
"""Checks permute: the first dimension stays first."""

unsqueezed = only_if(
    lambda call: not call.tensor("self").counts or call.arguments["dim"] % (call.tensor("self").ndim + 1) != 0, _AWAY
)
"""Checks unsqueeze: no dimension comes before the first."""


def weighted(*names: str, what: str = "its weight depends", over_rows: str = "") -> Rule:
    """Return a rule for operators whose arguments `names`, where they are given, are the same for all rows.

    `over_rows`: what it would do to the rows of an input without features; empty: that may be.
    """

    def rule(call: OperatorCall) -> str | None:
        for name in names:
            given = call.arguments.get(name)
            if isinstance(given, Fact) and given.counts:
                raise MixesRows(f"{what} on the request")
        if over_rows and call.tensor("input").ndim < 2:
            raise MixesRows(over_rows)
        return one_count(call)

    return rule


linear = weighted("weight", "bias", over_rows="it sums over the rows")
"""Checks linear(x, W, b): W and b are the same for all rows, and x has features."""


def multiplied(left_name: str, right_name: str) -> Rule:
    """Return a rule for matmul and similar operators: rows are a batch dimension, or the rows of the left matrix."""

    def rule(call: OperatorCall) -> str | None:
        left, right = call.tensor(left_name), call.tensor(right_name)
        both = left.counts is not None and right.counts is not None
        if left.counts and left.ndim < 2:
            raise MixesRows("it sums over the rows")
        if right.counts and right.ndim < 3:
            raise MixesRows("it multiplies all rows with all rows" if both else "it sums over the rows")
        if (both and left.ndim != right.ndim) or any(
            fact.ndim != max(left.ndim, right.ndim) for fact in call.varying()
        ):
            raise MixesRows(f"broadcasting moves the rows: {_text(left.shape)} by {_text(right.shape)}")
        return one_count(call)

    return rule


def attention(call: OperatorCall) -> str | None:
    """Check scaled_dot_product_attention: rows are a batch dimension of everything that varies; no dropout."""
    for fact in call.varying():
        if fact.ndim < 3 or fact.ndim != len(call.out):
            raise MixesRows("its rows would attend to each other: give it (rows, tokens, features)")
    if call.arguments.get("dropout_p"):
        raise MixesRows("it is random: give it dropout_p=0.0 unless self.training")
    return one_count(call)


def einsum(call: OperatorCall) -> str | None:
    """Check einsum: the rows' letter is first in every operand that has rows, first in the result, and nowhere else."""
    left, arrow, out = call.arguments["equation"].replace(" ", "").partition("->")
    operands = left.split(",")
    facts = call.arguments["tensors"]
    letters = {text[:1] for text, fact in zip(operands, facts, strict=True) if fact.counts}
    if not letters:
        return one_count(call)
    letter = letters.pop()
    if letters or not arrow or not letter.isalpha() or out[:1] != letter:
        raise MixesRows(f"the rows must be the first letter of every operand and of the result, not {left}->{out}")
    for text, fact in zip(operands, facts, strict=True):
        if text.count(letter) != (1 if fact.counts else 0):
            raise MixesRows(f"the letter {letter} is the rows' and stands elsewhere too in {left}->{out}")
    return one_count(call)


normalised = only_if(
    lambda call: not call.tensor("input").counts or len(call.arguments["normalized_shape"]) < call.tensor("input").ndim,
    "it normalises over the rows",
)
"""Checks layer_norm and rms_norm: over the last dimensions, never the rows."""


def evaluated(name: str, why: str) -> Rule:
    """Return a rule for operators that must not be in training mode, as the argument `name` says."""
    return only_if(lambda call: not call.arguments[name], why)


def indexed(call: OperatorCall) -> str | None:
    """Check x[:, idx]: constant indices, none for the rows."""
    source, indices = call.tensor("self"), call.arguments["indices"]
    if any(isinstance(index, Fact) and index.counts for index in indices):
        raise MixesRows("the indices depend on the request; only embeddings and gather may look up by them")
    if source.counts and (not indices or indices[0] is not None):
        raise MixesRows("it picks among the rows")
    return one_count(call)


def gathered(call: OperatorCall) -> str | None:
    """Check gather and index_select: along any dimension but the first."""
    source, index = call.tensor("self"), call.tensor("index")
    if index.counts and (source.counts is None or index.ndim != source.ndim):
        raise MixesRows("it looks up in a constant by the request's ids: use an embedding")
    _check_dims(call.arguments["dim"], max(source.ndim, 1), "dim")
    return one_count(call)


def scattered(call: OperatorCall) -> str | None:
    """Check scatter and scatter_add: along any dimension but the first, every row by its own indices."""
    _check_dims(call.arguments["dim"], call.tensor("self").ndim, "dim")
    for name in ("self", "index", "src"):
        given = call.arguments.get(name)
        if isinstance(given, Fact) and given.counts != PER_ROW:
            raise MixesRows(f"its {name} does not have one row per candidate, so that it would write some rows only")
    return one_count(call)


square = only_if(
    lambda call: all(fact.ndim >= 3 for fact in call.varying()), "it works on the rows as one side of the triangle"
)
"""Checks tril and triu: over the last two dimensions."""


def unpadded(call: OperatorCall) -> str | None:
    """Check pad, in the form of constant_pad_nd: the rows are not padded."""
    for fact in call.varying():
        if len(call.arguments["pad"]) >= 2 * fact.ndim and any(call.arguments["pad"][2 * fact.ndim - 2 :]):
            raise MixesRows("it pads the rows")
    return one_count(call)


def constant_only(call: OperatorCall) -> str | None:
    """Check what may be computed from constants only (it is computed once)."""
    if call.varying() or ROWS in call.out:
        raise MixesRows("it tells rows apart by their place")
    return None


def convolved(call: OperatorCall) -> str | None:
    """Check conv1d, conv2d, ...: a kernel that is the same for all rows moves over the dimensions behind channels."""
    counts = weighted("weight", "bias")(call)
    if call.tensor("input").ndim != call.tensor("weight").ndim:
        raise MixesRows("it moves over the rows: give it (rows, channels, ...)")
    return counts


def pooled(dims: int) -> Rule:
    """Return a rule for pooling over the last `dims` dimensions, behind rows and channels."""
    why = "it pools over the channels' dimension: give it (rows, channels, ...)"
    return only_if(lambda call: call.tensor("self").ndim == dims + 2, why)


def _check_dims(dims: Any, ndim: int, name: str) -> None:
    if dims is None or dims in ((), []):
        raise MixesRows(f"it names no {name}, so it works over all rows at once")
    for dim in dims if isinstance(dims, tuple | list) else (dims,):
        if not isinstance(dim, int) or dim % max(ndim, 1) == 0:
            raise MixesRows(f"it works along the rows ({name} {dim})")


def _text(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join("rows" if size == ROWS else str(size) for size in shape) + ")"
