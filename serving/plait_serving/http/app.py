"""The FastAPI application around an `ImageService`, a `LocalRankingService`, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait_disagg.errors import RankError
from plait_serving.diffusion.values import NAME_PATTERN
from plait_serving.http import document, models, operations
from plait_serving.http.a1111 import routes as a1111
from plait_serving.http.context import HttpSettings, RouteContext, installed_version
from plait_serving.http.edge.auth import identify
from plait_serving.http.edge.errors import ApiError, BodyRefused, ClientDisconnected, wire_error
from plait_serving.http.edge.hosts import HostCheck, OriginMiddleware, TrustedProxies
from plait_serving.http.edge.limits import BodyLimitMiddleware, RateLimits
from plait_serving.http.edge.refusals import IMAGE_PATHS
from plait_serving.http.edge.request_id import RequestIdMiddleware
from plait_serving.http.images import results
from plait_serving.http.images import routes as images
from plait_serving.http.images.schemas import EditBody
from plait_serving.http.page import routes as page
from plait_serving.images.service import ImageService
from plait_serving.spelling import choice_hint, fields_at, hint, plain

if TYPE_CHECKING:
    from plait_serving.ranking.local import LocalRankingService  # which needs torch

# What users of other servers type first.
ALIASES = {
    "steps": "num_inference_steps",
    "cfg_scale": "guidance_scale",
    "sampler": "scheduler",
    "sampler_name": "scheduler",
    "lora": "loras",
    "lora_path": "loras",
    "prompt_3": "prompt",  # T5's of SD3, which reads that here
    "negative_prompt_3": "negative_prompt",
    "controlnet": "controlnets",
    "width": "size",
    "height": "size",
    "denoising_strength": "strength",
    "mask_image": "mask",
    "init_image": "image",
    "images": "image",
}

_ENTRIES = {"loras": '{"name": "NAME", "scale": 1.0}', "controlnets": '{"name": "NAME", "image": "BASE64"}'}
"""An entry of each list of objects."""

_TUNING = "/v1/tuning"

# Our metrics are at /metrics. FastAPI's own look for OpenTelemetry providers in every request, and Ray sets some up.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}


class _App(FastAPI):
    """A FastAPI application that answers HEAD wherever it does GET, and whose schema includes the hot route, which
    FastAPI does not see."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI call. Of an answer to HEAD the server of HTTP leaves out the body."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the schema; it is built once, when all ranking models have told what they take."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        schema, examples, names = super().openapi(), dict[str, Any](), dict[str, str]()
        if (ranking := self.state.context.ranking) is not None:
            from plait_serving.http.ranking.describe import first_bodies
            from plait_serving.http.ranking.v2 import INFER_PATHS, infer_documentation

            schema["paths"].update({path: infer_documentation(path) for path in INFER_PATHS})
            try:
                first = ranking.get(ranking.names()[0])
                examples, names = first_bodies(first), {"model": first.name, "version": first.card.version}
            except RankError:
                self.openapi_schema = None
        document.complete(schema, examples, names)
        return schema

    @cached_property
    def operations(self) -> Mapping[str, tuple[str, ...]]:
        """The methods of each path of the schema, whatever models have told: whoever asks for paths that are none must
        not have a schema built each time."""
        return {path: tuple(methods) for path, methods in self.openapi()["paths"].items()}


def create_app(
    images: ImageService | None,
    settings: HttpSettings,
    *,
    ranking: LocalRankingService | None = None,
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """Return the application of a server in one process."""
    return app_from_context(RouteContext(images=images, settings=settings, ranking=ranking), routers=routers)


def app_from_context(
    context: RouteContext,
    *,
    routers: Sequence[APIRouter] = (),
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Return the application, with only the routes of what is given, and any additional `routers`. FastAPI's own
    documentation pages are off: they load scripts from a CDN; `page` has one that does not."""
    app = _App(
        title="plait",
        version=installed_version(),
        description="Images over the OpenAI Images API, with LoRA sets and ControlNets per request; "
        "recommendations over the Open Inference Protocol v2.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    app.state.context = context
    _add_routes(app, context)
    for router in routers:
        app.include_router(router)
    settings, refused = context.settings, context.metrics.observe_refused
    checks: list[Callable[[Scope], None]] = [
        TrustedProxies(settings.trusted_proxies),
        HostCheck(settings.allowed_hosts, origins=settings.allowed_origins, keys=settings.api_keys),
        partial(identify, keys=settings.api_keys, anyone=settings.anyone),
        RateLimits(settings.tenants, context.monotonic_s, refused),
    ]
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=settings.max_body_bytes,
        max_total_bytes=settings.max_bodies_bytes,
        refused=refused,
    )
    app.add_middleware(RequestIdMiddleware, checks=checks, observe=context.metrics.observe_answer)
    if settings.allowed_origins:
        app.add_middleware(OriginMiddleware, origins=settings.allowed_origins)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _client_gone)
    return app


def _add_routes(app: FastAPI, context: RouteContext) -> None:
    """Add the hot route first, because routes are tried in order. Ranking routes need torch, which takes long to load,
    so a server of images alone does without them."""
    if context.ranking is not None:
        from plait_serving.http.ranking import recommend, v2

        app.router.routes[:0] = v2.infer_routes(context)
        context.metrics.expect((*v2.INFER_PATHS, recommend.PATH))
        for router in (v2.router, recommend.router):
            app.include_router(router)
    if context.images is not None:
        context.metrics.expect(IMAGE_PATHS)
        for router in (images.router, images.reading, results.router, models.image_router):
            app.include_router(router)
        if context.settings.a1111_api:
            for router in (a1111.making, a1111.router):
                app.include_router(router)
    for router in (models.router, operations.router, page.router):
        app.include_router(router)


async def _client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)  # nobody reads it; the log and the metrics do


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer the errors that Starlette itself raises: no such route, wrong method, an unreadable body."""
    assert isinstance(error, HTTPException)
    if isinstance(error, BodyRefused):
        return wire_error(error.error).response(request.url.path)
    where = f"{request.method} {request.url.path}"
    routes = request.app.operations if error.status_code in (404, 405) else {}
    taken = f"; it takes {', '.join(routes[request.url.path]).upper()}" if request.url.path in routes else ""
    key = ""
    if request.url.path.startswith("/sdapi/") and not request.app.state.context.settings.a1111_api:
        key = "server.a1111_api"
    elif request.url.path.startswith(_TUNING) and not any(path.startswith(_TUNING) for path in routes):
        key = "tuning.enabled"
    instead = f"; {key}: true turns it on" if key else hint(request.url.path, routes)
    message, code = {
        404: (f"there is no route {where}{instead}", "unknown_route"),
        405: (f"{where} is not allowed{taken}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), "http_error"))
    return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.url.path)


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    declared = request.scope["route"].body_field  # edits read theirs themselves
    body = EditBody if declared is None else declared.field_info.annotation
    return validation_error(error.errors(), body).response(request.url.path)


def validation_error(errors: Sequence[Any], body: type[BaseModel]) -> ApiError:
    """Return the first of pydantic's errors as a 400 with a dotted `param`; the message counts the others. An unknown
    field goes first: that another is missing often follows from it. `body`: what was to be read, for hints."""
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    if path[:1] in (["body"], ["query"]):  # where it was; a field may be called so, too
        path = path[1:]
    param = ".".join(path) if path else None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "string_unicode":  # a lone surrogate; pydantic does not say where in a field's name
        where = "" if param is None else f"{param[:200]}: "
        return ApiError(400, f"{where}not valid Unicode{more}", code="invalid_value", param=param)
    if param is None:
        message = "the body must be a JSON object, sent with content-type: application/json"
        return ApiError(400, message + more, code="invalid_body")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param[:200]}: unknown field{_hint(path, body)}{more}", code="unknown_field", param=param
        )
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    message = _own_words(path, first) or f"{plain(first['msg'])}{choice_hint(first)}".replace("a mapping", "an object")
    return ApiError(400, f"{param[:200]}: {message}{more}", code=code, param=param)


def _hint(path: Sequence[str], body: type[BaseModel]) -> str:
    """Suggest the nearest real field for a misspelt one, at any depth."""
    known = fields_at(body, path)
    alias = ALIASES.get(path[-1]) if len(path) == 1 else None
    return f"; did you mean {alias}?" if alias in known else hint(path[-1], known)


def _own_words(path: Sequence[str], error: Mapping[str, Any]) -> str | None:
    """Return what to write instead of a name, or of a single entry, where a list of objects belongs."""
    example = _ENTRIES.get(path[0])
    if example is None or len(path) > 2 or error["type"] not in ("list_type", "model_type", "model_attributes_type"):
        return None
    given = error.get("input")
    name = given if isinstance(given, str) and NAME_PATTERN.fullmatch(given) else "NAME"
    entry = example.replace("NAME", name)
    return f"write [{entry}], a list" if len(path) == 1 else f"write {entry}, an object"
