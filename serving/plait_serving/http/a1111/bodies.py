"""A1111's requests as plait's own bodies. Pure.

A1111 ignores what it does not know, and its clients send fields of other servers; so do we. What it does know and plait
cannot do is refused by name, unless it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.prompt_syntax import take_loras
from plait_serving.diffusion.values import Scheduler, Sigmas
from plait_serving.http.images.resolve import chosen_model
from plait_serving.http.images.schemas import MAX_LIST, EditBody, GenerationBody
from plait_serving.images.codec import decode_base64, image_size, painted_mask
from plait_serving.images.infotext import SAMPLER_NAMES
from plait_serving.images.service import BaseModelCard, Catalog
from plait_serving.spelling import hint

CHECKPOINT, CLIP_SKIP = "sd_model_checkpoint", "CLIP_stop_at_last_layers"

ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "enable_hr": (False, None), "restore_faces": (False, None), "tiling": (False, None), "styles": ([], None),
    "subseed_strength": (0, None), "seed_resize_from_w": (0, -1, None), "seed_resize_from_h": (0, -1, None),
    "s_churn": (0, None), "s_noise": (1, None), "script_name": ("", "None", None), "infotext": ("", None),
    "refiner_checkpoint": ("", "None", None), "resize_mode": (0, None), "inpainting_fill": (0, 1, None),
    "initial_noise_multiplier": (1, None),
}  # fmt: skip
"""Fields that plait has nothing for, with the values that ask for nothing."""

_SAMPLERS = {each.value: each for each in Scheduler} | {name.lower(): each for each, name in SAMPLER_NAMES.items()}
_AUTOMATIC = ("", "automatic")
_DRAWS_NOISE = (Scheduler.EULER_A, Scheduler.DPMPP_SDE, Scheduler.DPMPP_2M_SDE)
"""Samplers whose `eta` is 1 here, as it is in A1111 unless a request says otherwise."""
_BALANCED = ("Balanced", 0, None)
_NO_MODULE = ("none", "None", "", None)
_IMAGES = ("data:image/", "iVBORw0KGgo", "/9j/", "UklGR")
"""What an image begins with as a text: a data URL, or base64 of a PNG, JPEG or WebP."""


class Txt2Img(BaseModel):
    """`POST /sdapi/v1/txt2img`: what plait reads of it. A field that is left out is the model's default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str = ""
    negative_prompt: str | None = None
    seed: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    batch_size: Annotated[int, Field(ge=1)] = 1
    n_iter: Annotated[int, Field(ge=1)] = 1
    eta: float | None = None
    override_settings: dict[str, Any] | None = None
    alwayson_scripts: dict[str, Any] | None = None
    send_images: bool | None = True


class Img2Img(Txt2Img):
    """`POST /sdapi/v1/img2img`."""

    init_images: Annotated[list[str], Field(max_length=MAX_LIST)]
    denoising_strength: float | None = 0.75
    mask: str | None = None
    mask_blur: Annotated[float | None, Field(ge=0, le=64)] = 4.0
    inpainting_mask_invert: int | None = 0
    inpaint_full_res: bool | None = False


def options_of(checkpoint: str) -> dict[str, Any]:
    """Return A1111's options, as far as there are any here: only the first can be changed."""
    return {CHECKPOINT: checkpoint, CLIP_SKIP: 1, "sd_vae": "Automatic", "samples_format": "png"}


def check_unchanged(settings: Mapping[str, Any], options: Mapping[str, Any], where: str = "") -> None:
    """Raise `RequestError`, by name, for a setting that is to be another than it is."""
    for key, value in settings.items():
        if value is not None and value != options.get(key):
            there = f"it stays {options[key]!r}" if key in options else f"there is no such option{hint(key, options)}"
            raise RequestError(f"{where}{key[:200]}: {there}", param=key)


def checkpoint_in(value: Any) -> str | None:
    """Return the title of a model. Raises `RequestError` for what is none."""
    if not isinstance(value, str | None):
        raise RequestError(f"{CHECKPOINT}: the title of a model is a text", param=CHECKPOINT)
    return value


def asked(given: Txt2Img, checkpoint: str | None, catalog: Catalog) -> tuple[GenerationBody, list[str]]:
    """Return what a request asks for, and what of it means nothing to the model or is done otherwise. `checkpoint`: the
    model of requests that name none. Raises `RequestError` or `NotFound`, or pydantic's ValidationError with plait's
    names of fields."""
    extra = given.model_extra or {}
    for name, nothing in ASKS_NOTHING.items():
        if extra.get(name) not in nothing:
            raise RequestError(f"{name}: plait has nothing for it; leave it at {nothing[0]!r}", param=name)
    settings = dict(given.override_settings or {})
    model = checkpoint_in(settings.pop(CHECKPOINT, None) or checkpoint)
    clip_skip = settings.pop(CLIP_SKIP, None) or 1
    if type(clip_skip) is not int:
        raise RequestError(f"override_settings.{CLIP_SKIP}: must be a whole number", param=CLIP_SKIP)
    check_unchanged(settings, options_of(model or ""), "override_settings.")
    card, _ = chosen_model(model, catalog)
    fields: dict[str, Any] = {
        "model": model,
        "n": given.batch_size * given.n_iter,
        "seed": given.seed,
        "num_inference_steps": given.steps,
        "response_format": "b64_json",
        **_sampling(given, card),
        **_told(given, card),
    }
    of_model = {
        "guidance_scale": given.cfg_scale,
        "negative_prompt": given.negative_prompt or None,
        "clip_skip": clip_skip - 1 or None,
    }
    takes = card.terms.takes
    if "true_cfg_scale" in takes:  # without which it has no use for one, and which A1111 does not know
        takes -= {"negative_prompt"}
    fields |= {name: value for name, value in of_model.items() if name in takes}
    hints = [
        f"{name}: {card.name} has no use for it"
        for name, value in of_model.items()
        if name not in takes and value is not None
    ]
    image = _image(given) if isinstance(given, Img2Img) else None
    fields["controlnets"] = _controls(given.alwayson_scripts or {}, image) or None
    if given.width is not None or given.height is not None:
        fields["size"] = f"{given.width or card.default_width}x{given.height or card.default_height}"
    if not isinstance(given, Img2Img):
        return GenerationBody(**fields), hints
    if given.mask and given.inpaint_full_res:
        hints.append("inpaint_full_res: the whole picture is worked on, not its masked part enlarged")
    strength = given.denoising_strength
    if card.terms.reads_images and strength is not None:
        strength = None
        hints.append(f"denoising_strength: {card.name} reads the image, and starts from noise")
    raw = decode_base64(_image(given), param="init_images")
    fields |= {"image": raw, "mask": _mask(given, raw), "strength": strength}
    return EditBody(**fields), hints


def _told(given: Txt2Img, card: BaseModelCard) -> dict[str, Any]:
    """Return the prompt with its syntax; a model that reads prompts to the letter gets its LoRAs all the same."""
    if "prompt_syntax" in card.terms.takes:
        return {"prompt": given.prompt, "prompt_syntax": "a1111"}
    prompt, loras = take_loras(given.prompt, "prompt")
    return {"prompt": prompt, "loras": [{"name": name, "scale": scale} for name, scale in loras] or None}


def _sampling(given: Txt2Img, card: BaseModelCard) -> dict[str, Any]:
    """Return sampler, spacing and eta. As in A1111, "DPM++ 2M Karras" names the first two, and a sampler with a spacing
    of its own leaves out another one."""
    name, spacing = (given.sampler_name or given.sampler_index or "").strip(), (given.scheduler or "").strip().lower()
    sampler = _SAMPLERS.get(name.lower())
    if sampler is None and name:
        left, _, right = name.lower().rpartition(" ")
        sampler = _SAMPLERS.get(left)
        if sampler is None or right not in tuple(Sigmas):
            names = [SAMPLER_NAMES[each] for each in card.terms.samplers.among]
            raise RequestError(
                f"sampler_name: {name[:64]!r} is none of {', '.join(names)}{hint(name, names)}", param="sampler_name"
            )
        spacing = right if spacing in _AUTOMATIC else spacing
    if spacing not in (*_AUTOMATIC, *Sigmas):
        names = ["automatic", *Sigmas]
        raise RequestError(f"scheduler: {spacing[:64]!r} is none of {', '.join(names)}", param="scheduler")
    used = sampler or card.default_scheduler
    if used in _DRAWS_NOISE and given.eta not in (None, 1.0):
        raise RequestError(f"eta: {SAMPLER_NAMES[used]} draws its noise with 1", param="eta")
    return {
        "scheduler": sampler,
        "sigmas": spacing if spacing not in _AUTOMATIC and used in card.terms.samplers.spaced else None,
        "eta": given.eta if used is Scheduler.DDIM else None,
    }


def _controls(scripts: Mapping[str, Any], image: str | None) -> list[dict[str, Any]]:
    """Return the ControlNets among the scripts; any other one that is to run is refused. `image`: of a unit that has
    none."""
    units: list[Any] = []
    for name, script in scripts.items():
        args: Any = script.get("args") if isinstance(script, dict) else script
        given = args if isinstance(args, list) else [args]
        if name.lower() == "controlnet":
            units += filter(None, given)
        elif any(given) and _is_on(given):
            raise RequestError(f"alwayson_scripts.{name[:64]}: plait has ControlNet alone", param="alwayson_scripts")
    return [_control(unit, image) for unit in units if isinstance(unit, Mapping) and unit.get("enabled", True)]


def _is_on(args: list[Any]) -> bool:
    """Return whether a script with these arguments runs: by A1111's custom the first is the switch, or has it. Before
    it may be an image, or null where none is chosen (ReActor)."""
    others = (None if isinstance(each, str) and each.startswith(_IMAGES) else each for each in args)
    first = next((each for each in others if each is not None), None)
    return (first.get("enabled", first.get("enable")) if isinstance(first, Mapping) else first) is not False


def _control(unit: Mapping[str, Any], image: str | None) -> dict[str, Any]:
    """Return a unit of sd-webui-controlnet as an entry of `controlnets`."""
    given: Any = unit.get("image") or unit.get("input_image")
    mask = unit.get("mask")
    if isinstance(given, dict):
        given, mask = given.get("image"), given.get("mask") or mask
    if mask or unit.get("control_mode") not in _BALANCED:
        what = "mask" if mask else "control_mode"
        raise RequestError(f"ControlNet: plait has nothing for {what}", param="alwayson_scripts")
    module = unit.get("module")
    members = {"scale": unit.get("weight"), "start": unit.get("guidance_start"), "end": unit.get("guidance_end")}
    return {
        "name": unit.get("model"),
        "image": given or image,
        "preprocess": False if module in _NO_MODULE else module,
        **{name: value for name, value in members.items() if value is not None},
    }


def _image(given: Img2Img) -> str:
    if len(given.init_images) != 1:
        raise RequestError(f"init_images: one image at a time, not {len(given.init_images)}", param="init_images")
    return given.init_images[0]


def _mask(given: Img2Img, image: bytes) -> bytes | None:
    if not given.mask:
        return None
    return painted_mask(
        decode_base64(given.mask, param="mask"),
        size=image_size(image, param="init_images"),
        inverted=bool(given.inpainting_mask_invert),
        blur_px=given.mask_blur or 0.0,
        param="mask",
    )
