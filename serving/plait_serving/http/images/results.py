"""`response_format: url`: results are kept for a while, and fetched by whoever knows their URL."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait_serving.diffusion.errors import RequestError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import RESULTS
from plait_serving.http.edge.errors import RETRY_AFTER_MAX_S, ApiError
from plait_serving.http.images.schemas import GenerationBody
from plait_serving.images.codec import OutputFormat
from plait_serving.images.results import StoreFailed, StoreFull

router = APIRouter(tags=["images"])

Keep: TypeAlias = Callable[[bytes, OutputFormat], str]
"""Keeps an encoded image and returns its URL; blocks."""

_FILE = {
    "content": {f"image/{each.value}": {"schema": {"type": "string", "format": "binary"}} for each in OutputFormat}
}


async def keeper(body: GenerationBody, request: Request, context: RouteContext) -> Keep | None:
    """Return what keeps the images of a request for URLs; None for one that wants base64. Raises `RequestError`, or
    `ApiError` if the store could keep none: before the images are made."""
    store, settings = context.results, context.settings.results
    usual = None if settings is None or body.stream else settings.response_format
    if (body.response_format or usual) != "url":
        return None
    if store is None or settings is None:
        message = "images are not kept on this server (images.results in its configuration): use b64_json"
        raise RequestError(message, param="response_format")
    if body.stream:
        raise RequestError("the events of a stream have images in base64: leave it out", param="response_format")
    base = settings.public_url or str(request.base_url)

    def keep(encoded: bytes, output_format: OutputFormat) -> str:
        try:
            return f"{base.rstrip('/')}{RESULTS}{store.put(encoded, output_format)}"
        except StoreFailed as error:
            raise _answer(error) from error

    try:
        await asyncio.to_thread(store.check)
    except StoreFailed as error:
        raise _answer(error) from error
    return keep


@router.get(RESULTS + "{name}", summary="A kept image", response_class=Response, responses={200: _FILE})
async def result(name: str, context: ContextDep) -> Response:
    """Return an image that a request with `response_format: url` made, until its time is over. Needs no key: its name
    is the secret."""
    try:
        found = None if context.results is None else await asyncio.to_thread(context.results.get, name)
    except StoreFailed as error:
        raise _answer(error) from error
    if found is None:
        raise ApiError(404, "there is no such image, or its time is over", code="not_found")
    headers = {
        "cache-control": f"private, max-age={int(found.left_s)}, immutable",
        "content-security-policy": "default-src 'none'; sandbox",
        "x-content-type-options": "nosniff",
    }
    return Response(found.body, media_type=f"image/{found.output_format.value}", headers=headers)


def _answer(error: StoreFailed) -> ApiError:
    """Translate for the client: a full store has room again later, one that fails needs its operator."""
    if isinstance(error, StoreFull):
        wait_s = min(math.ceil(error.retry_after_s), int(RETRY_AFTER_MAX_S))
        headers = {"retry-after": str(wait_s)}
        return ApiError(503, str(error), code="store_full", kind="server_error", headers=headers)
    headers = {"x-should-retry": "false"}
    return ApiError(500, str(error), code="store_failed", kind="server_error", headers=headers)
