"""From a body and a catalog to a fully resolved `ImageRequest`. Pure: no clock, no I/O; randomness is an argument.

Everything cheap is checked before the first control image is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from plait_serving.diffusion.admission import (
    ImageLimits,
    check_edit,
    check_numbers,
    check_policy,
    check_spans,
    check_takes,
)
from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.prompt_syntax import hint_of, parse, take_loras
from plait_serving.diffusion.request_fields import given, request_fields
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import (
    MAX_SCALE,
    ControlRef,
    Edit,
    ImageRequest,
    LoraPolicy,
    LoraRef,
    LoraSet,
    PromptSyntax,
    RgbImage,
    Tenant,
)
from plait_serving.http.images.schemas import (
    MAX_LIST,
    MAX_MODEL_CHARS,
    EditBody,
    GenerationBody,
    LoraBody,
)
from plait_serving.images.codec import (
    bounded,
    decode_base64,
    decode_image,
    decode_layers,
    decode_mask,
    image_size,
    resize,
)
from plait_serving.images.service import BaseModelCard, Catalog, Preprocessors
from plait_serving.sections import TenantLimits
from plait_serving.spelling import hint

# The share of steps that bounded_async may run without its LoRAs if the request gives no k. SwiftDiffusion
# (ATC'25) lets about the first 10 of 50 steps run without them.
LORA_FREE_SHARE = 5
RANDOM_SEED = -1  # A1111's way to ask for one
_OPENAIS = ("dall-e", "gpt-image", "chatgpt-image")
"""What names begin with that OpenAI's clients send by themselves."""
_TEXTS = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2")


def resolve(
    body: GenerationBody,
    catalog: Catalog,
    *,
    request_id: str,
    random_seed: int,
    preprocessors: Preprocessors,
    tenant: str = "default",
    allowed: TenantLimits | None = None,
) -> ImageRequest:
    """Return the request with no defaults left open; `allowed` is what its tenant may ask for. Raises `RequestError` or
    `NotFound` naming the field."""
    allowed = TenantLimits() if allowed is None else allowed
    model, named = chosen_model(body.model, catalog)
    limits = model.limits
    upload = _bytes(body.image, "image") if isinstance(body, EditBody) else None
    shape = None if upload is None else image_size(upload, param="image")
    width, height = _size(body, shape, model)
    prompt, tags = _read_prompts(body)
    samplers, scheduler = model.terms.samplers, model.default_scheduler
    if upload is not None and not model.terms.reads_images and scheduler not in samplers.starts:
        scheduler = samplers.default
    defaults = {
        "scheduler": scheduler,
        "steps": model.default_steps,
        "guidance_scale": model.default_guidance_scale,
    }
    request = ImageRequest(
        request_id=request_id,
        **{**defaults, **given(body, ImageRequest)},
        prompt=prompt,
        width=width,
        height=height,
        seed=random_seed if body.seed is None or body.seed == RANDOM_SEED else body.seed,
        loras=_loras({"model": named, "loras": body.loras or [], "prompt": tags}, catalog, limits),
        deadline_s=None if body.deadline_ms is None else body.deadline_ms / 1000.0,
        wants_progress=bool(body.stream),
        tenant=Tenant(name=tenant, weight=allowed.weight, queued_s=allowed.queued_s),
        model=model.name,
    )
    check_numbers(request, limits, model.terms)
    _check_allowed(request, allowed)
    _check_stream(request)
    preprocess = _preprocessing(body, catalog, model, preprocessors)
    if isinstance(body, EditBody) and upload is not None:
        request = _edited(request, body, upload, model.terms)
        check_takes(request, model.terms)
    if request.lora_policy is LoraPolicy.BOUNDED_ASYNC and "lora_free_steps" not in given(body, ImageRequest):
        request = replace(request, lora_free_steps=request.run_steps // LORA_FREE_SHARE)
    check_policy(request)
    if not request.loras:
        request = replace(request, lora_free_steps=0)
    return replace(request, controlnets=_controls(body, preprocess, width, height))


def _read_prompts(body: GenerationBody) -> tuple[str, list[LoraRef]]:
    """Return the prompt and the LoRAs that it names. Raises `RequestError` naming the field whose marks are wrong."""
    if body.prompt_syntax is not PromptSyntax.A1111:
        return body.prompt, []
    prompt, loras = take_loras(body.prompt, "prompt")
    for name in _TEXTS:
        if text := prompt if name == "prompt" else getattr(body, name):
            parse(text, name)
    return prompt, [LoraRef(name=name, scale=scale) for name, scale in loras]


def hints(body: GenerationBody, terms: RequestTerms) -> list[str]:
    """Return what a client may have meant otherwise: marks in prompts that are read to the letter."""
    if body.prompt_syntax is not None:
        return []
    found = [(name, hint_of(getattr(body, name) or "")) for name in _TEXTS]
    takes = "prompt_syntax" in terms.takes
    why = "with prompt_syntax: a1111 it is a mark" if takes else "this model knows no marks, and LoRAs go into loras"
    return [f"{name}: {mark!r} was read to the letter; {why}" for name, mark in found if mark is not None]


def _check_allowed(request: ImageRequest, allowed: TenantLimits) -> None:
    """Raise `RequestError` for more than the tenant may ask for."""
    asked = (
        ("size", "pixels", request.width * request.height, allowed.max_pixels),
        ("num_inference_steps", "steps", request.steps, allowed.max_steps),
        ("n", "images", request.n, allowed.max_images),
    )
    for param, what, count, most in asked:
        if most is not None and count > most:
            raise RequestError(f"your key allows at most {most} {what}, not {count}", param=param)


def _check_stream(request: ImageRequest) -> None:
    if request.wants_progress and request.n > 1:
        raise RequestError("streaming is only supported with n=1", param="n")  # OpenAI's own rule and words
    if request.partial_images and not request.wants_progress:
        raise RequestError("partial_images needs stream: true", param="partial_images")


def _size(body: GenerationBody, shape: tuple[int, int] | None, model: BaseModelCard) -> tuple[int, int]:
    """Return the output's size: an edit without one has its image's, rounded down; of a model that reads the image, in
    its shape and of the model's own area."""
    if body.size is not None:
        return body.size
    if shape is None:
        return model.default_width, model.default_height
    limits, scale = model.limits, 1.0
    if model.terms.reads_images:
        scale = math.sqrt(model.default_width * model.default_height / math.prod(shape))
    edges = (round(scale * edge) for edge in shape)
    width, height = (edge - edge % limits.size_multiple for edge in edges)
    if min(width, height) < limits.min_edge_px or max(width, height) > limits.max_edge_px:
        raise RequestError(
            f"the image is {shape[0]}x{shape[1]}, edges go from {limits.min_edge_px} to {limits.max_edge_px} "
            "pixels: give a size",
            param="size",
        )
    return width, height


def _loras(parts: Mapping[str, Sequence[LoraRef | LoraBody]], catalog: Catalog, limits: ImageLimits) -> LoraSet:
    """Return the set, given by the fields that name its parts."""
    room = limits.max_loras
    for field, part in parts.items():
        room -= len(part)
        if room < 0:
            raise RequestError(f"at most {limits.max_loras} LoRAs", param=field)
    scales: dict[str, float] = {}
    names = dict.fromkeys(card.name for card in catalog.loras) if any(parts.values()) else {}
    for field, part in parts.items():
        for i, lora in enumerate(part):
            param = f"loras.{i}.name" if field == "loras" else field
            name = composed(lora.name)
            if name in scales:
                raise RequestError(f"LoRA {name!r} is given twice; add the scales", param=param)
            if name not in names:
                raise NotFound(f"there is no LoRA {name[:64]!r}{hint(name, names)}", param=param)
            scales[name] = float(lora.scale)
    return tuple(LoraRef(name=name, scale=scale) for name, scale in scales.items())


def _preprocessing(
    body: GenerationBody, catalog: Catalog, model: BaseModelCard, preprocessors: Preprocessors
) -> list[Callable[[RgbImage], RgbImage] | None]:
    """Check the ControlNets; return what makes each one's map of an ordinary image, None where the map is sent."""
    bodies, found = body.controlnets or [], list[Callable[[RgbImage], RgbImage] | None]()
    check_spans([(control.start, control.end) for control in bodies], model.limits)
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
        name = (control.preprocess if isinstance(control.preprocess, str) else card.preprocessor) or ""
        if control.preprocess and name not in preprocessors:
            known = ", ".join(sorted(preprocessors)) or "none"
            near = hint(name, preprocessors) or f"; this server has: {known}"
            message = f"no preprocessor for ControlNet {control.name!r}{near}"
            raise RequestError(message, param=f"controlnets.{i}.preprocess")
        found.append(preprocessors[name] if control.preprocess else None)
    return found


def _controls(
    body: GenerationBody,
    preprocessing: list[Callable[[RgbImage], RgbImage] | None],
    width: int,
    height: int,
) -> tuple[ControlRef, ...]:
    """Decode, stretch to the output's size and preprocess, one image after the other to bound memory."""
    controls = []
    for i, (control, preprocess) in enumerate(zip(body.controlnets or [], preprocessing, strict=True)):
        param = f"controlnets.{i}.image"
        raw = decode_base64(control.image, param=param)
        image = decode_image(raw, param=param, paper="black" if preprocess is None else "white")
        image = resize(image, width=width, height=height)
        image = image if preprocess is None else preprocess(image)
        controls.append(ControlRef(name=control.name, image=image, **given(control, ControlRef)))
    return tuple(controls)


def chosen_model(text: str | None, catalog: Catalog) -> tuple[BaseModelCard, list[LoraRef]]:
    """Return the base model and the LoRAs that a request's `model` names. Raises `NotFound` or `RequestError`.

    It is a base model, an alias, or a base model with LoRAs, as `emoji+noto:0.8+pixel`: so every client of OpenAI's API
    reaches LoRAs, which know no fields but its own. Names may hold a + themselves: of those that there are, the longest
    counts.
    """
    if text is None:
        return catalog.model, []
    if len(text) > MAX_MODEL_CHARS:
        raise RequestError(f"a model's name has at most {MAX_MODEL_CHARS} characters", param="model")
    text = "+".join(map(composed, text.split("+")))  # nothing is composed with a +
    card, alias = catalog.base(text), catalog.alias(text)
    if card is not None:
        return card, []
    if alias is not None:
        loras = [LoraRef(name=name, scale=scale) for name, scale in alias.loras.items()]
        return _base(alias.model, catalog), loras
    name, rest = _first(text, [base.name for base in catalog.models if "+" in base.name])
    names = [lora.name for lora in catalog.loras if "+" in lora.name]
    parts: list[str] = []
    while rest is not None and len(parts) <= MAX_LIST:  # more than a set may have
        part, rest = _first(rest, names)
        parts.append(part)
    return _base(name, catalog), [_lora(part) for part in parts]


def _first(text: str, names: Iterable[str]) -> tuple[str, str | None]:
    """Split a text at its first + that is in none of the names, which have one, that it may begin with; None: there is
    none."""
    whole = [name for name in names if text.startswith(name) and text[len(name) : len(name) + 1] in "+:"]
    end = text.find("+", len(max(whole, key=len, default="")))
    return (text, None) if end < 0 else (text[:end], text[end + 1 :])


def _base(name: str, catalog: Catalog) -> BaseModelCard:
    card, alias = catalog.base(name), catalog.alias(name)
    if card is None and alias is not None and not alias.loras:
        card = catalog.base(alias.model)
    if card is None and alias is not None:
        raise RequestError(f"{name!r} is an alias, which takes no more LoRAs; name its model instead", param="model")
    if card is None:
        known = [*(base.name for base in catalog.models), *(alias.name for alias in catalog.aliases)]
        near = hint(name, known) or f"; this server has {', '.join(map(repr, known))}"
        near += "; images.aliases may give a model that name" if name.startswith(_OPENAIS) else ""
        raise NotFound(f"there is no model {name[:100]!r}{near}", param="model")
    return card


def _lora(text: str) -> LoraRef:
    name, colon, scale = text.partition(":")
    try:
        value = float(scale) + 0.0 if colon else 1.0  # no negative zero
    except ValueError:
        value = math.nan
    if not name or not abs(value) <= MAX_SCALE:
        raise RequestError(f"{text[:64]!r} is not NAME or NAME:SCALE", param="model")
    return LoraRef(name=name, scale=value)


IMG2IMG_STRENGTH = 0.8
"""What diffusers' Img2Img pipeline takes by default; its Inpaint pipeline takes 1."""


def _edited(request: ImageRequest, body: EditBody, raw: bytes, terms: RequestTerms) -> ImageRequest:
    """Return a request with the image `raw` decoded: as its edit, image and mask stretched to the output's size, or as
    its reference, transparent pixels white. Raises `RequestError` naming the field."""
    image, mask = decode_layers(raw, param="image")
    if body.mask is not None:
        mask = decode_mask(_bytes(body.mask, "mask"), param="mask")
        if mask.shape != image.shape[:2]:
            sizes = f"the mask is {mask.shape[1]}x{mask.shape[0]}, the image {image.shape[1]}x{image.shape[0]}"
            raise RequestError(f"{sizes}: they must be of one size", param="mask")
        if mask.max() < 128:
            message = "nothing is to be made anew: no pixel of the mask is transparent, and none is white"
            raise RequestError(message, param="mask")
    elif terms.reads_images:
        for name in request_fields(Edit):
            if getattr(body, name) is not None:
                raise RequestError("this model reads the image, and starts from noise", param=name)
        return replace(request, reference=image)
    width, height, strength = request.width, request.height, body.strength
    if strength is None:
        strength = IMG2IMG_STRENGTH if mask is None else 1.0
    edit = Edit(
        image=resize(image, width=width, height=height),
        mask=None if mask is None else resize(mask, width=width, height=height),
        strength=float(strength),
        overlay=body.overlay is not False,
        rounds_up=terms.rounds_up,
    )
    check_edit(edit, request.steps)
    return replace(request, edit=edit)


def _bytes(upload: str | bytes, param: str) -> bytes:
    return decode_base64(upload, param=param) if isinstance(upload, str) else bounded(upload, param=param)
