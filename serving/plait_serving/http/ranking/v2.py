"""The Open Inference Protocol v2 of KServe, Triton and others, over the rankers: everything but `infer`.

The status alone decides the protocol's health responses; ours also report in JSON what is missing. `example` is our
addition. Tensors: `ranking/codec.py` (the bytes) and `ranking/inputs.py` (the inputs of a model).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait_disagg.errors import BadInput, WorkerUnavailable
from plait_disagg.refresh.errors import BadUpdate, NotPublished
from plait_serving.http.context import ContextDep, RouteContext, installed_version
from plait_serving.http.edge.auth import require_admin
from plait_serving.http.edge.json_body import JsonRoute, StrictBody
from plait_serving.http.ranking.describe import MAX_EXAMPLE, example, metadata
from plait_serving.http.ranking.infer import Infer
from plait_serving.ranking.codec import DTYPES
from plait_serving.ranking.local import why_not_ready

router = APIRouter(prefix="/v2", tags=["ranking"], route_class=JsonRoute)

EXTENSIONS = ("binary_tensor_data",)
INFER_PATHS = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
ADMIN = Depends(require_admin)
_NO_STORE = {"cache-control": "no-store"}


def infer_routes(context: RouteContext) -> list[Route]:
    """Return the hot path's routes; FastAPI's own would validate what `Infer` reads itself."""
    infer = Infer(context)
    return [_HotRoute(path, endpoint=infer, methods=["POST"]) for path in INFER_PATHS]


class _HotRoute(Route):
    """Puts itself into the scope as the route, which FastAPI does only for its own routes."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the request with the route in its scope."""
        scope["route"] = self
        await super().handle(scope, receive, send)


def _content(tensors: str) -> dict[str, Any]:
    """Return the two forms of a body whose tensors are its `inputs` or `outputs`."""
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"type": "string", "enum": list(DTYPES)},
            "parameters": {"type": "object"},
            "data": {"type": "array", "items": {}},
        },
    }
    properties = {"id": {"type": "string"}, tensors: {"type": "array", "items": tensor}}
    return {
        "application/json": {"schema": {"type": "object", "required": [tensors], "properties": properties}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }


_NOT_READY = {
    "description": "Not ready; `error` says what is missing",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}


def infer_documentation(path: str) -> dict[str, Any]:
    """Return the OpenAPI documentation of a hot route."""
    names = [name for name in ("model", "version") if f"{{{name}}}" in path]
    return {
        "post": {
            "tags": ["ranking"],
            "summary": "Rank: tensors in, tensors out",
            "description": "JSON or the binary tensor extension. GET /v2/models/{model}/example gives a first body.",
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ],
            "requestBody": {"required": True, "content": _content("inputs")},
            "responses": {"200": {"description": "The outputs", "content": _content("outputs")}},
        }
    }


@router.get("", summary="The server")
async def server() -> dict[str, Any]:
    """Return the name, the version, and the supported extensions of the protocol."""
    return {"name": "plait", "version": installed_version(), "extensions": list(EXTENSIONS)}


@router.get("/health/live", summary="Does the server run?")
async def live() -> JSONResponse:
    """Return 200 as long as the server runs."""
    return JSONResponse({"live": True}, headers=_NO_STORE)


@router.get("/health/ready", summary="Would every model answer now?", responses={503: _NOT_READY})
async def ready(context: ContextDep) -> JSONResponse:
    """Return 200 if every model is ready, else 503 with the reason."""
    state = await context.health("ranking")
    return _ready(None if state.ready else state.reason or "not ready")


@router.get("/models/{model}/ready", summary="Would the model answer now?", responses={503: _NOT_READY})
@router.get(
    "/models/{model}/versions/{version}/ready", summary="Would the model answer now?", responses={503: _NOT_READY}
)
async def model_ready(context: ContextDep, model: str, version: str | None = None) -> JSONResponse:
    """Return 200 if the model is ready, else 503 with the reason; 404 if there is no such model."""
    bound = context.ranking_service.get(model, version)
    return _ready(await why_not_ready(bound.ranker), name=bound.name)


@router.get("/models/{model}/example", summary="A request that can be posted as it is")
@router.get("/models/{model}/versions/{version}/example", summary="A request that can be posted as it is")
async def model_example(
    context: ContextDep, model: str, version: str | None = None, candidates: int | None = None
) -> JSONResponse:
    """Return a body for `infer`, always the same for the same number of candidates."""
    bound = context.ranking_service.get(model, version)
    card = bound.card
    largest = min(MAX_EXAMPLE, card.largest_candidates)
    wanted = min(64, largest) if candidates is None else candidates
    if not 1 <= wanted <= largest:
        raise BadInput(f"candidates: must be 1 to {largest}", param="candidates")
    return JSONResponse(example(card, wanted, bound.items))


@router.get("/models/{model}", summary="What the model takes and gives")
@router.get("/models/{model}/versions/{version}", summary="What the model takes and gives")
async def model_metadata(context: ContextDep, model: str, version: str | None = None) -> dict[str, Any]:
    """Return the model's inputs and outputs; -1 stands for the number of candidates, or of ids."""
    return metadata(model, context.ranking_service.get(model, version).card)


class LoadParameters(StrictBody):
    """`update`: the folder of an update on the server's machine (`plait models update` makes one)."""

    update: Annotated[str, Field(min_length=1, max_length=4096)]


class LoadBody(StrictBody):
    """The body of Triton's repository extension, with plait's parameters."""

    parameters: LoadParameters


@router.post("/repository/models/{model}/load", summary="Publish an update of the model", dependencies=[ADMIN])
async def load(context: ContextDep, model: str, body: LoadBody) -> dict[str, Any]:
    """Publish an update and return the version that is served from now on. Needs a key with the role admin.

    A bad update is refused with 400 and a message on what is wrong with it; 503 means try again. Either way the old
    version stays.
    """
    refresh = context.ranking_service.refresh(model)
    if refresh is None:
        raise BadInput(f"model {model!r} cannot be refreshed", param="model")
    try:
        version = await refresh(Path(body.parameters.update))
    except BadUpdate as error:
        raise BadInput(f"the update is refused: {error}", param="parameters.update") from error
    except NotPublished as error:
        raise WorkerUnavailable(f"the update is not published: {error}") from error
    return {"name": model, "version": version}


def _ready(reason: str | None, **more: str) -> JSONResponse:
    """Return the response; clients of the protocol look for `error`."""
    if reason is None:
        return JSONResponse({**more, "ready": True}, headers=_NO_STORE)
    return JSONResponse({**more, "ready": False, "error": reason}, status_code=503, headers=_NO_STORE)
