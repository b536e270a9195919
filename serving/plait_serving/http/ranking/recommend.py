"""`POST /v1/recommend`: simple ranking. A user's features and candidates in, the best items first out."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import OFFSETS, Bag, Dense, Input, Side, tensor_names
from plait_disagg.messages.check import check_request
from plait_disagg.values import RankRequest
from plait_serving.http.context import ContextDep
from plait_serving.http.edge.auth import principal
from plait_serving.http.edge.json_body import MAX_DEADLINE_MS, JsonRoute, StrictBody
from plait_serving.http.edge.limits import declared_bytes
from plait_serving.http.ranking.infer import rank, unique_id
from plait_serving.ranking.codec import Array, array_of, hint
from plait_serving.ranking.local import BoundModel, LocalRankingService

PATH = "/v1/recommend"

router = APIRouter(tags=["ranking"], route_class=JsonRoute)

# What so long a body says is read in about a millisecond; the way to a thread and back takes some 0.1 ms.
_INLINE_BYTES = 16 << 10

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


@router.post(
    PATH,
    summary="Rank items for a user",
    response_class=Response,
    responses={200: {"model": RecommendResponse}},
)
async def recommend(body: RecommendBody, request: Request, context: ContextDep) -> Response:
    """Rank the candidates for the user by the model's first output."""
    start_s = context.monotonic_s()
    bound = context.ranking_service.get(body.model or _only(context.ranking_service))
    deadline_s = None if body.deadline_ms is None else start_s + body.deadline_ms / 1e3
    ask = partial(_question, body, bound, unique_id(request.scope["state"]), deadline_s)
    is_short, tenant = 0 < declared_bytes(request.scope) <= _INLINE_BYTES, principal(request).tenant
    asked, ids = ask() if is_short else await context.workers.run(tenant, ask)
    answer = await rank(context, bound, asked, tenant=tenant)
    scores = answer.outputs[next(iter(bound.card.outputs))].numpy().reshape(asked.candidates, -1)[:, 0]
    items = _items(bound, ids, scores, body.top_k)
    total_ms = (context.monotonic_s() - start_s) * 1e3
    timings = {**asdict(answer.timings), "total_ms": total_ms}
    content = {
        "model": bound.name,
        "items": items,
        "timings": {name: round(value, 3) for name, value in timings.items()},
    }
    return Response(orjson.dumps(content), media_type="application/json")


def _only(models: LocalRankingService) -> str:
    names = models.names()
    if len(names) == 1:
        return names[0]
    raise BadInput(f"model: name one of {', '.join(names)}", param="model")


def _question(
    body: RecommendBody, bound: BoundModel, request_id: str, deadline_s: float | None
) -> tuple[RankRequest, list[int] | None]:
    """Check the body; return the request, with the candidates' ids if the body gave ids. Raises `BadInput`, naming the
    field of the body."""
    if not bound.side("item"):
        raise BadInput(f"model {bound.name} has no item-side inputs: it cannot rank items", param="model")
    ids = _ids(body.candidates, bound)
    try:
        with np.errstate(over="ignore"):  # infinity is refused by the check of values
            arrays = arrays_of(bound.side("user"), [body.user], "user")
            if ids is None:
                arrays |= arrays_of(bound.side("item"), body.candidates, "candidates")
            tensors = bound.binder.bind(arrays)
        if ids is not None:
            assert bound.items is not None
            tensors |= bound.items.gather(ids)
        request = check_request(bound.card, tensors, request_id=request_id, deadline_s=deadline_s)
    except BadInput as error:
        raise BadInput(error.message, param=_place(error.param, bound)) from error
    return request, None if ids is None else ids.tolist()


def _ids(candidates: Any, bound: BoundModel) -> torch.Tensor | None:
    """Return the candidates' ids; None if they are objects."""
    if type(candidates) is list:
        _check_count(len(candidates), bound.card.largest_candidates)
        if all(type(each) is dict for each in candidates):
            return None
    elif candidates != ALL:
        raise BadInput(f'candidates: must be a list, or "{ALL}"', param="candidates")
    if bound.items is None:
        wanted = ", ".join(item.name for item in bound.side("item"))
        message = f"candidates: model {bound.name} knows no items by id; send objects with {wanted}"
        raise BadInput(message, param="candidates")
    known = len(bound.items)
    if candidates != ALL:
        return item_ids(candidates, known)
    _check_count(known, bound.card.largest_candidates)
    return torch.arange(known)


def _check_count(count: int, largest: int) -> None:
    if not 1 <= count <= largest:
        raise BadInput(f"candidates: there are {count}; a request may have 1 to {largest}", param="candidates")


def _place(param: str | None, bound: BoundModel) -> str | None:
    """Return where in the body an input is."""
    sides: tuple[tuple[Side, str], ...] = (("user", "user"), ("item", "candidates"))
    for side, where in sides:
        if param in tensor_names(bound.side(side)):
            return f"{where}.{param}"
    return param


def _items(
    bound: BoundModel, known: list[int] | None, scores: npt.NDArray[np.float32], top_k: int | None
) -> list[dict[str, Any]]:
    places = ranking(scores, top_k)
    if known is None:
        return [{"index": place, "score": float(scores[place])} for place in places]
    ids = [known[place] for place in places]
    names = None if bound.items is None else bound.items.names(ids)
    items = [{"id": id_, "score": float(scores[place])} for id_, place in zip(ids, places, strict=True)]
    if names is None:
        return items
    return [{**item, "name": name} for item, name in zip(items, names, strict=True)]


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
            arrays[item.name + OFFSETS] = np.cumsum([0, *map(len, bags)])
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
    return tuple(name for name in tensor_names((item,)) if name != item.name + OFFSETS)


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
