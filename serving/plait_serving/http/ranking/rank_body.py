"""The body of `POST /v1/recommend`: to the arrays of a model, and back to a ranked list. Pure functions."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, Field

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import OFFSETS, Bag, Dense, Input, tensor_names
from plait_serving.http.edge.json_body import MAX_DEADLINE_MS, StrictBody
from plait_serving.ranking.codec import Array, array_of, hint
from plait_serving.ranking.inputs import LENGTHS

ALL = "all"


class RecommendBody(StrictBody):
    """A user and candidates; `null` means "left out"."""

    model: Annotated[str | None, Field(description="may be left out if the server has one model that ranks")] = None
    user: Annotated[dict[str, Any], Field(description="every user-side input by name: a number or a list")]
    candidates: Annotated[
        Any, Field(description='item ids; or objects with every item-side input; or "all" items that the model knows')
    ]
    top_k: Annotated[int | None, Field(ge=1, description="only the best so many; all if left out")] = None
    deadline_ms: Annotated[
        float | None, Field(gt=0, le=MAX_DEADLINE_MS, description="an answer after it is worthless")
    ] = None


class RankedItem(BaseModel):
    """One candidate, with its `id` if the request gave ids, else its `index` among the candidates."""

    id: int | None = None
    index: int | None = None
    score: float | None
    name: str | None = None


class RecommendResponse(BaseModel):
    """`items`: the best first; of equal scores, the one named first comes first. `timings` in milliseconds."""

    model: str
    items: list[RankedItem]
    timings: dict[str, float]


def arrays_of(inputs: Sequence[Input], rows: Sequence[Mapping[str, Any]], where: str) -> dict[str, Array]:
    """Return arrays for `Binder.bind` from one object per row. `where`: the name of the rows in messages.

    Raises `BadInput` for a row that does not have exactly these inputs, and for values that are no numbers.
    """
    _check_names([name for item in inputs for name in _keys(item)], rows, where)
    arrays: dict[str, Array] = {}
    for item in inputs:
        values, name = [row[item.name] for row in rows], f"{where}.{item.name}"
        if isinstance(item, Bag):
            # One id may be written without its brackets.
            bags = [value if type(value) is list else [value] for value in values]
            ids = list(chain.from_iterable(bags))
            arrays[item.name] = array_of(ids, (len(ids),), "INT64", name)
            arrays[item.name + LENGTHS] = np.array([len(bag) for bag in bags], np.int64)
            for key in _keys(item)[1:]:
                weights = [row[key] if type(row[key]) is list else [row[key]] for row in rows]
                if list(map(len, weights)) != list(map(len, bags)):
                    raise BadInput(
                        f"{where}.{key}: must have one number for each id of {item.name}", param=f"{where}.{key}"
                    )
                flat = list(chain.from_iterable(weights))
                arrays[key] = array_of(flat, (len(flat),), "FP32", f"{where}.{key}")
            continue
        is_plain = all(size == 1 for size in item.shape) and not any(type(value) is list for value in values)
        shape = (len(rows),) if is_plain else (len(rows), *item.shape)
        if not is_plain and not all(type(value) is list for value in values):
            raise BadInput(f"{name}: must be a list of shape {list(item.shape)}", param=name)
        arrays[item.name] = array_of(values, shape, "FP32" if isinstance(item, Dense) else "INT64", name)
    return arrays


def _keys(item: Input) -> tuple[str, ...]:
    """Return the names that an input has in a row: a bag's offsets follow from its list."""
    return tuple(name for name in tensor_names((item,)) if not isinstance(item, Bag) or name != item.name + OFFSETS)


def _check_names(wanted: Sequence[str], rows: Sequence[Mapping[str, Any]], where: str) -> None:
    names = frozenset(wanted)
    for i, row in enumerate(rows):
        if row.keys() == names:
            continue
        place = where if where == "user" else f"{where}[{i}]"
        for name in row:
            if name not in names:
                param = f"{place}.{name[:64]}"
                raise BadInput(f"{param}: the model has no such input{hint(name, wanted)}", param=param)
        missing = [name for name in wanted if name not in row]
        raise BadInput(f"{place}: misses {', '.join(missing[:20])}", param=f"{place}.{missing[0]}")


def item_ids(candidates: Sequence[Any], known: int) -> torch.Tensor:
    """Return `(N,)` int64. Raises `BadInput` for anything that is no id of 0 to `known` - 1."""
    for i, each in enumerate(candidates):
        if type(each) is not int or not 0 <= each < known:
            given = str(each)[:40] if isinstance(each, str) else reprlib.repr(each)
            message = f"candidates[{i}]: there is no item {given}; ids are 0 to {known - 1}"
            raise BadInput(message, param=f"candidates[{i}]")
    return torch.tensor(candidates, dtype=torch.int64)


def ranking(scores: npt.NDArray[np.float32], top_k: int | None) -> list[int]:
    """Return the candidates' indices, highest score first, equal ones in their order, NaN last."""
    order = np.argsort(-scores, kind="stable")
    return [int(place) for place in order[:top_k]]
