"""Inputs of a ranking model, by name, as the model declares them when it is packaged.

A request is one user and N candidates. An input belongs to one of two sides: a `user` input has one row per request,
an `item` input one row per candidate. The model itself is unaware of this: its `forward` receives every input with one
row per candidate, and it must treat each row independently (capture checks that). There are three kinds of input::

    Dense("age", side="user")                 forward gets age        (rows, 1) float32
    Dense("pixels", side="item", shape=(8,))  forward gets pixels     (rows, 8) float32
    Ids("item", side="item")                  forward gets item       (rows,) int64
    Ids("history", side="user", shape=(50,))  forward gets history    (rows, 50) int64, padded as the model wants it
    Ids("length", side="user", min=1, max=50) forward gets length     (rows,) int64 from 1 to 50: no table bounds it
    Bag("genres", side="item")                forward gets genres     (nnz,) int64 and genres_offsets (rows + 1,) int64;
                                              row r owns ids offsets[r] to offsets[r + 1]
    Bag("tags", weighted=True)                forward also gets tags_weights (nnz,) float32, a number for each id
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from plait_disagg.graph.program import ROWS, Port

Side = Literal["user", "item"]

OFFSETS = "_offsets"
"""The suffix that turns a bag's name into the name of its offsets."""

WEIGHTS = "_weights"
"""The suffix that turns a bag's name into the name of its weights; no other input may have that name."""

_NAME = re.compile(r"^[a-z][a-z0-9_]{0,62}$")


@dataclass(frozen=True)
class Dense:
    """Dense features: `(rows, *shape)` float32. With `low` or `high`, a request with a number beyond is rejected."""

    name: str
    side: Side = "item"
    shape: tuple[int, ...] = (1,)
    low: float | None = None
    high: float | None = None
    kind: ClassVar[str] = "dense"


@dataclass(frozen=True)
class Ids:
    """A fixed number of ids per row: `(rows, *shape)` int64.

    Ids that a table is read with are bounded by its rows. Others, such as a length, are declared from `min` (0 if left
    out) to `max`; a request with a number beyond is rejected.
    """

    name: str
    side: Side = "item"
    shape: tuple[int, ...] = ()
    min: int | None = None
    max: int | None = None
    kind: ClassVar[str] = "ids"


@dataclass(frozen=True)
class Bag:
    """Any number of ids per row, including none: `name (nnz,)` int64 and `name_offsets (rows + 1,)` int64.

    `largest` bounds the ids of one row; a request with more is rejected. `weighted`: every id comes with a number,
    `name_weights (nnz,)` float32.
    """

    name: str
    side: Side = "item"
    largest: int = 10_000
    weighted: bool = False
    kind: ClassVar[str] = "bag"


Input: TypeAlias = Dense | Ids | Bag

_KINDS: Mapping[str, type[Input]] = {"dense": Dense, "ids": Ids, "bag": Bag}


def tensor_names(inputs: Sequence[Input]) -> tuple[str, ...]:
    """Return the names of the tensors that `forward` takes, in the inputs' order: a bag has two, or three."""
    names: list[str] = []
    for item in inputs:
        names.append(item.name)
        if isinstance(item, Bag):
            names += [item.name + OFFSETS, *([item.name + WEIGHTS] if item.weighted else [])]
    return tuple(names)


def named_outputs(made: Any) -> dict[str, Any]:
    """Return what `forward` returns by public name: the keys of a dict; score for a single tensor; score_0, score_1,
    ... for a tuple."""
    if isinstance(made, Mapping):
        return {str(name): value for name, value in made.items()}
    if isinstance(made, tuple | list):
        return {f"score_{index}": value for index, value in enumerate(made)}
    return {"score": made}


def ports_of(inputs: Sequence[Input]) -> tuple[Port, ...]:
    """Return the tensors that `forward` takes, as a program lists them."""
    ports = []
    for item in inputs:
        if isinstance(item, Bag):
            ports.append(Port(name=item.name, shape=(ROWS,), dtype="int64", rows=item.side))
            ports.append(Port(name=item.name + OFFSETS, shape=(ROWS,), dtype="int64", rows=item.side))
            if item.weighted:
                ports.append(Port(name=item.name + WEIGHTS, shape=(ROWS,), dtype="float32", rows=item.side))
        else:
            dtype = "float32" if isinstance(item, Dense) else "int64"
            ports.append(Port(name=item.name, shape=(ROWS, *item.shape), dtype=dtype, rows=item.side))
    return tuple(ports)


def check_inputs(inputs: Sequence[Input]) -> None:
    """Raise ValueError, naming the input, if the declaration cannot be served."""
    for item in inputs:
        if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
            raise ValueError(f"input {item.name!r}: a name must match {_NAME.pattern}")
        if item.side not in ("user", "item"):
            raise ValueError(f"input {item.name}: side must be 'user' or 'item', not {item.side!r}")
        if not isinstance(item, Bag) and not (
            isinstance(item.shape, tuple | list) and all(type(size) is int and size >= 1 for size in item.shape)
        ):
            raise ValueError(f"input {item.name}: shape {item.shape} is no tuple of sizes from 1 on, as (8,) is")
        if isinstance(item, Bag) and (type(item.largest) is not int or item.largest < 1):
            raise ValueError(f"input {item.name}: largest must be a whole number of at least 1, not {item.largest!r}")
        first, last = range_of(item)
        kinds = (int, float) if isinstance(item, Dense) else int
        if any(end is not None and (isinstance(end, bool) or not isinstance(end, kinds)) for end in (first, last)):
            raise ValueError(f"input {item.name}: the ends of its range must be numbers")
        if first is not None and last is not None and first > last:
            raise ValueError(f"input {item.name}: its range {first} to {last} is empty")
    names = tensor_names(inputs)
    names += tuple(item.name + WEIGHTS for item in inputs if isinstance(item, Bag) and not item.weighted)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"input {twice[0]}: the name is taken twice (a bag also takes its name + {OFFSETS!r}, + {WEIGHTS!r})"
        )
    if not inputs:
        raise ValueError("a model needs at least one input")


def check_bags(inputs: Sequence[Input], ids_per_bag: Mapping[str, int]) -> None:
    """Raise ValueError, naming it, for a bag that the model does not have."""
    bags = [item.name for item in inputs if isinstance(item, Bag)]
    for name in ids_per_bag:
        if name not in bags:
            raise ValueError(f"bag {name}: the model has {', '.join(bags) or 'no bags'}")


def range_of(item: Input) -> tuple[float | None, float | None]:
    """Return the first and the last number that an input may have, None where nothing is declared."""
    if isinstance(item, Bag):
        return None, None
    if isinstance(item, Dense):
        return item.low, item.high
    return (0 if item.min is None and item.max is not None else item.min), item.max


def range_text(first: float | None, last: float | None) -> str:
    """Return a range for people to read."""
    return f"at least {first}" if last is None else f"at most {last}" if first is None else f"{first} to {last}"


def input_to_json(item: Input) -> dict[str, Any]:
    """Return the declaration as plain data, which `input_from_json` reads back; what is not declared is left out."""
    plain = {"kind": item.kind, **asdict(item)}
    said = {name: value for name, value in plain.items() if value is not None and value is not False}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def input_from_json(data: Mapping[str, Any]) -> Input:
    """Parse a declaration. Raises ValueError if the data is not one."""
    fields = dict(data)
    kind = _KINDS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise ValueError(f"{data!r} is not an input: kind must be one of {', '.join(_KINDS)}")
    if "shape" in fields:
        fields["shape"] = tuple(int(size) for size in fields["shape"])
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{data!r} is not an input: {error}") from error
