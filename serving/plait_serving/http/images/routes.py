"""`POST /v1/images/generations` and `/v1/images/edits`: OpenAI's image API with LoRA sets, ControlNets and seeds per
request; and `/v1/images/control_maps`: what a ControlNet would see of an image, without making one."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait_serving.diffusion.errors import DeadlineMissed, EngineError, NotFound, Overloaded
from plait_serving.diffusion.request_fields import echoed
from plait_serving.diffusion.values import (
    Finished,
    ImageRequest,
    ImageResult,
    Preview,
    Progress,
    RgbImage,
)
from plait_serving.http.context import ContextDep, RouteContext, get_context
from plait_serving.http.edge import sse
from plait_serving.http.edge.auth import principal
from plait_serving.http.edge.counters import MODEL
from plait_serving.http.edge.errors import ClientDisconnected, wire_error
from plait_serving.http.edge.feed import EventFeed, News, finished, until_disconnect
from plait_serving.http.edge.json_body import JsonRoute
from plait_serving.http.edge.refusals import REFUSED_HEADER, Refused, repeated
from plait_serving.http.edge.request_id import ENDED
from plait_serving.http.edge.turn_threads import READING
from plait_serving.http.images.edit_body import EDIT_REQUEST, read_edit
from plait_serving.http.images.resolve import hints, resolve
from plait_serving.http.images.results import Keep, keeper
from plait_serving.http.images.schemas import (
    ControlMapBody,
    ControlMapResponse,
    ControlNetBody,
    EditBody,
    EditResponse,
    GenerationBody,
    GenerationResponse,
    TimingsBody,
)
from plait_serving.images.codec import OutputFormat, encode_image
from plait_serving.images.infotext import infotext
from plait_serving.images.service import BaseModelCard, Catalog

_log = logging.getLogger(__name__)


class RefusingRoute(JsonRoute):
    """A route that answers a tenant whose refusal stands without reading its body, and notes the engine's refusals."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; FastAPI calls this once for each route."""
        handle = super().get_route_handler()

        async def unless_refused(request: Request) -> Response:
            context, tenant = get_context(request), principal(request).tenant
            if count := repeated(request.headers):
                context.metrics.observe_repeated(request.scope, tenant, count)
                _log.info("tenant %s: %d more requests were refused in the proxy", tenant, count)
            if (standing := context.refusals.standing(tenant)) is not None:
                refused = _still(standing, context.monotonic_s())
                context.metrics.observe_refused(tenant, refused.code)
                return _marked(refused, request)
            began_s = context.monotonic_s()
            try:
                return await handle(request)
            except Overloaded as error:
                if not isinstance(error, _StillRefused):
                    context.refusals.note(tenant, error, took_s=context.monotonic_s() - began_s)
                return _marked(error, request)

        return unless_refused


class _StillRefused(Overloaded):
    """A refusal of before, which is not news."""


def _still(standing: Refused[Overloaded], now_s: float) -> _StillRefused:
    """Return a refusal with what is left of its time."""
    error = standing.refusal
    left_s = None if error.retry_after_s is None else max(0.0, error.retry_after_s - (now_s - standing.at_s))
    return _StillRefused(error.message, param=error.param, retry_after_s=left_s)


def _marked(error: Overloaded, request: Request) -> Response:
    response = wire_error(error).response(request.url.path)
    response.headers[REFUSED_HEADER] = "tenant"
    return response


router = APIRouter(prefix="/v1/images", tags=["images"], route_class=RefusingRoute)
reading = APIRouter(prefix="/v1/images", tags=["images"], route_class=JsonRoute)
"""The routes that make no images, only what a model would read."""

_STREAM_CONTENT = {
    "text/event-stream": {"schema": {"type": "string", "description": "with stream: true; OpenAI's events"}}
}


@router.post(
    "/generations",
    summary="Make images",
    response_class=Response,
    responses={200: {"model": GenerationResponse, "content": _STREAM_CONTENT}},
)
async def generate(body: GenerationBody, request: Request, context: ContextDep) -> Response:
    """Make `n` images of one prompt, or stream one image's partial images as server-sent events."""
    return await _respond(body, request, context)


@router.post(
    "/edits",
    summary="Edit an image",
    response_class=Response,
    responses={200: {"model": EditResponse, "content": _STREAM_CONTENT}},
    openapi_extra=EDIT_REQUEST,
)
async def edit(request: Request, context: ContextDep) -> Response:
    """Make `n` images from an image, as a whole or within a mask, as `generations` does. JSON, or a form as OpenAI's
    clients send it."""
    return await _respond(await read_edit(request), request, context)


async def _respond(body: GenerationBody, request: Request, context: RouteContext) -> Response:
    ends_s = None if body.deadline_ms is None else context.monotonic_s() + body.deadline_ms / 1000.0
    stream = _open_stream(body, request, context, ends_s) if body.stream else None
    return await while_wanted(_in_time(stream or _generate(body, request, context), ends_s, context), request, context)


async def while_wanted(work: Coroutine[Any, Any, Response], request: Request, context: RouteContext) -> Response:
    """Run what makes images until its client leaves, and count an end without any."""
    try:
        return await until_disconnect(request.receive, work)
    except (ClientDisconnected, asyncio.CancelledError):
        context.metrics.cancelled.inc()
        raise
    except _StillRefused as error:
        context.metrics.observe_refused(principal(request).tenant, error.code)
        raise
    except Exception as error:
        context.metrics.observe_failure(error)
        raise


async def _in_time(work: Coroutine[Any, Any, Response], ends_s: float | None, context: RouteContext) -> Response:
    """Run `work` until its deadline, whatever the engine does by then. Raises `DeadlineMissed`."""
    try:
        async with asyncio.timeout(None if ends_s is None else ends_s - context.monotonic_s()):
            return await work
    except TimeoutError as error:
        raise _late() from error


def _late() -> DeadlineMissed:
    return DeadlineMissed("the deadline passed before the images were there", param="deadline_ms")


async def _generate(body: GenerationBody, request: Request, context: RouteContext) -> Response:
    job = await resolved(body, request, context)
    keep = await keeper(body, request, context)
    result = await result_of(job.request, context)
    encode = partial(job.response_json, result, created=int(context.now_s()), keep=keep)
    content = await context.workers.run(job.request.tenant.name, encode)
    return Response(content, media_type="application/json")


async def result_of(
    request: ImageRequest, context: RouteContext, told: Callable[[Progress], None] = lambda _: None
) -> ImageResult:
    """Return what the service makes of a request, whose progress is `told`. Raises the request's error."""
    with context.metrics.in_flight.track_inprogress():
        result = await finished(context.image_service.generate(request), told)
    context.metrics.observe_images(len(result.images), result.timings)
    return result


async def _open_stream(body: GenerationBody, request: Request, context: RouteContext, ends_s: float | None) -> Response:
    """Wait briefly for the first event, so that a refusal still gets a proper status, then start the stream."""
    job = await resolved(body, request, context)
    await keeper(body, request, context)  # refuses URLs, which a stream has no place for
    feed = EventFeed(context.image_service.generate(job.request))
    try:
        first = await feed.next(context.settings.first_event_wait_s)
    except BaseException:
        await feed.aclose()
        raise
    return sse.EventStream(_chunks(feed, first, job, request, ends_s))


async def _chunks(
    feed: EventFeed, event: News | None, job: ImageReply, request: Request, ends_s: float | None
) -> AsyncGenerator[bytes, None]:
    context = get_context(request)
    context.metrics.in_flight.inc()
    try:
        while not isinstance(event, Finished):
            yield await _going_on(event, job, context)
            left_s = math.inf if ends_s is None else ends_s - context.monotonic_s()
            event = await feed.next(max(0.0, min(left_s, context.settings.ping_interval_s)))
            if event is None and left_s <= context.settings.ping_interval_s:
                raise _late()
        context.metrics.observe_images(len(event.result.images), event.result.timings)
        encode = partial(job.completed_event, event.result, created=int(context.now_s()))
        last = await context.workers.run(job.request.tenant.name, encode)
        request.scope["state"][ENDED] = 200  # clients may hang up on the last event
    except (GeneratorExit, asyncio.CancelledError):
        context.metrics.cancelled.inc()
        raise
    except Exception as error:  # the status line is gone; the stream's last event tells what happened
        context.metrics.observe_failure(error)
        answer = wire_error(error)
        last, request.scope["state"][ENDED] = sse.error_event(answer.body), answer.status
    finally:
        context.metrics.in_flight.dec()
        await feed.aclose()
    yield last


async def _going_on(event: Progress | Preview | None, job: ImageReply, context: RouteContext) -> bytes:
    if event is None:
        return sse.PING
    if isinstance(event, Progress):
        return sse.progress_comment(event.step, event.steps)
    encode = partial(job.partial_event, event, created=int(context.now_s()))
    return await context.workers.run(job.request.tenant.name, encode)


async def resolved(body: GenerationBody, request: Request, context: RouteContext) -> ImageReply:
    """Return an accepted request, with no defaults left open. Raises `RequestError`, `NotFound` or `Overloaded`."""
    try:
        return await _resolve_by(await context.image_service.catalog(), body, request, context)
    except NotFound:  # what came a moment ago
        return await _resolve_by(await context.image_service.catalog(anew=True), body, request, context)


async def _resolve_by(catalog: Catalog, body: GenerationBody, request: Request, context: RouteContext) -> ImageReply:
    # Of many that come at once the first that is refused speaks for the others, which were let through before it.
    if (held := context.refusals.held(principal(request).tenant)) is not None:
        raise _still(held, context.monotonic_s())
    asked = await accepted(body, catalog, request, context)
    model = catalog.base(asked.model) or catalog.model
    request.scope["state"][MODEL] = model.name
    return ImageReply(body=body, request=asked, model=model, http_id=request.state.request_id)


async def accepted(body: GenerationBody, catalog: Catalog, request: Request, context: RouteContext) -> ImageRequest:
    """Return what a body asks for, as the caller's tenant may. Raises `RequestError` or `NotFound`."""
    tenant = principal(request).tenant
    work = partial(
        resolve,
        body,
        catalog,
        request_id=f"{request.state.request_id}.{secrets.token_hex(4)}",  # unique, even if a client sends one id twice
        random_seed=context.random_seed(),
        preprocessors=context.settings.preprocessors,
        tenant=tenant,
        allowed=context.settings.tenants.get(tenant),
    )
    if body.controlnets or isinstance(body, EditBody):
        return await context.decoder.run(tenant, work)
    # marks may take some 10 ms to read
    return await READING.run(tenant, work) if body.prompt_syntax == "a1111" else work()


@reading.post("/control_maps", summary="What a ControlNet would see")
async def control_map(body: ControlMapBody, request: Request, context: ContextDep) -> ControlMapResponse:
    """Return the map that a generation with this entry of `controlnets` would use: stretched to the output's size, and
    with `preprocess` made from an ordinary image."""
    catalog = await context.image_service.catalog(anew=True)
    control = ControlNetBody(name=body.name, image=body.image, preprocess=body.preprocess)
    wanted: dict[str, Any] = {"size": body.size, "num_inference_steps": 1, "controlnets": [control]}
    takes = (card.name for card in catalog.models if card.controlnets is None or body.name in card.controlnets)
    generation = GenerationBody(prompt="-", model=next(takes, None), **wanted)
    try:
        asked = await accepted(generation, catalog, request, context)
        encode = partial(encode_image, asked.controlnets[0].image, OutputFormat.PNG)
        encoded = await context.workers.run(asked.tenant.name, encode)
    except EngineError as error:
        if error.param is not None:
            error.param = error.param.removeprefix("controlnets.0.")
        raise
    return ControlMapResponse(b64_json=base64_of(encoded), size=f"{asked.width}x{asked.height}")


def base64_of(encoded: bytes) -> str:
    """Return bytes as text for JSON."""
    return base64.b64encode(encoded).decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReply:
    """One accepted request and how its images are reported; the methods that encode run in threads."""

    body: GenerationBody
    request: ImageRequest
    model: BaseModelCard
    http_id: str

    def response_json(self, result: ImageResult, *, created: int, keep: Keep | None) -> bytes:
        """Return the whole response in the form of `schemas.GenerationResponse`; with `keep` it has URLs."""
        made = enumerate(zip(result.images, result.seeds, result.flagged, strict=True))
        data = [
            {**self._shown(image, index, keep), "seed": seed, "flagged": flagged}
            for index, (image, seed, flagged) in made
        ]
        return json.dumps({"id": self.http_id, "created": created, "data": data, **self._facts(result)}).encode()

    def partial_event(self, preview: Preview, *, created: int) -> bytes:
        """Return OpenAI's event for a partial image."""
        encoded = base64_of(self.encoded(preview.image, None))
        return self._event("partial_image", created, {"b64_json": encoded, "partial_image_index": preview.index})

    def completed_event(self, result: ImageResult, *, created: int) -> bytes:
        """Return OpenAI's event for the finished image, with everything that the plain response contains."""
        image = {**self._shown(result.images[0], 0, None), "flagged": result.flagged[0]}
        return self._event("completed", created, image, **self._facts(result), id=self.http_id)

    def _shown(self, image: RgbImage, index: int, keep: Keep | None) -> dict[str, str]:
        encoded = self.encoded(image, index)
        return {"b64_json": base64_of(encoded)} if keep is None else {"url": keep(encoded, self.body.format)}

    def encoded(self, image: RgbImage, index: int | None) -> bytes:
        """Return an image as a file; with the text of image `index` in it, if that is given."""
        text = None if index is None else self.text(index)
        quality = 100 if self.body.output_compression is None else self.body.output_compression
        return encode_image(image, self.body.format, quality=quality, parameters=text)

    def text(self, index: int) -> str:
        """Return the parameters of an image, as A1111 writes them."""
        return infotext(self.request, model=self.model.name, index=index)

    def hints(self, result: ImageResult | None) -> list[str]:
        """Return what may not be meant as it was written. None: there are no images."""
        return [*hints(self.body, self.model.terms), *(() if result is None else result.hints)]

    def _event(self, kind: str, created: int, image: dict[str, object], **more: object) -> bytes:
        """Return an event of an image, with what OpenAI's always carry."""
        fields = {
            "created_at": created,
            "size": f"{self.request.width}x{self.request.height}",
            "quality": "auto",
            "background": "opaque",
            "output_format": self.body.format.value,
        }
        about = "image_edit" if isinstance(self.body, EditBody) else "image_generation"
        return sse.event(f"{about}.{kind}", {**image, **fields, **more})

    def _facts(self, result: ImageResult) -> dict[str, object]:
        """Return what is needed to make the same images again, and where the time went."""
        request, timings = self.request, result.timings
        return {
            "model": self.model.name,
            "dtype": self.model.dtype,
            "size": f"{request.width}x{request.height}",
            "output_format": self.body.format.value,
            "seed": request.seed,
            **echoed(request),
            **({} if request.edit is None else echoed(request.edit)),
            "lora_policy": result.lora_policy.value,
            "lora_free_steps": result.lora_free_steps,
            "timings": {stage: round(getattr(timings, f"{stage}_s"), 6) for stage in TimingsBody.model_fields},
            "ignored": self.body.ignored,
            "hints": self.hints(result),
        }
