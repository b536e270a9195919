"""From a body and a catalog to a fully resolved `ImageRequest`. Pure: no clock, no I/O; randomness is an argument.

Everything cheap is checked before the first control image is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from plait_serving.diffusion.admission import ImageLimits, check_sampler
from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import (
    MAX_SEED,
    ControlRef,
    ImageRequest,
    LoraPolicy,
    LoraRef,
    LoraSet,
    Scheduler,
    Sigmas,
)
from plait_serving.http.edge.tenants import TenantLimits, tenant_of
from plait_serving.http.images.editing import Upload, upload_of
from plait_serving.http.images.naming import chosen_model
from plait_serving.http.images.prompting import prompts_of
from plait_serving.http.images.schemas import ControlNetBody, EditBody, GenerationBody, LoraBody
from plait_serving.images.codec import DecodeLimits, decode_base64, decode_image, resize
from plait_serving.images.service import BaseModelCard, Catalog, Preprocessors
from plait_serving.spelling import hint

# The share of steps that bounded_async may run without its LoRAs if the request gives no k. SwiftDiffusion
# (ATC'25) lets about the first 10 of 50 steps run without them.
LORA_FREE_SHARE = 5
RANDOM_SEED = -1  # A1111's way to ask for one

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def resolve(
    body: GenerationBody,
    catalog: Catalog,
    *,
    request_id: str,
    random_seed: int,
    preprocessors: Preprocessors,
    decode_limits: DecodeLimits,
    tenant: str = "default",
    allowed: TenantLimits | None = None,
) -> ImageRequest:
    """Return the request with no defaults left open; `allowed` is what its tenant may ask for. Raises `RequestError` or
    `NotFound` naming the field."""
    allowed = TenantLimits() if allowed is None else allowed
    model, named = chosen_model(body.model, catalog)
    upload = upload_of(body, decode_limits) if isinstance(body, EditBody) else None
    width, height = _size(_asked_size(body, upload, model.limits), model)
    steps = _steps(body, model)
    n = body.n or 1
    _check_allowed(allowed, pixels=width * height, steps=steps, images=n, limits=model.limits)
    scheduler = model.default_scheduler if body.scheduler is None else Scheduler(body.scheduler)
    sigmas = None if body.sigmas is None else Sigmas(body.sigmas)
    check_sampler(scheduler, sigmas, body.eta or 0.0, model.samplers)
    seed = _seed(body, n, random_seed)
    _check_stream(body, n)
    prompts = prompts_of(body)
    given = {"model": named, "loras": body.loras or [], "prompt": prompts.loras}
    loras = _loras(given, catalog, model.limits)
    _check_controlnets(body, catalog, model, preprocessors)
    edit = None if upload is None else upload.edit(width=width, height=height, steps=steps)
    run_steps = steps if edit is None else edit.steps_of(steps)
    policy, free_steps = _lora_policy(body, run_steps, loras)
    return ImageRequest(
        request_id=request_id,
        **prompts.fields,
        width=width,
        height=height,
        steps=steps,
        guidance_scale=model.default_guidance_scale if body.guidance_scale is None else body.guidance_scale,
        seed=seed,
        scheduler=scheduler,
        sigmas=sigmas,
        eta=body.eta or 0.0,
        guidance_rescale=body.guidance_rescale or 0.0,
        clip_skip=body.clip_skip or 0,
        n=n,
        loras=loras,
        controlnets=_controls(
            body, catalog, width=width, height=height, preprocessors=preprocessors, limits=decode_limits
        ),
        edit=edit,
        lora_policy=policy,
        lora_free_steps=free_steps,
        deadline_s=None if body.deadline_ms is None else body.deadline_ms / 1000.0,
        partial_images=body.partial_images or 0,
        wants_progress=bool(body.stream),
        tenant=tenant_of(tenant, allowed),
        model=model.name,
    )


def _check_allowed(allowed: TenantLimits, *, pixels: int, steps: int, images: int, limits: ImageLimits) -> None:
    """Raise `RequestError` for more than the model, or the tenant, takes."""
    if images > limits.max_images:
        raise RequestError(f"at most {limits.max_images} images", param="n")
    asked = (
        ("size", "pixels", pixels, allowed.max_pixels),
        ("num_inference_steps", "steps", steps, allowed.max_steps),
        ("n", "images", images, allowed.max_images),
    )
    for param, what, count, most in asked:
        if most is not None and count > most:
            raise RequestError(f"your key allows at most {most} {what}, not {count}", param=param)


def _asked_size(body: GenerationBody, upload: Upload | None, limits: ImageLimits) -> str | None:
    """Return the size that a request asks for: an edit without one asks for its image's, rounded down."""
    if upload is None or body.size not in (None, "auto"):
        return body.size
    width, height = (edge - edge % limits.size_multiple for edge in (upload.width, upload.height))
    if min(width, height) < limits.min_edge_px or max(width, height) > limits.max_edge_px:
        raise RequestError(
            f"the image is {upload.width}x{upload.height}, edges go from {limits.min_edge_px} to {limits.max_edge_px} "
            "pixels: give a size",
            param="size",
        )
    return f"{width}x{height}"


def _size(text: str | None, model: BaseModelCard) -> tuple[int, int]:
    if text is None or text == "auto":
        return model.default_width, model.default_height
    match = _SIZE.fullmatch(text)
    if match is None:
        raise RequestError('size is "WIDTHxHEIGHT" in pixels, for example "512x512", or "auto"', param="size")
    width, height = int(match[1]), int(match[2])
    limits = model.limits
    if width % limits.size_multiple or height % limits.size_multiple:
        raise RequestError(f"both edges must be multiples of {limits.size_multiple} pixels", param="size")
    if min(width, height) < limits.min_edge_px or max(width, height) > limits.max_edge_px:
        raise RequestError(f"edges go from {limits.min_edge_px} to {limits.max_edge_px} pixels", param="size")
    if width * height > limits.max_pixels:
        raise RequestError(f"{width}x{height} is more than {limits.max_pixels} pixels", param="size")
    return width, height


def _steps(body: GenerationBody, model: BaseModelCard) -> int:
    steps = model.default_steps if body.num_inference_steps is None else body.num_inference_steps
    if steps > model.limits.max_steps:
        raise RequestError(f"at most {model.limits.max_steps} steps", param="num_inference_steps")
    return steps


def _seed(body: GenerationBody, n: int, random_seed: int) -> int:
    seed = random_seed if body.seed is None or body.seed == RANDOM_SEED else body.seed
    if seed + n - 1 > MAX_SEED:
        raise RequestError(f"seed + n - 1 must not be above {MAX_SEED}", param="seed")
    return seed


def _check_stream(body: GenerationBody, n: int) -> None:
    if body.stream and n > 1:
        raise RequestError("streaming is only supported with n=1", param="n")  # OpenAI's own rule and words
    if body.partial_images and not body.stream:
        raise RequestError("partial_images needs stream: true", param="partial_images")


def _loras(given: Mapping[str, Sequence[LoraBody]], catalog: Catalog, limits: ImageLimits) -> LoraSet:
    """Return the set, given by the fields that name its parts."""
    room = limits.max_loras
    for field, part in given.items():
        room -= len(part)
        if room < 0:
            raise RequestError(f"at most {limits.max_loras} LoRAs", param=field)
    scales: dict[str, float] = {}
    names = dict.fromkeys(card.name for card in catalog.loras) if any(given.values()) else {}
    for field, part in given.items():
        for i, lora in enumerate(part):
            param = f"loras.{i}.name" if field == "loras" else field
            name = composed(lora.name)
            if name in scales:
                raise RequestError(f"LoRA {name!r} is given twice; add the scales", param=param)
            if name not in names:
                raise NotFound(f"there is no LoRA {name[:64]!r}{hint(name, names)}", param=param)
            scales[name] = float(lora.scale)
    return tuple(LoraRef(name=name, scale=scale) for name, scale in scales.items())


def _lora_policy(body: GenerationBody, steps: int, loras: LoraSet) -> tuple[LoraPolicy, int]:
    policy = LoraPolicy(body.lora_policy or "exact")
    given = body.lora_free_steps
    if policy is LoraPolicy.EXACT:
        if given:
            raise RequestError("lora_free_steps needs lora_policy: bounded_async", param="lora_free_steps")
        return policy, 0
    if given is not None and given >= steps:
        raise RequestError(f"with {steps} steps the LoRAs would never act", param="lora_free_steps")
    if not loras:
        return policy, 0
    return policy, steps // LORA_FREE_SHARE if given is None else given


def _check_controlnets(
    body: GenerationBody, catalog: Catalog, model: BaseModelCard, preprocessors: Preprocessors
) -> None:
    bodies = body.controlnets or []
    if len(bodies) > model.limits.max_controlnets:
        raise RequestError(f"at most {model.limits.max_controlnets} ControlNets", param="controlnets")
    for i, control in enumerate(bodies):
        card, param = catalog.controlnet(control.name), f"controlnets.{i}.name"
        if card is None:
            near = hint(control.name, [card.name for card in catalog.controlnets])
            raise NotFound(f"there is no ControlNet {control.name!r}{near}", param=param)
        if model.controlnets is not None and control.name not in model.controlnets:
            raise RequestError(
                f"ControlNet {control.name!r} is for {card.family} models; {model.name!r} takes "
                f"{', '.join(model.controlnets) or 'none'}",
                param=param,
            )
        if control.start >= control.end:
            raise RequestError("end must be above start", param=f"controlnets.{i}.end")
        if control.preprocess is False:
            continue
        name = _preprocessor(control, catalog)
        if name is None or name not in preprocessors:
            known = ", ".join(sorted(preprocessors)) or "none"
            near = hint(name or "", preprocessors) or f"; this server has: {known}"
            message = f"no preprocessor for ControlNet {control.name!r}{near}"
            raise RequestError(message, param=f"controlnets.{i}.preprocess")


def _preprocessor(control: ControlNetBody, catalog: Catalog) -> str | None:
    if isinstance(control.preprocess, str):
        return control.preprocess
    card = catalog.controlnet(control.name)
    return None if card is None else card.preprocessor


def _controls(
    body: GenerationBody,
    catalog: Catalog,
    *,
    width: int,
    height: int,
    preprocessors: Preprocessors,
    limits: DecodeLimits,
) -> tuple[ControlRef, ...]:
    """Decode, stretch to the output's size and preprocess, one image after the other to bound memory."""
    controls = []
    for i, control in enumerate(body.controlnets or []):
        param = f"controlnets.{i}.image"
        raw = decode_base64(control.image, param=param, limits=limits)
        ordinary = control.preprocess is not False
        image = decode_image(raw, param=param, limits=limits, paper="white" if ordinary else "black")
        image = resize(image, width=width, height=height)
        name = _preprocessor(control, catalog) if ordinary else None
        controls.append(
            ControlRef(
                name=control.name,
                image=image if name is None else preprocessors[name](image),
                scale=float(control.scale),
                start=float(control.start),
                end=float(control.end),
            )
        )
    return tuple(controls)
