"""Which requests the engine accepts. Pure checks; each raises an error that names the field.

The ingress calls those that need no image before it decodes one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.request_fields import pixels_of, request_fields
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms, SamplerChoice
from plait_serving.diffusion.sources.names import is_name
from plait_serving.diffusion.values import (
    MAX_IMAGES,
    MAX_SEED,
    NAME_PATTERN,
    ControlRef,
    Edit,
    ImageRequest,
    LoraPolicy,
    LoraRef,
    Scheduler,
    Sigmas,
)
from plait_serving.spelling import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The largest request that an engine accepts; the catalog shows the same object to clients.

    Edges are multiples of `size_multiple` pixels: the VAE's factor times what the family's UNet needs. `sizes`: the
    only ones, each a size or a range of them; empty: any.
    """

    size_multiple: int = 8
    min_edge_px: int = 8
    max_edge_px: int = 4096
    sizes: tuple[str, ...] = ()
    max_pixels: int = 4 * 2**20
    max_steps: int = 1000
    max_images: int = MAX_IMAGES
    max_loras: int = 16
    max_controlnets: int = 8
    max_prompt_tokens: int = 750  # ten times what a text encoder reads at once


def check_request(
    request: ImageRequest,
    limits: ImageLimits,
    *,
    loras: Container[str],
    controlnets: Container[str],
    terms: RequestTerms,
) -> None:
    """Raise `RequestError` or `NotFound`, naming the field, unless the request can run."""
    check_numbers(request, limits, terms)
    if request.edit is not None:
        _check_arrays(request, request.edit)
        check_edit(request.edit, request.steps)
    check_policy(request)
    for i, lora in enumerate(request.loras):
        _check_name(lora.name, f"loras.{i}.name", "LoRA", loras, is_well_formed=is_name(lora.name))
        _check_fields(lora, f"loras.{i}.")
    if len({lora.name for lora in request.loras}) < len(request.loras):
        raise RequestError("a LoRA may appear only once in a set", param="loras")
    check_spans([(control.start, control.end) for control in request.controlnets], limits)
    for i, control in enumerate(request.controlnets):
        is_well_formed = NAME_PATTERN.fullmatch(control.name) is not None
        _check_name(control.name, f"controlnets.{i}.name", "ControlNet", controlnets, is_well_formed=is_well_formed)
        _check_fields(control, f"controlnets.{i}.")


def check_prompts(size: RequestSize, limits: ImageLimits) -> None:
    """Raise `RequestError`, naming the field, if a prompt has more tokens than text encoders are to read."""
    for param, tokens in size.words.items():
        if tokens > limits.max_prompt_tokens:
            raise RequestError(f"{tokens} tokens are too many; at most {limits.max_prompt_tokens}", param=param)


def _check_name(name: str, param: str, kind: str, known: Container[str], *, is_well_formed: bool) -> None:
    if not is_well_formed:
        raise RequestError(f"{name!r} is not a valid {kind} name", param=param)
    if name not in known:
        raise NotFound(f"there is no {kind} named {name!r}", param=param)


def size_range(text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the least and the most width and height of "512x768", or of "256x256-1024x1024". Raises ValueError."""
    ends = [pixels_of(end) for end in text.split("-", 1)]
    return ends[0], ends[-1]


def nearest_size(width: int, height: int, sizes: Sequence[str], multiple: int = 1) -> tuple[int, int]:
    """Return the size nearest to this one that is allowed and has such edges; this one if there is none."""
    found = []
    for least, most in map(size_range, sizes):
        low, high = [-(-edge // multiple) * multiple for edge in least], [edge // multiple * multiple for edge in most]
        if low[0] <= high[0] and low[1] <= high[1]:
            found.append((min(max(width, low[0]), high[0]), min(max(height, low[1]), high[1])))
    return min(found, key=lambda size: abs(size[0] - width) + abs(size[1] - height), default=(width, height))


def check_size(width: int, height: int, limits: ImageLimits) -> None:
    """Raise `RequestError` for a size that is out of bounds, or no multiple of what the model takes."""
    edges, multiple = (width, height), limits.size_multiple
    if any(edge % multiple for edge in edges):
        raise RequestError(f"both edges must be multiples of {multiple} pixels", param="size")
    if min(edges) < limits.min_edge_px or max(edges) > limits.max_edge_px:
        raise RequestError(f"edges go from {limits.min_edge_px} to {limits.max_edge_px} pixels", param="size")
    if width * height > limits.max_pixels:
        raise RequestError(f"{width}x{height} is more than {limits.max_pixels} pixels", param="size")
    if (width, height) != nearest_size(width, height, limits.sizes):
        allowed = ", ".join(limits.sizes)
        raise RequestError(f"{width}x{height} is not among the sizes that are allowed: {allowed}", param="size")


def check_numbers(request: ImageRequest, limits: ImageLimits, terms: RequestTerms) -> None:
    """Raise `RequestError` for a number that is out of bounds, or a field or sampler's option that the model does not
    take."""
    check_size(request.width, request.height, limits)
    _check_fields(request)
    if request.n > limits.max_images:
        raise RequestError(f"at most {limits.max_images} images", param="n")
    if request.steps > limits.max_steps:
        raise RequestError(f"at most {limits.max_steps} steps", param="num_inference_steps")
    if request.seed < 0 or request.seed + request.n - 1 > MAX_SEED:
        raise RequestError(f"seed + n - 1 must not be above {MAX_SEED}, nor seed below 0", param="seed")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise RequestError("deadline_ms must be positive", param="deadline_ms")
    if len(request.loras) > limits.max_loras:
        raise RequestError(f"at most {limits.max_loras} LoRAs", param="loras")
    check_sampler(request.scheduler, request.sigmas, request.eta, terms.samplers)
    check_takes(request, terms)


def _check_fields(values: ImageRequest | Edit | LoraRef | ControlRef, where: str = "") -> None:
    """Refuse a number that no client could have given."""
    for name, declared in request_fields(type(values)).items():
        value = getattr(values, name)
        if isinstance(value, int | float):
            try:
                declared.check(value)
            except ValidationError as error:
                message = f"{declared.name}: {plain(error.errors()[0]['msg'])}"
                raise RequestError(message, param=where + declared.name) from error


def check_spans(spans: Sequence[tuple[float, float]], limits: ImageLimits) -> None:
    """Raise `RequestError` for too many ControlNets, or one that acts never. `spans`: `(start, end)` of each."""
    if len(spans) > limits.max_controlnets:
        raise RequestError(f"at most {limits.max_controlnets} ControlNets", param="controlnets")
    for i, (start, end) in enumerate(spans):
        if not 0.0 <= start < end <= 1.0:
            raise RequestError("end must be above start, both 0 to 1", param=f"controlnets.{i}.end")


def check_sampler(scheduler: Scheduler, sigmas: Sigmas | None, eta: float, samplers: SamplerChoice) -> None:
    """Raise `RequestError`, naming the field, for a sampler that the model does not take, or an option that the sampler
    does not have."""
    if scheduler not in samplers.among:
        raise RequestError(f"this model takes {', '.join(samplers.among)}, not {scheduler}", param="scheduler")
    if sigmas is not None and scheduler not in samplers.spaced:
        names = f"; {', '.join(samplers.spaced)} take one" if samplers.spaced else ""
        raise RequestError(f"{scheduler} has a spacing of its own with this model{names}", param="sigmas")
    if eta and scheduler is not Scheduler.DDIM:
        raise RequestError(f"eta is the noise of ddim, not of {scheduler}", param="eta")


def check_takes(request: ImageRequest, terms: RequestTerms) -> None:
    """Raise `RequestError`, naming the field, for one that means nothing to the model, unless it says nothing: clients
    send empty texts, and a guidance of 1, which is none."""
    unset = {"guidance_scale": (terms.guidance_scale, 1.0)}
    for name, declared in request_fields(ImageRequest).items():
        is_given = getattr(request, name) not in (*unset.get(name, (declared.default,)), "")
        if declared.only_some and name not in terms.takes and is_given:
            about = f" ({declared.about})" if declared.about else ""
            raise RequestError(f"this model has no use for it{about}", param=declared.name)
    if request.edit is not None and not terms.edits:
        if terms.reads_images:
            raise RequestError("this model reads the whole image, and starts from noise", param="mask")
        raise RequestError("this model starts from no image", param="image")
    if request.edit is not None and request.scheduler not in terms.samplers.starts:
        able = ", ".join(terms.samplers.starts)
        raise RequestError(f"{request.scheduler} cannot start from an image; {able} can", param="scheduler")
    if request.reference is not None and not terms.reads_images:
        raise RequestError("this model reads no image", param="image")


def _check_arrays(request: ImageRequest, edit: Edit) -> None:
    size = (request.height, request.width)
    if edit.image.dtype != np.uint8 or edit.image.shape != (*size, 3):
        raise RequestError(f"the image must be uint8 {(*size, 3)}, not {edit.image.shape}", param="image")
    if edit.mask is not None and (edit.mask.dtype != np.uint8 or edit.mask.shape != size):
        raise RequestError(f"the mask must be uint8 {size}, not {edit.mask.shape}", param="mask")


def check_edit(edit: Edit, steps: int) -> None:
    """Raise `RequestError` for an edit of which no step of so many would run."""
    _check_fields(edit)
    if not edit.steps_of(steps):
        raise RequestError(f"{edit.strength:g} of {steps} steps is not a whole step", param="strength")


def check_policy(request: ImageRequest) -> None:
    """Raise `RequestError` for steps without LoRAs where there are none such, or no others."""
    k = request.lora_free_steps
    if request.lora_policy is LoraPolicy.EXACT and k:
        raise RequestError("lora_free_steps needs lora_policy: bounded_async", param="lora_free_steps")
    if not 0 <= k < request.run_steps:
        raise RequestError(f"with {request.run_steps} steps the LoRAs would never act", param="lora_free_steps")
