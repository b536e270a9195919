"""`response_format: url`: results are kept for a while, and fetched by whoever knows their URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait_serving.diffusion.errors import RequestError
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import RESULTS
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.images.schemas import GenerationBody
from plait_serving.images.codec import OutputFormat

router = APIRouter(tags=["images"])

Keep: TypeAlias = Callable[[bytes, OutputFormat], str]
"""Keeps an encoded image and returns its URL; blocks."""

_FILE = {
    "content": {f"image/{each.value}": {"schema": {"type": "string", "format": "binary"}} for each in OutputFormat}
}


async def keeper(body: GenerationBody, request: Request, context: RouteContext) -> Keep | None:
    """Return what keeps the images of a request for URLs; None for one that wants base64. Raises `RequestError`, or
    `StoreFailed` if the store could keep none: before the images are made."""
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

    await asyncio.to_thread(store.check)
    return lambda encoded, output_format: f"{base.rstrip('/')}{RESULTS}{store.put(encoded, output_format)}"


@router.get(RESULTS + "{name}", summary="A kept image", response_class=Response, responses={200: _FILE})
async def result(name: str, context: ContextDep) -> Response:
    """Return an image that a request with `response_format: url` made, until its time is over. Needs no key: its name
    is the secret."""
    found = None if context.results is None else await asyncio.to_thread(context.results.get, name)
    if found is None:
        raise ApiError(404, "there is no such image, or its time is over", code="not_found")
    headers = {
        "cache-control": f"private, max-age={int(found.left_s)}, immutable",
        "content-security-policy": "default-src 'none'; sandbox",
        "x-content-type-options": "nosniff",
    }
    return Response(found.body, media_type=f"image/{found.output_format.value}", headers=headers)
