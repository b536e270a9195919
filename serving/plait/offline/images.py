"""Images without a server: a command's options become the same request body that HTTP accepts, and files come out.

So a wrong value is refused with the same message, the same defaults apply, and the files carry the same parameters.
"""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from os.path import expanduser
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.errors import OrderError, told
from plait.offline.inventory import lora_names, more_models
from plait_serving.diffusion.admission import ImageLimits, check_size
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.knobs import Placement
from plait_serving.http.edge.feed import finished
from plait_serving.http.images.resolve import resolve
from plait_serving.http.images.schemas import EditBody, GenerationBody
from plait_serving.images.codec import OutputFormat, encode_image
from plait_serving.images.config import ImagesSection
from plait_serving.images.infotext import infotext
from plait_serving.images.service import ImageService, Preprocessors, random_seed
from plait_serving.imports import importing
from plait_serving.spelling import choice_hint, hint, plain

SUFFIXES: Mapping[str, OutputFormat] = {
    ".png": OutputFormat.PNG,
    ".jpg": OutputFormat.JPEG,
    ".jpeg": OutputFormat.JPEG,
    ".webp": OutputFormat.WEBP,
}
"""The format by suffix of the output's name."""

_SHOWN = 10  # of the names that there are

Say = Callable[[str, float], None]
"""Receives what is happening and which share of it is done, 0 to 1."""


@contextmanager
def open_local(images: ImagesSection) -> Iterator[ImageService]:
    """Open the engine of a configuration in this process, not warmed up; it is stopped on exit. Raises `ModelError`.

    ControlNets also run in this process, whatever placement the configuration gives: there is no other process. Each
    is loaded when a request names it.
    """
    with importing():  # torch and more: wrong options are refused before
        from plait_serving.deployments.images.hosted import load_images

    knobs = images.knobs.model_copy(update={"controlnet_placement": Placement.LOCAL})
    hosted = load_images(images.model_copy(update={"knobs": knobs}), lora_formats=False, converts=False)
    try:
        yield hosted
    finally:
        hosted.stop(drain_s=0.0)


def parse_order(
    fields: Mapping[str, Any],
    edits: Mapping[str, Any] | None = None,
    *,
    output: Path,
    loras: Sequence[str] = (),
    controlnets: Sequence[str] = (),
    preprocess: bool = False,
) -> GenerationBody:
    """Return what to make, once everything is checked that can be before a model is loaded. Reads the control images,
    and the files of `edits`: the `image` to start from and a `mask`, beside a `strength`. Raises `OrderError`."""
    output_format = SUFFIXES.get(output.suffix.lower())
    if output_format is None:
        raise OrderError(f"--output: {output.name} must end in {', '.join(SUFFIXES)}")
    if not output.resolve().parent.is_dir():
        raise OrderError(f"--output: the folder {output.parent} does not exist")
    if preprocess and not controlnets:
        raise OrderError("--preprocess: needs --controlnet")
    body = {
        **fields,
        "output_format": output_format.value,
        "loras": [named(text, "--lora") for text in loras],
        "controlnets": [_controlnet(text, preprocess) for text in controlnets],
    }
    changed = _edit(edits or {})
    try:
        checked = (EditBody if changed else GenerationBody).model_validate({**body, **changed})
    except ValidationError as error:
        first = error.errors()[0]
        option = option_of(".".join(map(str, first["loc"])))
        raise OrderError(f"{option}: {plain(first['msg'])}{choice_hint(first)}") from error
    max_steps = ImageLimits().max_steps
    if (checked.num_inference_steps or 1) > max_steps:
        raise OrderError(f"--steps: at most {max_steps} steps")
    return checked


def check_order(body: GenerationBody, images: ImagesSection) -> None:
    """Check what the configuration alone tells: names and the size. Raises `OrderError`."""
    models = (*images.base_models, *images.aliases, *more_models(images))
    one = body.model
    named: list[tuple[str, str, Sequence[str], Iterable[str]]] = [
        ("LoRA", "--lora", [it.name for it in body.loras or ()], lora_names(images)),
        ("ControlNet", "--controlnet", [it.name for it in body.controlnets or ()], images.resolved_controlnets()),
        ("model", "--model", [] if one is None or "+" in one else [one], models),
    ]
    for kind, option, names, known in named:
        for name in names:
            if name not in known:
                near = hint(name, known) or f"; there is {', '.join(islice(known, _SHOWN)) or 'none'}"
                raise OrderError(f"{option}: there is no {kind} {name!r}{near}")
    if body.size is not None:
        asked = images.limits
        limits = ImageLimits(max_edge_px=asked.max_edge_px, max_pixels=asked.max_pixels, sizes=asked.sizes)
        with told(RequestError, about="--size", to=OrderError):
            check_size(*body.size, limits)


def _edit(edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an edit adds to a request's body; nothing if there is no image to start from."""
    given = {name: value for name, value in edits.items() if value is not None}
    if given and "image" not in given:
        raise OrderError(f"--{next(iter(given))}: needs --image")
    return {
        name: _file_bytes(value, f"--{name}") if isinstance(value, Path) else value for name, value in given.items()
    }


def _file_bytes(path: Path, option: str) -> bytes:
    try:
        return Path(expanduser(path)).read_bytes()
    except OSError as error:
        raise OrderError(f"{option}: {path}: {error.strerror}") from error


def option_of(param: str | None) -> str:
    """Return the option that a field of the request body came from."""
    field = (param or "").split(".")[0]
    names = {
        "prompt": "PROMPT", "negative_prompt": "--negative", "num_inference_steps": "--steps",
        "guidance_scale": "--guidance", "loras": "--lora", "controlnets": "--controlnet", "output_format": "--output",
    }  # fmt: skip
    return names.get(field, f"--{field.replace('_', '-')}" if field else "the request")


def named(text: str, option: str, whole: str = "") -> dict[str, Any]:
    """Read `NAME[:SCALE]`, the begin of `whole`; without a scale it has none. Raises `OrderError`."""
    name, colon, scale = text.partition(":")
    return {"name": name, **({"scale": _number(scale, option, whole or text)} if colon else {})}


def _controlnet(text: str, preprocess: bool) -> dict[str, Any]:
    """Parse `NAME[:SCALE]=IMAGE`; the image's path may contain any character."""
    left, equals, path = text.partition("=")
    if not equals or not path:
        raise OrderError(f"--controlnet: {text!r} is not NAME=PICTURE")
    image = base64.b64encode(_file_bytes(Path(path), "--controlnet")).decode("ascii")
    return {**named(left, "--controlnet", text), "image": image, "preprocess": preprocess}


def _number(text: str, option: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OrderError(f"{option}: {text!r} in {whole!r} is not a scale")
    return value


def run_order(
    body: GenerationBody, output: Path, service: ImageService, *, preprocessors: Preprocessors, say: Say
) -> dict[str, Any]:
    """Make the images and write their files, `output` or numbered beside it; return what was made, as plain data.
    Raises `OrderError` if the request is at fault, and other errors of the engine.

    Ctrl-C ends the work at the next step, and no file is written.
    """
    try:
        return asyncio.run(_made(body, output, service, preprocessors, say))
    except RequestError as error:
        raise OrderError(f"{option_of(error.param)}: {error.message}") from error
    except OSError as error:
        raise OrderError(f"--output: {error.filename or output}: {error.strerror}") from error


async def _made(
    body: GenerationBody, output: Path, service: ImageService, preprocessors: Preprocessors, say: Say
) -> dict[str, Any]:
    sys.stderr.write("drawing ...\n")  # from here on an interrupt ends the work
    request = resolve(
        body,
        await service.catalog(),
        request_id=f"cli_{secrets.token_hex(4)}",
        random_seed=random_seed(),
        preprocessors=preprocessors,
    )
    events = service.generate(request)
    result = await finished(events, lambda at: say(f"step {at.step}/{at.steps}", at.step / at.steps))
    pictures: list[dict[str, Any]] = []
    for index, image in enumerate(result.images):
        alone = len(result.images) == 1
        path = output if alone else output.with_name(f"{output.stem}-{index + 1}{output.suffix}")
        text = infotext(request, model=request.model, index=index)
        path.write_bytes(encode_image(image, SUFFIXES[output.suffix.lower()], parameters=text))
        pictures.append({"file": str(path), "seed": result.seeds[index], "flagged": result.flagged[index]})
    return {
        "pictures": pictures,
        "model": request.model,
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.steps,
        "timings": {key.removesuffix("_s"): round(seconds, 6) for key, seconds in asdict(result.timings).items()},
    }
