"""From a body and a catalog to a fully resolved `ImageRequest`. Pure: no clock, no I/O; randomness is an argument.

Everything cheap is checked before the first control image is decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plait_serving.diffusion.admission import ImageLimits, check_sampler
from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import (
    MAX_SCALE,
    MAX_SEED,
    ControlRef,
    Edit,
    GreyImage,
    ImageRequest,
    LoraPolicy,
    LoraRef,
    LoraSet,
    RgbImage,
    Scheduler,
    Sigmas,
)
from plait_serving.http.edge.tenants import TenantLimits, tenant_of
from plait_serving.http.images.prompting import prompts_of
from plait_serving.http.images.schemas import MAX_LIST, ControlNetBody, EditBody, GenerationBody, LoraBody
from plait_serving.images.codec import (
    DecodeLimits,
    decode_base64,
    decode_image,
    decode_layers,
    decode_mask,
    image_size,
    resize,
)
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


def chosen_model(text: str | None, catalog: Catalog) -> tuple[BaseModelCard, list[LoraBody]]:
    """Return the base model and the LoRAs that a request's `model` names. Raises `NotFound` or `RequestError`.

    It is a base model, an alias, or a base model with LoRAs, as `emoji+noto:0.8+pixel`: so every client of OpenAI's API
    reaches LoRAs, which know no fields but its own. Names may hold a + themselves: of those that there are, the longest
    counts.
    """
    if text is None:
        return catalog.model, []
    text = "+".join(map(composed, text.split("+")))  # nothing is composed with a +
    card, alias = catalog.base(text), catalog.alias(text)
    if card is not None:
        return card, []
    if alias is not None:
        return _base(alias.model, catalog), _bodies(alias.loras)
    name, rest = _first(text, [base.name for base in catalog.models if "+" in base.name])
    names = [lora.name for lora in catalog.loras if "+" in lora.name]
    parts: list[str] = []
    while rest is not None and len(parts) <= MAX_LIST:  # more than a set may have
        part, rest = _first(rest, names)
        parts.append(part)
    return _base(name, catalog), _bodies(dict(map(_lora, _once_each(parts))))


def _first(text: str, names: Iterable[str]) -> tuple[str, str | None]:
    """Split a text at its first + that is in none of the names, which have one, that it may begin with; None: there is
    none."""
    whole = [name for name in names if text.startswith(name) and text[len(name) : len(name) + 1] in "+:"]
    end = text.find("+", len(max(whole, key=len, default="")))
    return (text, None) if end < 0 else (text[:end], text[end + 1 :])


def _base(name: str, catalog: Catalog) -> BaseModelCard:
    card = catalog.base(name)
    if card is None and catalog.alias(name) is not None:
        raise RequestError(f"{name!r} is an alias, which takes no more LoRAs; name its model instead", param="model")
    if card is None:
        known = [*(base.name for base in catalog.models), *(alias.name for alias in catalog.aliases)]
        near = hint(name, known) or f"; this server has {', '.join(map(repr, known))}"
        raise NotFound(f"there is no model {name[:100]!r}{near}", param="model")
    return card


def _once_each(parts: list[str]) -> list[str]:
    names = [part.partition(":")[0] for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"LoRA {name[:64]!r} is given twice; add the scales", param="model")
    return parts


def _lora(text: str) -> tuple[str, float]:
    name, colon, scale = text.partition(":")
    try:
        value = float(scale) + 0.0 if colon else 1.0  # no negative zero
    except ValueError:
        value = math.nan
    if not name or not abs(value) <= MAX_SCALE:
        raise RequestError(f"{text[:64]!r} is not NAME or NAME:SCALE", param="model")
    return name, value


def _bodies(loras: Mapping[str, float]) -> list[LoraBody]:
    return [LoraBody.model_construct(name=name, scale=scale) for name, scale in loras.items()]


IMG2IMG_STRENGTH = 0.8
"""What diffusers' Img2Img pipeline takes by default; its Inpaint pipeline takes 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upload:
    """The image file of an edit, not decoded yet; `width` and `height` are its own, upright."""

    body: EditBody
    limits: DecodeLimits
    raw: bytes
    width: int
    height: int

    def edit(self, *, width: int, height: int, steps: int) -> Edit:
        """Decode image and mask, stretched to the output's size. Raises `RequestError` naming the field."""
        image, mask = self._layers()
        strength = self.body.strength
        if strength is None:
            strength = IMG2IMG_STRENGTH if mask is None else 1.0
        edit = Edit(
            image=resize(image, width=width, height=height),
            mask=None if mask is None else resize(mask, width=width, height=height),
            strength=float(strength),
            overlay=self.body.overlay is not False,
        )
        if not edit.steps_of(steps):
            raise RequestError(f"{strength:g} of {steps} steps is not a whole step", param="strength")
        return edit

    def _layers(self) -> tuple[RgbImage, GreyImage | None]:
        image, clear = decode_layers(self.raw, param="image", limits=self.limits)
        if self.body.mask is None:
            return image, clear
        mask = decode_mask(_bytes(self.body.mask, "mask", self.limits), param="mask", limits=self.limits)
        if mask.shape != image.shape[:2]:
            sizes = f"the mask is {mask.shape[1]}x{mask.shape[0]}, the image {self.width}x{self.height}"
            raise RequestError(f"{sizes}: they must be of one size", param="mask")
        if mask.max() < 128:
            raise RequestError(
                "nothing is to be made anew: no pixel of the mask is transparent, and none is white", param="mask"
            )
        return image, mask


def upload_of(body: EditBody, limits: DecodeLimits) -> Upload:
    """Return the image of an edit; only its header is read. Raises `RequestError` naming `image`."""
    raw = _bytes(body.image, "image", limits)
    width, height = image_size(raw, param="image", limits=limits)
    return Upload(body=body, limits=limits, raw=raw, width=width, height=height)


def _bytes(upload: str | bytes, param: str, limits: DecodeLimits) -> bytes:
    if isinstance(upload, str):
        return decode_base64(upload, param=param, limits=limits)
    if len(upload) > limits.max_bytes:
        raise RequestError(f"the image is larger than {limits.max_bytes} bytes", param=param)
    return upload
