"""`POST /v1/recommend`: simple ranking. A user's features and candidates in, the best items first out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
import torch
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Side, tensor_names
from plait_disagg.messages.check import check_request
from plait_disagg.values import RankAnswer, RankRequest
from plait_serving.http.context import ContextDep
from plait_serving.http.edge.auth import principal
from plait_serving.http.edge.json_body import JsonRoute, read_bytes
from plait_serving.http.ranking.rank_body import (
    ALL,
    RecommendBody,
    RecommendResponse,
    arrays_of,
    item_ids,
    ranking,
)
from plait_serving.http.ranking.submit import rank, unique_id
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import BoundModel

PATH = "/v1/recommend"

router = APIRouter(tags=["ranking"], route_class=JsonRoute)

# What so long a body says is read in about a millisecond; the way to a thread and back takes some 0.1 ms.
_INLINE_BYTES = 16 << 10

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A checked request, with the candidates' ids if the request gave ids."""

    request: RankRequest
    ids: list[int] | None


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
    ask = partial(_question, body, bound, unique_id(request.scope["state"], next(_numbers)), deadline_s)
    is_large, tenant = read_bytes(request) > _INLINE_BYTES, principal(request).tenant
    question = await context.workers.run(tenant, ask) if is_large else ask()
    answer = await rank(context, bound, question.request, tenant=tenant)
    items = _items(bound, question, answer, body.top_k)
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


def _question(body: RecommendBody, bound: BoundModel, request_id: str, deadline_s: float | None) -> _Question:
    """Check the body. Raises `BadInput`, naming the field of the body."""
    if not bound.side("item"):
        raise BadInput(f"model {bound.name} has no item-side inputs: it cannot rank items", param="model")
    ids = _ids(body.candidates, bound)
    try:
        with np.errstate(over="ignore"):  # infinity is refused by the check of values
            user, _ = bound.user.bind(arrays_of(bound.side("user"), [body.user], "user"))
            tensors = {**user, **_item_tensors(body.candidates, ids, bound)}
        request = check_request(bound.card, tensors, request_id=request_id, deadline_s=deadline_s)
    except BadInput as error:
        raise BadInput(error.message, param=_place(error.param, bound)) from error
    return _Question(request=request, ids=None if ids is None else ids.tolist())


def _ids(candidates: Any, bound: BoundModel) -> torch.Tensor | None:
    """Return the candidates' ids; None if they are objects."""
    if candidates != ALL and type(candidates) is not list:
        raise BadInput(f'candidates: must be a list, or "{ALL}"', param="candidates")
    if candidates != ALL:
        _check_count(len(candidates), bound.card.largest_candidates)
        if all(type(each) is dict for each in candidates):
            return None
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


def _item_tensors(candidates: Any, ids: torch.Tensor | None, bound: BoundModel) -> Mapping[str, torch.Tensor]:
    if ids is not None:
        assert bound.items is not None
        return bound.items.gather(ids)
    return bound.item.bind(arrays_of(bound.side("item"), candidates, "candidates"))[0]


def _place(param: str | None, bound: BoundModel) -> str | None:
    """Return where in the body an input is."""
    sides: tuple[tuple[Side, str], ...] = (("user", "user"), ("item", "candidates"))
    for side, where in sides:
        if param in tensor_names(bound.side(side)):
            return f"{where}.{param}"
    return param


def _items(bound: BoundModel, question: _Question, answer: RankAnswer, top_k: int | None) -> list[dict[str, Any]]:
    first = next(iter(bound.card.outputs))
    scores = answer.outputs[first].numpy().reshape(question.request.candidates, -1)[:, 0]
    places = ranking(np.asarray(scores), top_k)
    if question.ids is None:
        return [{"index": place, "score": float(scores[place])} for place in places]
    ids = [question.ids[place] for place in places]
    names = None if bound.items is None else bound.items.names(ids)
    items = [{"id": id_, "score": float(scores[place])} for id_, place in zip(ids, places, strict=True)]
    if names is None:
        return items
    return [{**item, "name": name} for item, name in zip(items, names, strict=True)]
