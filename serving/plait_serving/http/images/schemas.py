"""The wire format: the bodies of the image API, field by field.

Only what can be checked without knowing the models is checked here; `resolve.py` does the rest. `null` means "left
out", as in OpenAI's own client. Unknown fields are refused, because a misspelt `num_inference_step` that is dropped
silently costs more than an error. Numbers are strict: `true` is not 1 and `"20"` is not 20.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from plait_serving.diffusion.sources.names import RULE, composed, is_name
from plait_serving.diffusion.values import (
    MAX_IMAGES,
    MAX_SCALE,
    MAX_SEED,
    NAME_PATTERN,
    LoraPolicy,
    PromptSyntax,
    Scheduler,
    Sigmas,
)
from plait_serving.http.edge.schemas import MAX_DEADLINE_MS, StrictBody
from plait_serving.images.codec import OutputFormat

MAX_PROMPT_CHARS = 32_000  # OpenAI's limit
MAX_MODEL_CHARS = 1024  # a base model and a few LoRAs, whose names may be long
MAX_LIST = 64  # a guard against parsing a million entries; the model's own limits are lower

IGNORED_FIELDS = (
    "quality",
    "style",
    "background",
    "moderation",
    "user",
    "safety_identifier",
    "complexity",
    "svg",
    "frame_count",
    "frame_duration_ms",
)
"""Fields of OpenAI's API that do not apply to these models: accepted, and listed in the response."""


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def _printable(text: str) -> str:
    found = _CONTROL.search(text)
    if found is not None:
        raise PydanticCustomError(
            "control_character",
            "control character U+{code} at position {position}",
            {"code": f"{ord(found[0]):04X}", "position": found.start()},
        )
    return text


def _name(text: str) -> str:
    if NAME_PATTERN.fullmatch(text) is None:  # fullmatch: `$` alone would let a final newline pass
        raise PydanticCustomError(
            "name",
            "a name has 1 to 64 letters, digits, dots, dashes and underscores, and starts with a letter or digit",
        )
    return text


def _lora_name(text: str) -> str:
    name = composed(text)
    if not is_name(name):
        raise PydanticCustomError("name", RULE)
    return name


def _positive_zero(value: float) -> float:
    return value + 0.0  # -0.0 becomes 0.0, so that equal sets print and hash alike


def _enum_value(value: object) -> object:
    return value.value if isinstance(value, Scheduler | Sigmas | PromptSyntax | LoraPolicy | OutputFormat) else value


def _output_format(value: object) -> object:
    if value in ("gif", "svg"):
        raise PydanticCustomError("output_format", "gif and svg are not made here; use png, jpeg or webp")
    return _enum_value(value)


def bool_or_name(value: object) -> object:
    """Check `preprocess`: a validator."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _name(value)
    raise PydanticCustomError("preprocess", "true, false or the name of a preprocessor")


def _upload(value: object) -> object:
    if isinstance(value, str | bytes) and value:
        return value
    raise PydanticCustomError("upload", "a file, or in JSON its base64")


Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARS), AfterValidator(_printable)]
Name = Annotated[str, AfterValidator(_name)]
LoraName = Annotated[str, AfterValidator(_lora_name)]
Scale = Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE), AfterValidator(_positive_zero)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0), AfterValidator(_positive_zero)]


class LoraBody(StrictBody):
    """One LoRA of the set, addressed by name."""

    name: LoraName
    scale: Scale = 1.0


class ControlNetBody(StrictBody):
    """One ControlNet with its control image.

    `image` is base64 (or a data URL) of a PNG, JPEG or WebP and is stretched to the size of the output. With
    `preprocess: true` it is an ordinary image, from which the ControlNet's own preprocessor makes the control map.
    """

    name: Name
    image: str = Field(min_length=1, repr=False)
    scale: Scale = 1.0
    start: Fraction = 0.0
    end: Fraction = 1.0
    preprocess: Annotated[bool | str, BeforeValidator(bool_or_name)] = False


class GenerationBody(StrictBody):
    """`POST /v1/images/generations`: OpenAI's fields, with plait's own at the top level beside them."""

    prompt: Text
    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS), AfterValidator(_printable)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: Annotated[str, Field(max_length=16, description='"WIDTHxHEIGHT" or "auto" (the model\'s own)')] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Annotated[Literal["png", "jpeg", "webp"], BeforeValidator(_output_format)] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100, description="quality of jpeg and webp")] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None

    negative_prompt: Text | None = None
    prompt_syntax: (
        Annotated[
            Literal["plain", "a1111"],
            BeforeValidator(_enum_value),
            Field(description="a1111: (word:1.2), ((word)), [word], BREAK and <lora:name:0.8> have a meaning"),
        ]
        | None
    ) = None
    prompt_2: Annotated[Text, Field(description="SDXL: for the second text encoder; unset: prompt")] | None = None
    negative_prompt_2: Annotated[Text, Field(description="SDXL: as prompt_2")] | None = None
    original_size: Annotated[str, Field(max_length=16, description='SDXL: "WIDTHxHEIGHT"; unset: size')] | None = None
    target_size: Annotated[str, Field(max_length=16, description='SDXL: "WIDTHxHEIGHT"; unset: size')] | None = None
    crop: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=99_999)]],
            Field(min_length=2, max_length=2, description="SDXL: [left, top]; unset: [0, 0]"),
        ]
        | None
    ) = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0.0, le=MAX_SCALE), AfterValidator(_positive_zero)] | None = None
    seed: (
        Annotated[int, Field(ge=-1, le=MAX_SEED, description="image i uses seed + i; random if left out, or -1")] | None
    ) = None
    scheduler: (
        Annotated[
            Literal["ddim", "ddpm", "euler", "euler_a", "heun", "lms", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_sde", "unipc",
                    "lcm"],
            BeforeValidator(_enum_value),
            Field(description="the sampler; heun and dpmpp_sde run the model twice a step"),
        ]
        | None
    ) = None  # fmt: skip
    sigmas: (
        Annotated[
            Literal["normal", "karras", "exponential", "beta"],
            BeforeValidator(_enum_value),
            Field(
                description="how noise levels are spaced; unset: as the model says. Not for ddim, ddpm, euler_a, lcm"
            ),
        ]
        | None
    ) = None
    eta: Annotated[float, Field(ge=0.0, le=1.0, description="noise of ddim"), AfterValidator(_positive_zero)] | None = (
        None
    )
    guidance_rescale: (
        Annotated[
            float,
            Field(ge=0.0, le=1.0, description="0.7 takes back the overexposure of high guidance_scale; 0 does nothing"),
            AfterValidator(_positive_zero),
        ]
        | None
    ) = None
    clip_skip: (
        Annotated[
            int,
            Field(
                ge=0,
                le=64,
                description="text encoder layers that the prompt leaves out, as in diffusers, and with prompt_syntax: "
                "a1111 the negative prompt too; A1111's `Clip skip` is one more",
            ),
        ]
        | None
    ) = None
    loras: Annotated[list[LoraBody], Field(max_length=MAX_LIST)] | None = None
    lora_policy: Annotated[Literal["exact", "bounded_async"], BeforeValidator(_enum_value)] | None = None
    lora_free_steps: Annotated[int, Field(ge=0, description="k of bounded_async")] | None = None
    controlnets: Annotated[list[ControlNetBody], Field(max_length=MAX_LIST)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS, description="from acceptance")] | None = None

    quality: Any = None
    style: Any = None
    background: Any = None
    moderation: Any = None
    user: Any = None
    safety_identifier: Any = None
    complexity: Any = None
    svg: Any = None
    frame_count: Any = None
    frame_duration_ms: Any = None

    @property
    def format(self) -> OutputFormat:
        """The encoding of the images in the response."""
        return OutputFormat(self.output_format or "png")

    @property
    def ignored(self) -> list[str]:
        """The fields that were given but do not apply."""
        names = [name for name in IGNORED_FIELDS if getattr(self, name) is not None]
        if self.output_compression is not None and self.format is OutputFormat.PNG:
            names.append("output_compression")
        return names


ImageFile = Annotated[str | bytes, PlainValidator(_upload), WithJsonSchema({"type": "string", "minLength": 1})]
"""Base64 (or a data URL) of a PNG, JPEG or WebP; in a form the file itself."""


class EditBody(GenerationBody):
    """`POST /v1/images/edits`: a generation that starts from an image. As JSON, or as a form like OpenAI's.

    Without `size` the output has the image's own, rounded down to what the model takes; else the image is stretched.
    """

    image: ImageFile = Field(
        repr=False, description="PNG, JPEG or WebP; without a mask its transparent pixels are made anew, or all of them"
    )
    mask: ImageFile | None = Field(
        None, repr=False, description="of the image's size; its transparent pixels are made anew, or its white ones"
    )
    strength: (
        Annotated[
            float, Field(gt=0.0, le=1.0, description="share of the steps that run; unset: 1 with a mask, else 0.8")
        ]
        | None
    ) = None
    overlay: (
        Annotated[bool, Field(description="put the image's own pixels back outside of the mask; unset: true")] | None
    ) = None

    input_fidelity: Any = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were given but do not apply."""
        return super().ignored if self.input_fidelity is None else [*super().ignored, "input_fidelity"]


class ImageData(BaseModel):
    """One image, or where it is kept for a while. `seed` reproduces it; `flagged`: the safety checker blacked it
    out."""

    b64_json: str | None = None
    url: str | None = None
    seed: int
    flagged: bool


class TimingsBody(BaseModel):
    """Where the time went, in seconds; the parts never overlap."""

    queue: float
    lora: float
    encode: float
    denoise: float
    decode: float
    total: float


class GenerationResponse(BaseModel):
    """OpenAI's ImagesResponse with what is needed to make the same images again."""

    id: str = Field(description="the request id, also in the header x-request-id")
    created: int = Field(description="seconds since 1970")
    data: list[ImageData]
    model: str
    dtype: str = Field(description="what the model computes in: the same on all replicas")
    size: str
    output_format: Literal["png", "jpeg", "webp"]
    seed: int
    scheduler: str
    sigmas: Literal["normal", "karras", "exponential", "beta"] | None
    eta: float
    num_inference_steps: int
    guidance_scale: float
    guidance_rescale: float
    clip_skip: int
    lora_policy: Literal["exact", "bounded_async"]
    lora_free_steps: int
    timings: TimingsBody
    ignored: list[str]
    hints: list[str] = Field(description="what may not be meant as it is written")


class EditResponse(GenerationResponse):
    """A `GenerationResponse` with what an edit adds; `num_inference_steps` is the schedule's, of which a share runs."""

    strength: float
