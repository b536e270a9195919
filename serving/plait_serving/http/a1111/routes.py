"""A1111's API (`/sdapi/v1`), where `server.a1111_api` turns it on: what clients of stable-diffusion-webui ask for.

The forms of answers are those of stable-diffusion-webui's `modules/api`. No answer names a file or a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.values import ImageResult, Progress, Sigmas
from plait_serving.http.a1111.bodies import (
    CHECKPOINT,
    Img2Img,
    Txt2Img,
    asked,
    check_unchanged,
    checkpoint_in,
    options_of,
)
from plait_serving.http.context import ContextDep, RouteContext
from plait_serving.http.edge.auth import Principal, principal
from plait_serving.http.edge.json_body import JsonRoute
from plait_serving.http.images.resolve import chosen_model
from plait_serving.http.images.routes import ImageReply, RefusingRoute, base64_of, resolved, result_of, while_wanted
from plait_serving.images.codec import decode_base64
from plait_serving.images.infotext import SAMPLER_NAMES, SPACING_NAMES, read_parameters, settings_of

router = APIRouter(prefix="/sdapi/v1", route_class=JsonRoute, include_in_schema=False)
making = APIRouter(prefix="/sdapi/v1", route_class=RefusingRoute, include_in_schema=False)
"""The routes that make images."""

Who = Annotated[Principal, Depends(principal)]

_NAMES = {
    "num_inference_steps": "steps", "guidance_scale": "cfg_scale", "scheduler": "sampler_name", "sigmas": "scheduler",
    "n": "batch_size", "size": "width", "strength": "denoising_strength", "image": "init_images", "model": CHECKPOINT,
    "clip_skip": "override_settings.CLIP_stop_at_last_layers", "controlnets": "alwayson_scripts.controlnet",
}  # fmt: skip
"""A1111's names of plait's fields."""
_OF_UNITS = {"name": "model", "preprocess": "module", "scale": "weight", "start": "guidance_start",
             "end": "guidance_end"}  # fmt: skip
"""sd-webui-controlnet's names of the members of `controlnets`."""

_NONE_HERE: dict[str, Any] = {
    "cmd-flags": {}, "embeddings": {"loaded": {}, "skipped": {}}, "extensions": [], "face-restorers": [],
    "hypernetworks": [], "latent-upscale-modes": [], "memory": {"ram": {}, "cuda": {}}, "prompt-styles": [],
    "realesrgan-models": [], "script-info": [], "sd-vae": [],
    "scripts": {"txt2img": ["controlnet"], "img2img": ["controlnet"]},
    "upscalers": [{"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}],
}  # fmt: skip
"""What clients ask for when they start, and there is nothing of here."""


@making.post("/txt2img")
async def txt2img(given: Txt2Img, request: Request, context: ContextDep, who: Who) -> Response:
    """Make images."""
    return await while_wanted(_made(given, request, context, who.tenant), request, context)


@making.post("/img2img")
async def img2img(given: Img2Img, request: Request, context: ContextDep, who: Who) -> Response:
    """Make images from one."""
    return await while_wanted(_made(given, request, context, who.tenant), request, context)


async def _made(given: Txt2Img, request: Request, context: RouteContext, tenant: str) -> Response:
    read = partial(asked, given, await context.desk.checkpoint(tenant))
    service = context.image_service
    with _in_their_words():
        try:
            body, hints = await context.decoder.run(tenant, partial(read, await service.catalog()))
        except NotFound:  # what came a moment ago
            body, hints = await context.decoder.run(tenant, partial(read, await service.catalog(anew=True)))
        reply = await resolved(body, request, context)
    made = replace(reply.request, wants_progress=True)
    with _in_their_words(), context.desk.opened(tenant, made.run_steps) as job:

        def told(progress: Progress) -> None:
            job.step = progress.step

        result = await job.run(result_of(made, context, told))
    answer = partial(_answer, reply, result, given, hints)
    return Response(await context.workers.run(tenant, answer), media_type="application/json")


@contextmanager
def _in_their_words(names: Mapping[str, str] = _NAMES) -> Iterator[None]:
    """Have errors say A1111's name of the field: in its form there is a sentence alone."""
    try:
        yield
    except ValidationError as error:
        found = [{**each, "loc": _their_names(each["loc"], names)} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from error
    except RequestError as error:
        name = ".".join(map(str, _their_names(tuple((error.param or "").split(".")), names)))
        if name in error.message:
            raise
        raise type(error)(f"{name}: {error.message}", param=error.param) from error


def _their_names(place: tuple[int | str, ...], names: Mapping[str, str]) -> tuple[int | str, ...]:
    if not place:
        return place
    if place[0] == "loras":
        return ("prompt",)  # which has their tags
    members = _OF_UNITS if place[0] == "controlnets" else {}
    return (names.get(str(place[0]), place[0]), *(members.get(str(each), each) for each in place[1:]))


def _answer(reply: ImageReply, result: ImageResult | None, given: Txt2Img, hints: list[str]) -> bytes:
    """Return the response; one that was interrupted has no images."""
    images, seeds = ((), ()) if result is None else (result.images, result.seeds)
    sent = images if given.send_images else ()
    asked, count = reply.request, len(images)
    texts = [reply.text(index) for index in range(count)]
    negative = asked.negative_prompt or ""
    info = {
        "prompt": asked.prompt, "all_prompts": [asked.prompt] * count,
        "negative_prompt": negative, "all_negative_prompts": [negative] * count,
        "seed": asked.seed, "all_seeds": list(seeds), "subseed": -1, "all_subseeds": [-1] * count,
        "subseed_strength": 0, "width": asked.width, "height": asked.height,
        "sampler_name": SAMPLER_NAMES[asked.scheduler], "cfg_scale": asked.guidance_scale, "steps": asked.steps,
        "batch_size": given.batch_size, "restore_faces": False, "face_restoration_model": None,
        "sd_model_name": reply.model.name, "sd_model_hash": None, "sd_vae_name": None, "sd_vae_hash": None,
        "seed_resize_from_w": -1, "seed_resize_from_h": -1,
        "denoising_strength": None if asked.edit is None else asked.edit.strength,
        "extra_generation_params": {}, "index_of_first_image": 0, "infotexts": texts, "styles": [],
        "job_timestamp": "", "clip_skip": asked.clip_skip + 1, "is_using_inpainting_conditioning": False,
        "interrupted": result is None, "hints": [*hints, *reply.hints(result)],
    }  # fmt: skip
    left_out = ("init_images", "mask", "alwayson_scripts")
    parameters = {name: value for name, value in given if name not in left_out}  # as they came: JSON, all of them
    encoded = [base64_of(reply.encoded(image, index)) for index, image in enumerate(sent)]
    return json.dumps({"images": encoded, "parameters": parameters, "info": json.dumps(info)}).encode()


@router.get("/options")
async def options(context: ContextDep, who: Who) -> dict[str, Any]:
    """Return the options of the caller's tenant."""
    return options_of(await _checkpoint(context, who.tenant))


async def _checkpoint(context: RouteContext, tenant: str) -> str:
    return await context.desk.checkpoint(tenant) or (await context.image_service.catalog()).model.name


@router.post("/options")
async def set_options(given: dict[str, Any], context: ContextDep, who: Who) -> None:
    """Choose the model of the tenant's requests that name none, on this API. Other options stay as they are."""
    current = options_of(await _checkpoint(context, who.tenant))
    changed = {key: value for key, value in given.items() if key != CHECKPOINT}
    check_unchanged(changed, current)
    model = checkpoint_in(given.get(CHECKPOINT))
    if model is not None and model != current[CHECKPOINT]:
        with _in_their_words():
            chosen_model(model, await context.image_service.catalog(anew=True))
        await context.desk.choose(who.tenant, model)


@router.get("/progress")
async def progress(context: ContextDep, who: Who) -> dict[str, Any]:
    """Return how far the tenant's oldest request is."""
    jobs = await context.desk.jobs(who.tenant)
    first = max(jobs, key=lambda job: job.age_s, default=None)
    done, step, steps, eta_s = 0.0, 0, 0, 0.0
    if first is not None:
        done, step, steps = first.progress, first.step, first.steps
        eta_s = first.age_s / done - first.age_s
    state = {
        "skipped": False, "interrupted": False, "stopping_generation": False, "job": "" if first is None else "txt2img",
        "job_count": len(jobs), "job_timestamp": "0", "job_no": 0, "sampling_step": step, "sampling_steps": steps,
    }  # fmt: skip
    return {"progress": done, "eta_relative": eta_s, "state": state, "current_image": None, "textinfo": None}


@router.post("/interrupt")
async def interrupt(context: ContextDep, who: Who) -> dict[str, Any]:
    """Give up what the tenant has running through this API."""
    await context.desk.jobs(who.tenant, interrupts=True)
    return {}


@router.get("/sd-models")
async def sd_models(context: ContextDep) -> list[dict[str, Any]]:
    """Return the models, and the names that stand for one."""
    catalog = await context.image_service.catalog(anew=True)
    names = [*(card.name for card in catalog.models), *(alias.name for alias in catalog.aliases)]
    unknown = dict.fromkeys(("hash", "sha256", "config"))
    return [{"title": name, "model_name": name, "filename": name, **unknown} for name in names]


@router.get("/loras")
async def loras(context: ContextDep) -> list[dict[str, Any]]:
    """Return what `<lora:NAME:1>` may name."""
    catalog = await context.image_service.catalog(anew=True)
    return [{"name": card.name, "alias": card.name, "path": card.name, "metadata": {}} for card in catalog.loras]


@router.get("/samplers")
async def samplers(context: ContextDep) -> list[dict[str, Any]]:
    """Return the samplers of all models."""
    models = (await context.image_service.catalog()).models
    taken = {sampler for card in models for sampler in card.terms.samplers.among}
    names = [(name, sampler.value) for sampler, name in SAMPLER_NAMES.items() if sampler in taken]
    return [{"name": name, "aliases": [value], "options": {}} for name, value in names]


@router.get("/schedulers")
async def schedulers() -> list[dict[str, Any]]:
    """Return the spacings of noise levels."""
    names = [("automatic", "Automatic"), *((each.value, SPACING_NAMES[each]) for each in Sigmas)]
    unset = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return [{"name": name, "label": label, **unset} for name, label in names]


class PngInfo(BaseModel):
    """`POST /sdapi/v1/png-info`; JPEG and WebP are read as well."""

    image: str


@router.post("/png-info")
async def png_info(given: PngInfo, context: ContextDep, who: Who) -> dict[str, Any]:
    """Return what an image says about its making."""

    def read() -> tuple[str, dict[str, str]]:
        raw = decode_base64(given.image.strip(), param="image")
        text = read_parameters(raw) or ""
        return text, settings_of(text) if text else {}

    with _in_their_words({}):  # its image is called so there, too
        text, found = await context.decoder.run(who.tenant, read)
    return {"info": text, "items": {"parameters": text} if text else {}, "parameters": found}


@router.post("/refresh-checkpoints")
@router.post("/refresh-loras")
async def refresh(context: ContextDep) -> dict[str, Any]:
    """Look for what is there now; lists do so by themselves."""
    await context.image_service.catalog(anew=True)
    return {}


def _nothing(answer: Any) -> Callable[[], Any]:
    def answers() -> JSONResponse:
        return JSONResponse(answer)

    return answers


for _name, _answered in _NONE_HERE.items():
    router.add_api_route(f"/{_name}", _nothing(_answered), methods=["GET"])
