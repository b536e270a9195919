"""Which requests the engine accepts. Pure checks; each raises an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.sources.names import is_name
from plait_serving.diffusion.values import (
    MAX_IMAGES,
    MAX_SCALE,
    MAX_SEED,
    NAME_PATTERN,
    ImageRequest,
    LoraPolicy,
    PromptSize,
    SamplerChoice,
    Scheduler,
    Sigmas,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The largest request that an engine accepts; the catalog shows the same object to clients.

    Edges are multiples of `size_multiple` pixels: the VAE's factor times what the family's UNet needs.
    """

    size_multiple: int = 8
    min_edge_px: int = 8
    max_edge_px: int = 4096
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
    samplers: SamplerChoice,
) -> None:
    """Raise `RequestError` or `NotFound`, naming the field, unless the request can run."""
    _check_numbers(request, limits)
    check_sampler(request.scheduler, request.sigmas, request.eta, samplers)
    if not 0.0 <= request.guidance_rescale <= 1.0:
        raise RequestError("guidance_rescale must be 0..1", param="guidance_rescale")
    if request.clip_skip < 0:
        raise RequestError("clip_skip must be 0 or more layers", param="clip_skip")
    _check_edit(request)
    _check_policy(request)
    if len(request.loras) > limits.max_loras:
        raise RequestError(f"at most {limits.max_loras} LoRAs", param="loras")
    for i, lora in enumerate(request.loras):
        _check_name(lora.name, f"loras.{i}.name", "LoRA", loras, is_well_formed=is_name(lora.name))
        if not math.isfinite(lora.scale) or abs(lora.scale) > MAX_SCALE:
            raise RequestError("scale must be a finite number", param=f"loras.{i}.scale")
    if len({lora.name for lora in request.loras}) < len(request.loras):
        raise RequestError("a LoRA may appear only once in a set", param="loras")
    if len(request.controlnets) > limits.max_controlnets:
        raise RequestError(f"at most {limits.max_controlnets} ControlNets", param="controlnets")
    for i, control in enumerate(request.controlnets):
        is_well_formed = NAME_PATTERN.fullmatch(control.name) is not None
        _check_name(control.name, f"controlnets.{i}.name", "ControlNet", controlnets, is_well_formed=is_well_formed)
        if not math.isfinite(control.scale):
            raise RequestError("scale must be a finite number", param=f"controlnets.{i}.scale")
        if not 0.0 <= control.start < control.end <= 1.0:
            raise RequestError("need 0 <= start < end <= 1", param=f"controlnets.{i}.start")


def check_prompts(size: PromptSize, limits: ImageLimits) -> None:
    """Raise `RequestError`, naming the field, if a prompt has more tokens than text encoders are to read."""
    for param, tokens in (("prompt", size.prompt_tokens), ("negative_prompt", size.negative_tokens)):
        if tokens > limits.max_prompt_tokens:
            raise RequestError(f"{tokens} tokens are too many; at most {limits.max_prompt_tokens}", param=param)


def _check_name(name: str, param: str, kind: str, known: Container[str], *, is_well_formed: bool) -> None:
    if not is_well_formed:
        raise RequestError(f"{name!r} is not a valid {kind} name", param=param)
    if name not in known:
        raise NotFound(f"there is no {kind} named {name!r}", param=param)


def _check_numbers(request: ImageRequest, limits: ImageLimits) -> None:
    for param, side in (("width", request.width), ("height", request.height)):
        if side < limits.min_edge_px or side % limits.size_multiple:
            raise RequestError(f"{param} must be a multiple of {limits.size_multiple} pixels, not {side}", param="size")
        if side > limits.max_edge_px:
            raise RequestError(f"{param} may be at most {limits.max_edge_px} pixels", param="size")
    if request.width * request.height > limits.max_pixels:
        raise RequestError(f"size may have at most {limits.max_pixels} pixels", param="size")
    if not 1 <= request.n <= limits.max_images:
        raise RequestError(f"n must be 1..{limits.max_images}", param="n")
    if not 1 <= request.steps <= limits.max_steps:
        raise RequestError(f"num_inference_steps must be 1..{limits.max_steps}", param="num_inference_steps")
    if not math.isfinite(request.guidance_scale) or not 0 <= request.guidance_scale <= MAX_SCALE:
        raise RequestError(f"guidance_scale must be 0..{MAX_SCALE}", param="guidance_scale")
    if request.seed < 0 or request.seed + request.n - 1 > MAX_SEED:
        raise RequestError("seed must be 0..2**63-n", param="seed")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise RequestError("deadline_ms must be positive", param="deadline_ms")
    if not 0 <= request.partial_images <= 3:
        raise RequestError("partial_images must be 0..3", param="partial_images")


def check_sampler(scheduler: Scheduler, sigmas: Sigmas | None, eta: float, samplers: SamplerChoice) -> None:
    """Raise `RequestError`, naming the field, for a sampler that the model does not take, or an option that the sampler
    does not have."""
    if scheduler not in samplers.among:
        raise RequestError(f"this model takes {', '.join(samplers.among)}, not {scheduler}", param="scheduler")
    if sigmas is not None and not samplers.takes_sigmas:
        raise RequestError("this model has a spacing of its own", param="sigmas")
    if sigmas is not None and not scheduler.takes_sigmas:
        names = ", ".join(other for other in Scheduler if other.takes_sigmas)
        raise RequestError(f"{scheduler} has a spacing of its own; {names} take one", param="sigmas")
    if not 0.0 <= eta <= 1.0:
        raise RequestError("eta must be 0..1", param="eta")
    if eta and scheduler is not Scheduler.DDIM:
        raise RequestError(f"eta is the noise of ddim, not of {scheduler}", param="eta")


def _check_edit(request: ImageRequest) -> None:
    edit = request.edit
    if edit is None:
        return
    size = (request.height, request.width)
    if edit.image.dtype != np.uint8 or edit.image.shape != (*size, 3):
        raise RequestError(f"the image must be uint8 {(*size, 3)}, not {edit.image.shape}", param="image")
    if edit.mask is not None and (edit.mask.dtype != np.uint8 or edit.mask.shape != size):
        raise RequestError(f"the mask must be uint8 {size}, not {edit.mask.shape}", param="mask")
    if not 0.0 < edit.strength <= 1.0:
        raise RequestError("strength must be above 0 and at most 1", param="strength")
    if not request.run_steps:
        raise RequestError(f"{edit.strength:g} of {request.steps} steps is not a whole step", param="strength")


def _check_policy(request: ImageRequest) -> None:
    k = request.lora_free_steps
    if request.lora_policy is LoraPolicy.EXACT and k != 0:
        raise RequestError("lora_free_steps needs lora_policy bounded_async", param="lora_free_steps")
    if not 0 <= k < request.run_steps:
        raise RequestError("lora_free_steps must be smaller than the number of steps that run", param="lora_free_steps")
