"""A request as the text that A1111 stores in its images, so that other tools can read ours; and that text of an image
file, where A1111 and plait store it, read without a decoder, in time linear in the file.

Line 1 is the prompt with `<lora:name:scale>` appended, line 2 the negative prompt (if any), the last line
`Key: value` pairs. Source: stable-diffusion-webui, `create_infotext` in modules/processing.py; the ControlNet pairs
follow sd-webui-controlnet. LoRA hashes are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice

from plait_serving.diffusion.request_fields import request_fields, written
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraPolicy, Scheduler, Sigmas
from plait_serving.images.trimming import chunks, tiff_entries, tiff_of

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
_NEGATIVE = "Negative prompt:"


def infotext(request: ImageRequest, *, model: str, index: int) -> str:
    """Return the parameters of image `index` of `request`; running them with that seed gives the same image again."""
    tags = "".join(f" <lora:{ref.name}:{written(float(ref.scale))}>" for ref in request.loras)
    lines = [request.prompt + tags]
    if request.negative_prompt:
        lines.append(f"{_NEGATIVE} {request.negative_prompt}")
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


MAX_TEXT_BYTES = 256 << 10
"""Twice what a prompt and a negative prompt of the longest kind take."""

_KEY = b"parameters"
_NOTES = frozenset({b"EXIF", b"\xe1"})
_UNICODE = b"UNICODE\0"
_EXIF_DIRECTORY, _USER_COMMENT = 0x8769, 0x9286
_PAIR = re.compile(r'\s*(\w[\w /-]*):\s*("(?:[^"\\]|\\.)*"|[^,]*)(?:,|\Z)')
_FEWEST_PAIRS = 3
"""Of a line that is settings: a prompt may end with `style: oil`."""


def read_parameters(raw: bytes) -> str | None:
    """Return the parameters that `encode_image` (or A1111) stored in an image, or None: a PNG's text of that name, or
    EXIF's user comment."""
    for what, chunk in chunks(raw):
        if len(chunk) > MAX_TEXT_BYTES:
            continue
        if what in (b"tEXt", b"iTXt") and chunk[8:].startswith(_KEY + b"\0"):
            body = chunk[8 + len(_KEY) + 1 : -4]
            if what == b"tEXt":
                return body.decode("latin-1")
            if body[:1] == b"\0":  # not deflated, then method, language and translated key
                return body[2:].split(b"\0", 2)[-1].decode("utf-8", "replace")
        elif what in _NOTES and (comment := _comment(chunk)).startswith(_UNICODE):
            return comment[len(_UNICODE) :].decode("utf-16-be", "replace")
    return None


def _comment(note: bytes) -> bytes:
    """Return EXIF's user comment, empty if it has none."""
    tiff, order = tiff_of(note)
    for outer in islice(tiff_entries(tiff, order, tiff[4:8], _EXIF_DIRECTORY), 1):
        for found in tiff_entries(tiff, order, outer[8:], _USER_COMMENT):
            length, at = int.from_bytes(found[4:8], order), int.from_bytes(found[8:], order)
            return tiff[at : at + length]
    return b""


def settings_of(text: str) -> dict[str, str]:
    """Return what such a text says, by A1111's keys: `Prompt`, `Negative prompt`, `Steps` and so on."""
    *lines, last = text.strip().split("\n")
    pairs: dict[str, str] = {}
    at = 0
    while (pair := _PAIR.match(last, at)) is not None and pair.end() > at:
        pairs[pair[1]] = _unquoted(pair[2])
        at = pair.end()
    if len(pairs) < _FEWEST_PAIRS:
        lines, pairs = [*lines, last], {}
    begins = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    prompt, negative = "\n".join(lines[:begins]), "\n".join(lines[begins:]).removeprefix(_NEGATIVE)
    return {"Prompt": prompt.strip(), _NEGATIVE[:-1]: negative.strip(), **pairs}


def _unquoted(value: str) -> str:
    """Take the quotes of JSON off a value."""
    try:
        return str(json.loads(value)) if value.startswith('"') else value.strip()
    except ValueError:
        return value
