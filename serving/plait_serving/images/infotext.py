"""A request as the text that A1111 stores in its images, so that other tools can read ours.

Line 1 is the prompt with `<lora:name:scale>` appended, line 2 the negative prompt (if any), the last line
`Key: value` pairs. Source: stable-diffusion-webui, `create_infotext` in modules/processing.py; the ControlNet pairs
follow sd-webui-controlnet. LoRA hashes are left out.
"""

from __future__ import annotations

import json
from types import MappingProxyType

from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraPolicy, PromptSyntax, Scheduler, Sigmas

SAMPLER_NAMES = MappingProxyType(
    {
        Scheduler.DDIM: "DDIM",
        Scheduler.DDPM: "DDPM",
        Scheduler.EULER: "Euler",
        Scheduler.EULER_A: "Euler a",
        Scheduler.HEUN: "Heun",
        Scheduler.LMS: "LMS",
        Scheduler.DPMPP_2M: "DPM++ 2M",
        Scheduler.DPMPP_2M_SDE: "DPM++ 2M SDE",
        Scheduler.DPMPP_SDE: "DPM++ SDE",
        Scheduler.UNIPC: "UniPC",
        Scheduler.LCM: "LCM",
    }
)

SPACING_NAMES = MappingProxyType({
    Sigmas.NORMAL: "Normal", Sigmas.KARRAS: "Karras", Sigmas.EXPONENTIAL: "Exponential", Sigmas.BETA: "Beta",
})  # fmt: skip


def infotext(request: ImageRequest, *, model: str, index: int) -> str:
    """Return the parameters of image `index` of `request`; running them with that seed gives the same image again."""
    tags = "".join(f" <lora:{ref.name}:{_number(ref.scale)}>" for ref in request.loras)
    lines = [request.prompt + tags]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    lines.append(", ".join(f"{key}: {_quote(value)}" for key, value in _pairs(request, model, index)))
    return "\n".join(lines)


def _pairs(request: ImageRequest, model: str, index: int) -> list[tuple[str, str]]:
    pairs = [
        ("Steps", str(request.steps)),
        ("Sampler", SAMPLER_NAMES[request.scheduler]),
        ("CFG scale", _number(request.guidance_scale)),
        ("Seed", str(request.seeds[index])),
        ("Size", f"{request.width}x{request.height}"),
        ("Model", model),
    ]
    if request.sigmas is not None:
        pairs.insert(2, ("Schedule type", SPACING_NAMES[request.sigmas]))
    if request.eta:
        pairs.append(("Eta DDIM", _number(request.eta)))
    if request.guidance_rescale:
        pairs.append(("CFG rescale", _number(request.guidance_rescale)))
    if request.clip_skip:
        pairs.append(("Clip skip", str(request.clip_skip + 1)))  # A1111 counts from 1
    pairs += _prompt_pairs(request)
    if request.edit is not None:
        pairs.append(("Denoising strength", _number(request.edit.strength)))
    pairs += [(f"ControlNet {i}", _control(control)) for i, control in enumerate(request.controlnets)]
    if request.lora_policy is LoraPolicy.BOUNDED_ASYNC:
        pairs.append(("Lora free steps", str(request.lora_free_steps)))
    return pairs


def _prompt_pairs(request: ImageRequest) -> list[tuple[str, str]]:
    pairs = []
    if request.prompt_syntax is not PromptSyntax.PLAIN:
        pairs.append(("Prompt syntax", request.prompt_syntax.value))
    texts = (("Prompt 2", request.prompt_2), ("Negative prompt 2", request.negative_prompt_2))
    pairs += [(key, text) for key, text in texts if text]
    sizes = (("Original size", request.original_size), ("Target size", request.target_size))
    pairs += [(key, f"{size[0]}x{size[1]}") for key, size in sizes if size]
    if request.crop != (0, 0):
        pairs.append(("Crop", f"{request.crop[0]}x{request.crop[1]}"))
    return pairs


def _control(control: ControlRef) -> str:
    return (
        f"Module: none, Model: {control.name}, Weight: {_number(control.scale)}, "
        f"Guidance Start: {_number(control.start)}, Guidance End: {_number(control.end)}"
    )


def _number(value: float) -> str:
    """Return the shortest text that reads back as the same number, without a trailing `.0`."""
    return repr(float(value)).removesuffix(".0")


def _quote(value: str) -> str:
    """Apply A1111's rule: a value with a comma, colon or newline is a JSON string, and so is what looks like one."""
    is_plain = not value.startswith('"') and not any(mark in value for mark in ",:\n")
    return value if is_plain else json.dumps(value, ensure_ascii=False)
