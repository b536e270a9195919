"""A request as the text that A1111 stores in its images, so that other tools can read ours.

Line 1 is the prompt with `<lora:name:scale>` appended, line 2 the negative prompt (if any), the last line
`Key: value` pairs. Source: stable-diffusion-webui, `create_infotext` in modules/processing.py; the ControlNet pairs
follow sd-webui-controlnet. LoRA hashes are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from plait_serving.diffusion.request_fields import request_fields, written
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraPolicy, Scheduler, Sigmas

SAMPLER_NAMES: Mapping[Scheduler, str] = {
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
SPACING_NAMES: Mapping[Sigmas, str] = {
    Sigmas.NORMAL: "Normal", Sigmas.KARRAS: "Karras", Sigmas.EXPONENTIAL: "Exponential", Sigmas.BETA: "Beta",
}  # fmt: skip


def infotext(request: ImageRequest, *, model: str, index: int) -> str:
    """Return the parameters of image `index` of `request`; running them with that seed gives the same image again."""
    tags = "".join(f" <lora:{ref.name}:{written(float(ref.scale))}>" for ref in request.loras)
    lines = [request.prompt + tags]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    lines.append(", ".join(f"{key}: {_quote(value)}" for key, value in _pairs(request, model, index)))
    return "\n".join(lines)


def _pairs(request: ImageRequest, model: str, index: int) -> list[tuple[str, str]]:
    pairs = [
        ("Steps", str(request.steps)),
        ("Sampler", SAMPLER_NAMES[request.scheduler]),
        ("CFG scale", written(request.guidance_scale)),
        ("Seed", str(request.seeds[index])),
        ("Size", f"{request.width}x{request.height}"),
        ("Model", model),
    ]
    if request.sigmas is not None:
        pairs.insert(2, ("Schedule type", SPACING_NAMES[request.sigmas]))
    for name, declared in request_fields(ImageRequest).items():
        value = getattr(request, name)
        if declared.infotext is not None and value and value != declared.default:
            pairs.append((declared.infotext, declared.write(value)))
    if request.edit is not None:
        pairs.append(("Denoising strength", written(request.edit.strength)))
    if request.reference is not None:
        height, width = request.reference.shape[:2]
        pairs.append(("Read image", f"{width}x{height}"))
    pairs += [(f"ControlNet {i}", _control(control)) for i, control in enumerate(request.controlnets)]
    if request.lora_policy is LoraPolicy.BOUNDED_ASYNC:
        pairs.append(("Lora free steps", str(request.lora_free_steps)))
    return pairs


def _control(control: ControlRef) -> str:
    return (
        f"Module: none, Model: {control.name}, Weight: {written(control.scale)}, "
        f"Guidance Start: {written(control.start)}, Guidance End: {written(control.end)}"
    )


def _quote(value: str) -> str:
    """Apply A1111's rule: a value with a comma, colon or newline is a JSON string, and so is what looks like one."""
    is_plain = not value.startswith('"') and not any(mark in value for mark in ",:\n")
    return value if is_plain else json.dumps(value, ensure_ascii=False)
